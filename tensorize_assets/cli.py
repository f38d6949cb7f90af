"""`tensorize`: what a person at a terminal does with the package."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Mapping
from os import environ
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.table import Table

from tensorize_assets.cli_build import build
from tensorize_assets.cli_common import (
    FAILED,
    AnyOrPublicKeys,
    AwsProfile,
    CaBundle,
    EndpointUrl,
    Json,
    PublicKeys,
    Region,
    absolute,
    catalog_path,
    err,
    errors,
    home_and_catalog,
    hub_access,
    listed_keys,
    open_place,
    out,
    print_json,
    required_key,
    say,
    seen_folder,
    signer_of,
    trusted_keys,
)
from tensorize_assets.cli_common import home as dagster_home
from tensorize_assets.cli_fleet import fleet
from tensorize_assets.cli_keys import keys_app
from tensorize_assets.cli_reload import reload
from tensorize_assets.cli_serve import fetch, serve
from tensorize_assets.cli_store import store_app
from tensorize_assets.cli_upkeep import audit, retention
from tensorize_assets.cli_webhook import webhook
from tensorize_assets.core import (
    build_keys,
    catalog_check,
    channel,
    hub_config,
    s3,
)
from tensorize_assets.core.catalog import resolve_root
from tensorize_assets.core.copy import copy_build, directory_of
from tensorize_assets.core.errors import CatalogError, ManifestError
from tensorize_assets.core.evidence import Evidence, read_evidence
from tensorize_assets.core.layout import channel_key, model_folder
from tensorize_assets.core.manifest import Manifest, read_manifest, read_unplaced
from tensorize_assets.core.publish import require_same, roll_back
from tensorize_assets.core.seen import forget
from tensorize_assets.core.store import Store
from tensorize_assets.core.verify import verify_folder, verify_place, verify_url

_HELP = """Turn Hugging Face models into verified tensors that vLLM loads straight onto its devices.

Exit codes: 0 done; 1 it was tried and failed, or what was checked is wrong; 2 it was asked
wrongly (unknown option, no such model, no Dagster home).

