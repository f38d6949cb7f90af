"""`tensorize keys …`: who can open the data keys of encrypted builds."""

from __future__ import annotations

from collections.abc import Sequence
from os import environ
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tensorize_assets.cli_common import (
    FAILED,
    Json,
    catalog_path,
    err,
    errors,
    found_catalog,
    home,
    open_place,
    out,
    own_key,
    print_json,
    signing_key_path,
)
from tensorize_assets.core import sealing
from tensorize_assets.core.catalog import resolve_root
from tensorize_assets.core.errors import CatalogError, TensorizeAssetsError
from tensorize_assets.core.sealing import KeyRecord, PrivateKey, SealingError
from tensorize_assets.core.signing import load_or_create_signing_key
from tensorize_assets.core.store import Store

keys_app = typer.Typer(
    help="Data keys of encrypted builds: stored sealed to recipients, who have private keys. A "
    "private key is read from a file that nobody else can read, or from the environment variable "
    f"{sealing.PRIVATE_KEY_VARIABLE}; it is never an option.",
    no_args_is_help=True,
)

_KeyId = Annotated[str, typer.Argument(help="Id of the data key, 16 hex digits.")]
_Root = Annotated[
    str | None,
    typer.Option(help="Where the builds are: a folder or s3://… . Default: the catalog's root."),
]
_PrivateKey = Annotated[
    Path | None,
    typer.Option(
        "--private-key",
        help=f"File of your private key. Default: {sealing.PRIVATE_KEY_VARIABLE}, or else "
        "keys/private.key in the Dagster home.",
    ),
]
_Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        help="Public signing key (base64) that is believed; may be repeated. Default: that of "
        "this home's own signing key.",
    ),
]