With --json one JSON document goes to stdout; logs go to stderr.
"""

app = typer.Typer(
    help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
catalog_app = typer.Typer(help="The catalog: which models are built, and how.")
app.add_typer(catalog_app, name="catalog", no_args_is_help=True)
channel_app = typer.Typer(help="Channels: which build is current.", no_args_is_help=True)
app.add_typer(channel_app, name="channel")
app.add_typer(store_app, name="store")
app.add_typer(keys_app, name="keys")
app.command()(build)
app.command()(serve)
app.command()(fetch)
app.command()(reload)
app.command()(fleet)
app.command()(audit)
app.command()(retention)
app.command()(webhook)

Model = Annotated[str, typer.Argument(help="Hub repo id, such as facebook/opt-125m.")]
Suffix = Annotated[str, typer.Argument(help="Suffix of the profile, such as v1.")]


@app.command()
def demo(
    directory: Annotated[
        Path, typer.Option(help="Folder for everything that the demo makes.")
    ] = Path("demo"),
    root: Annotated[
        Literal["s3", "disk"],
        typer.Option(help="Where artifacts go: an S3 server that the demo runs, or a folder."),
    ] = "s3",
    everything: Annotated[
        bool, typer.Option("--all", help="Also tensor_parallel_size 3: three ranks.")
    ] = False,
    serve: Annotated[
        bool, typer.Option(help="At the end, serve what was published and ask it over HTTP.")
    ] = True,
    ui: Annotated[
        bool,
        typer.Option(
            "--ui",
            help="Open Dagster's UI instead, until Ctrl-C: its sensors build what the local Hub "
            "has, and what is pushed to it.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Of the UI.")] = 3000,
    hub_port: Annotated[int, typer.Option(help="Of the local Hub, with --ui.")] = 3100,
    as_json: Json = False,
) -> None:
    """Build, reload, compare, publish and serve a real model through Dagster."""
    from tensorize_assets.demo import run

    if ui:
        from tensorize_assets.demo.ui import ui as open_ui

        with errors():
            code = open_ui(directory.absolute(), root=root, port=port, hub_port=hub_port, say=say)
        raise typer.Exit(code)
    with errors():
        report = run.demo(
            directory.absolute(), root=root, everything=everything, serve=serve, say=say
        )
    if as_json:
        print_json(report)
    else:
        run.show(report, out)
    if not report["success"]:
        raise typer.Exit(FAILED)


@app.command()
def verify(
    directory: Annotated[
        str,
        typer.Argument(help="Artifact directory: a folder, an s3:// URI, or an http(s):// URL."),
    ],
    public_key: AnyOrPublicKeys = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: AwsProfile = None,
    ca_bundle: CaBundle = None,
    as_json: Json = False,
) -> None:
    """Hash every file of an artifact directory and compare with its manifest.

    Needs no vLLM, no key to an encrypted artifact, and no Dagster home. With public keys, given
    or on the catalog's trust list, a manifest that another key signed is refused.
    """
    given = {
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
        "ca_bundle": ca_bundle,
    }
    with errors():
        listed = listed_keys(public_key)
        if directory.lower().startswith(("http://", "https://")):
            report = verify_url(
                directory, listed, ca_bundle=ca_bundle or environ.get("AWS_CA_BUNDLE")
            )
        elif s3.is_s3(directory):
            report = verify_place(open_place(directory, given), listed)
        else:
            report = verify_folder(Path(absolute(directory)), listed)
        signer = signer_of(report.key_id, listed)
    if as_json:
        fields = report.model_dump(mode="json", exclude={"manifest"})
        print_json({**fields, "trusted": signer.trusted, "signed_by_this_home": signer.ours})
    else:
        for problem in report.problems:
            err.print(f"{problem.kind}: {problem.path}: {problem.message}", markup=False)
        if not report.problems:
            out.print(
                f"{report.where}: {report.files} files, {report.bytes:,} bytes, all as the "
                f"manifest says ({signer.said})",
                markup=False,
            )
        for note in report.notes:
            err.print(note, markup=False, style="dim")
    if report.problems:
        raise typer.Exit(FAILED)


@app.command()
def show(model: Model, public_key: PublicKeys = None, as_json: Json = False) -> None:
    """Every channel of a model: which build is current, and what speaks for it."""
    with errors():
        _, catalog = home_and_catalog()
        entry = catalog.models.get(model)
        suffixes = list(entry.profiles) if entry else []
        store, trusted = _store(), trusted_keys(public_key)
        suffixes += [name for name in _channels(store, model) if name not in suffixes]
        if not suffixes:
            raise CatalogError(f"{model} is not in the catalog and nothing of it was published")
        rows = [_channel_row(store, trusted, model, suffix) for suffix in suffixes]
    if as_json:
        print_json({"model": model, "suffixes": rows})
        return
    table = Table(title=model)
    for name in ("suffix", "entry", "build", "commit", "TP", "bytes", "device", "load s", "checks"):
        table.add_column(name, no_wrap=name not in ("device", "checks"), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(str(column.header))) for column in table.columns))
    out.print(table)
    for row in rows:
        lines = {
            "": row.get("directory"),
            "encrypted": row.get("encrypted_directory"),
            "data key": row.get("data_key"),
            "adapters": ", ".join(row.get("adapters", ())),
        }
        for what, line in lines.items():
            if line:
                name = f"{row['suffix']} {what}".rstrip()
                out.print(f"{name}: {line}", markup=False, highlight=False)


@app.command()
def rollback(
    model: Model,
    suffix: Suffix,
    to: Annotated[
        str | None, typer.Option(help="Build id of the channel's history. Default: the last one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make an earlier build current again; it must still have its files and its evidence."""
    with errors():
        trusted = trusted_keys(None)
        entry = roll_back(
            _store(),
            required_key(trusted),
            trusted,
            model=model,
            suffix=suffix,
            to_build_id=to,
            seen=seen_folder(),
        )
    if as_json:
        print_json(entry.model_dump(mode="json"))
    else:
        out.print(f"{model} {suffix} is at build {entry.build_id} (entry {entry.number})")


def _s3_options(side: str) -> tuple[Any, Any, Any, Any]:
    """The options for how S3 is reached on one side of a copy."""
    return (
        typer.Option(f"--{side}-endpoint-url", help=f"URL of the {side}'s S3 server."),
        typer.Option(f"--{side}-region", help=f"Region of the {side}'s bucket."),
        typer.Option(
            f"--{side}-profile", help=f"AWS profile with the {side}'s credentials and endpoint."
        ),
        typer.Option(f"--{side}-ca-bundle", help=f"Certificates to trust of the {side}."),
    )


_SOURCE = _s3_options("source")
_TARGET = _s3_options("target")


@app.command()
def copy(
    source: Annotated[
        str, typer.Argument(help="Artifact directory to copy: a folder or s3:// URI.")
    ],
    target: Annotated[
        str, typer.Argument(help="Root to copy it to: a folder or s3://bucket/prefix.")
    ],
    source_endpoint_url: Annotated[str | None, _SOURCE[0]] = None,
    source_region: Annotated[str | None, _SOURCE[1]] = None,
    source_profile: Annotated[str | None, _SOURCE[2]] = None,
    source_ca_bundle: Annotated[str | None, _SOURCE[3]] = None,
    target_endpoint_url: Annotated[str | None, _TARGET[0]] = None,
    target_region: Annotated[str | None, _TARGET[1]] = None,
    target_profile: Annotated[str | None, _TARGET[2]] = None,
    target_ca_bundle: Annotated[str | None, _TARGET[3]] = None,
    public_key: AnyOrPublicKeys = None,
    as_json: Json = False,
) -> None:
    """Copy a build with its manifest and evidence to another root; verified on arrival.

    Interrupted, it keeps what arrived: run it again. Between two roots of one S3 endpoint the
    bytes do not pass through here. Moves no channel. Each side of two S3 services has its own
    options; a profile holds its keys.
    """
    there = {
        "endpoint_url": source_endpoint_url,
        "region": source_region,
        "profile": source_profile,
        "ca_bundle": source_ca_bundle,
    }
    here = {
        "endpoint_url": target_endpoint_url,
        "region": target_region,
        "profile": target_profile,
        "ca_bundle": target_ca_bundle,
    }
    with errors():
        # Both first: a mistyped target shows before the source is read.
        target_store = open_place(target, here)
        listed = listed_keys(public_key)
        found = read_unplaced(open_place(source, there), "", listed)
        if found is None:
            raise ManifestError(f"{source} has no manifest.json: it is no finished artifact")
        directory = directory_of(found.manifest, absolute(source))
        root = absolute(source).rstrip("/").removesuffix(f"/{directory}")
        report = copy_build(open_place(root, there), directory, target_store, listed, say)
        signer = signer_of(found.key_id, listed)
    if as_json:
        print_json({"target": target, "trusted": signer.trusted, **report._asdict()})
    else:
        out.print(
            f"{target}: {directory}: {report.copied} files copied ({report.copied_bytes:,} bytes, "
            f"{report.server_side} by the store itself), {report.kept} there already, all as the "
            f"manifest says ({signer.said}); {report.evidence} evidence",
            markup=False,
        )
        if not report.evidence:
            err.print("without evidence it cannot be published there", style="yellow")


@channel_app.callback()
def _channel_group() -> None:
    """A group also while it has one command."""


@channel_app.command("accept")
def accept(
    model: Model, suffix: Suffix, public_key: PublicKeys = None, as_json: Json = False
) -> None:
    """Believe a channel as it is now, though more or another of it was seen here before.

    And which data keys its builds have. For a store that was restored from a backup, or a channel
    that was removed on purpose: every other command refuses it, since an old channel that was put
    back looks the same.
    """
    with errors():
        store, trusted = _store(), trusted_keys(public_key)
        found = channel.read_channel(store, model, suffix, trusted)
        where = store.uri(channel_key(model, suffix))
        before = forget(seen_folder(), where)
        keys = build_keys.accept(store, model, suffix, trusted, seen_folder())
        if not (found or before or keys):
            raise CatalogError(f"{where} does not exist, and was never seen here; see to the names")
        # Read again, and noted.
        channel.read_channel(store, model, suffix, trusted, seen_folder())
    number = found.channel.current.number if found else None
    if as_json:
        seen = before and before.number
        refused = [key.where for key in keys]
        print_json({"channel": where, "entry": number, "seen": seen, "data_keys": refused})
    else:
        out.print(
            f"{where}: {f'entry {number}' if number else 'no channel'} is believed from now on"
            + (f"; entry {before.number} was seen before" if before else "")
            + "".join(f"\nso is {key.where}; entry {key.number} was seen before" for key in keys),
            markup=False,
        )