@keys_app.command("generate")
def generate(
    path: Annotated[
        Path | None,
        typer.Argument(help="File to make. Default: keys/private.key in the Dagster home."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a private key in a file that only you can read; never in place of another.

    Prints the public key: what others seal to, and what stands in the catalog.
    """
    place = (path or _default_private_key()).absolute()
    with errors():
        key = sealing.generate_private_key(place)
    if as_json:
        print_json({"private_key_file": str(place), "public_key": key.public_key})
    else:
        _say(f"private key: {place}")
        _say(f"public key:  {key.public_key}")


@keys_app.command("unseal")
def unseal(
    key_id: _KeyId,
    keyfile: Annotated[
        Path, typer.Argument(help="File to make, for vLLM's `encryption_keyfile`: mode 0600.")
    ],
    root: _Root = None,
    private_key: _PrivateKey = None,
    trust: _Trust = None,
    as_json: Json = False,
) -> None:
    """Write a data key, opened with your private key, to a file for vLLM. Remove it after use."""
    place = keyfile.absolute()
    with errors():
        store, trusted = _store(root), _trusted(trust)
        own = _private_key(store, key_id, private_key, trusted)
        with sealing.unseal(store, key_id, own, trusted=trusted) as data_key:
            sealing.write_keyfile(data_key, place)
    if as_json:
        print_json({"key_id": key_id, "keyfile": str(place)})
    else:
        _say(f"data key {key_id}: {place}; remove it when vLLM has loaded")


@keys_app.command("reseal")
def reseal(
    key_id: _KeyId,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", help="NAME=PUBLIC_KEY of who is to open it too; may be repeated."),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", help="Name of who is to open it no longer; may be repeated."),
    ] = None,
    root: _Root = None,
    private_key: _PrivateKey = None,
    trust: _Trust = None,
    as_json: Json = False,
) -> None:
    """Add and remove recipients of a data key. Touches no tensor; signed and recorded.

    Who is removed may have kept the data key: only a new one, in a new build, shuts them out.
    """
    with errors():
        added = _recipients(add or [])
        if not added and not remove:
            raise CatalogError("name whom to add or remove: --add NAME=PUBLIC_KEY, --remove NAME")
        store, trusted = _store(root), _trusted(trust)
        own = _private_key(store, key_id, private_key, trusted)
        record = sealing.amend(
            store,
            key_id,
            own,
            load_or_create_signing_key(signing_key_path()),
            add=added,
            remove=remove or [],
            trusted=trusted,
        )
    if as_json:
        print_json(_as_json(record))
        return
    _say(f"data key {key_id} is sealed to {', '.join(record.recipients)}")
    if note := record.changes[-1].note:
        err.print(note, style="yellow", markup=False, highlight=False)


@keys_app.command("list")
def list_keys(
    key_id: Annotated[
        str | None, typer.Argument(help="One data key, with its history. Default: all.")
    ] = None,
    root: _Root = None,
    trust: _Trust = None,
    as_json: Json = False,
) -> None:
    """Who can open each data key, and who could once."""
    records: list[KeyRecord] = []
    problems: list[str] = []
    with errors():
        store, trusted = _store(root), _trusted(trust)
        for name in [key_id] if key_id else sealing.key_ids(store):
            try:
                records.append(sealing.read_record(store, name, trusted).record)
            except TensorizeAssetsError as error:
                # One damaged record must not hide who can open the others.
                problems.append(str(error))
    if as_json:
        print_json({"keys": [_as_json(record) for record in records], "problems": problems})
    elif key_id:
        for record in records:
            _show_history(record)
    else:
        _show_keys(records)
    for problem in problems:
        err.print(f"error: {problem}", markup=False, highlight=False)
    if problems:
        raise typer.Exit(FAILED)


def _default_private_key() -> Path:
    return home() / "keys" / "private.key"


def _store(root: str | None) -> Store:
    catalog = found_catalog()
    if root is None:
        if catalog is None:
            raise CatalogError(f"give --root: there is no catalog at {catalog_path()}")
        root = resolve_root(catalog, catalog_path())
    return open_place(root)


def _trusted(trust: Sequence[str] | None) -> tuple[str, ...]:
    """The public keys that are believed. Makes no signing key: a new one has signed nothing."""
    if trust:
        return tuple(trust)
    key = own_key()
    if key is None:
        raise CatalogError(
            f"there is no signing key at {signing_key_path()} whose records could be believed: "
            "give --trust with the public key of whoever signed them"
        )
    return (key.public_key,)


def _private_key(
    store: Store, key_id: str, path: Path | None, trusted: Sequence[str]
) -> PrivateKey:
    in_environment = environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
    try:
        return sealing.load_private_key(
            None if path is None and in_environment else path or _default_private_key()
        )
    except SealingError as error:
        record = sealing.read_record(store, key_id, trusted).record
        wrong = f"{error}; data key {key_id}: {sealing.who_can_open(record)}"
    raise SealingError(wrong)


def _recipients(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        # Base64 ends in `=`, names do not hold one.
        name, separator, key = text.partition("=")
        if not separator or not name or name in found:
            raise CatalogError("--add wants NAME=PUBLIC_KEY, and each name once")
        found[name] = key
    return found


def _as_json(record: KeyRecord) -> dict[str, Any]:
    return {
        "key_id": record.key_id,
        "recipients": record.recipients,
        "former": [one.model_dump(mode="json") for one in record.former],
        "changes": [change.model_dump(mode="json") for change in record.changes],
    }


def _show_keys(records: Sequence[KeyRecord]) -> None:
    table = Table()
    for name in ("data key", "recipients", "removed", "changes", "last change (UTC)"):
        table.add_column(name, no_wrap=name == "data key", overflow="fold")
    for record in records:
        last = record.changes[-1]
        table.add_row(
            record.key_id,
            ", ".join(record.recipients),
            ", ".join(one.name for one in record.former),
            str(last.number),
            f"{last.when:%Y-%m-%d %H:%M}",
        )
    out.print(table)


def _show_history(record: KeyRecord) -> None:
    for name, key in record.recipients.items():
        _say(f"{name}: {key}")
    for change in record.changes:
        signs = [f"+{one.name}" for one in change.added]
        signs += [f"-{one.name}" for one in change.removed]
        note = f" ({change.note})" if change.note else ""
        _say(f"{change.number}. {change.when:%Y-%m-%d %H:%M} UTC: {' '.join(signs)}{note}")


def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False)