@catalog_app.command("check")
def check(
    file: Annotated[
        Path | None, typer.Argument(help="Catalog file. Default: that of the Dagster home.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Name every mistake in the catalog, with its line and field."""
    with errors():
        path = file or catalog_path(dagster_home())
        problems = catalog_check.check_catalog(path, known_config=_cached_config)
    if as_json:
        print_json({"file": str(path), "problems": [p.model_dump(mode="json") for p in problems]})
    else:
        for problem in problems:
            err.print(str(problem), markup=False, highlight=False)
        if not problems:
            out.print(f"{path}: no mistakes", markup=False)
    if problems:
        raise typer.Exit(FAILED)


@catalog_app.command("sync")
def sync(as_json: Json = False) -> None:
    """Add the catalog's models and suffixes to Dagster's partitions."""
    from tensorize_assets import partitions, running

    with errors():
        home, catalog = home_and_catalog()
        with running.open_instance(home) as instance:
            partitions.add_catalog(instance, catalog)
    pairs = [list(pair) for pair in catalog.pairs()]
    if as_json:
        print_json({"pairs": pairs})
    else:
        out.print(f"{len(pairs)} pairs of model and suffix are partitions")


def main() -> None:
    """Entry point of the `tensorize` command."""
    # As an exception, so that an upload is aborted and temporary files are removed.
    signal.signal(signal.SIGTERM, _leave)
    app()


def _leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


def _store() -> Store:
    home, catalog = home_and_catalog()
    return open_place(resolve_root(catalog, catalog_path(home)))


def _channels(store: Store, model: str) -> Generator[str]:
    folder = f"{model_folder(model)}/"
    for key in store.list(folder):
        name = key.removeprefix(folder)
        if name.endswith(".json") and "/" not in name:
            yield name.removesuffix(".json")


def _channel_row(store: Store, trusted: tuple[str, ...], model: str, suffix: str) -> dict[str, Any]:
    found = channel.read_channel(store, model, suffix, trusted, seen_folder())
    if found is None:
        return {"suffix": suffix, "checks": "nothing published"}
    entry = found.channel.current
    variants: list[Manifest] = []
    for _, directory, sha256 in entry.manifests():
        stored = read_manifest(store, directory, trusted)
        if stored is not None:
            require_same(store, stored, directory, sha256)
            variants.append(stored.manifest)
    evidence = read_evidence(
        store, entry.manifest_sha256, entry.device, entry.vllm_version, trusted
    )
    row: dict[str, Any] = {
        "suffix": suffix,
        "entry": entry.number,
        "build": entry.build_id,
        "commit": entry.commit[:12],
        "directory": store.uri(entry.directory),
        "device": evidence.device_name if evidence else entry.device,
        "checks": _checks(evidence),
        "when": entry.when.isoformat(timespec="seconds"),
    }
    if entry.encrypted is not None:
        row["encrypted_directory"] = store.uri(entry.encrypted.directory)
    if variants:
        row["TP"] = variants[0].tensor_parallel_size
        row["bytes"] = sum(file.size for file in variants[0].files)
        row["adapters"] = [adapter.name for adapter in variants[0].adapters]
    for variant in variants:
        if variant.encryption is not None:
            row["data_key"] = variant.encryption.key_id
    if evidence is not None and evidence.load is not None:
        row["load s"] = round(evidence.load.seconds, 3)
    return row


def _checks(evidence: Evidence | None) -> str:
    if evidence is None:
        return "no evidence"
    passed = sum(check.passed for check in evidence.checks)
    return f"{passed}/{len(evidence.checks)} passed"


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value)


def _cached_config(model: str, revision: str) -> Mapping[str, Any] | None:
    """config.json of a model that was downloaded before; no network."""
    return hub_config.cached_config(hub_access().cache_dir, model, revision)


if __name__ == "__main__":
    main()
