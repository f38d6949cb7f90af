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
    PrivateKeyFile,
    PublicKeys,
    believed_keys,
    catalog_path,
    err,
    errors,
    found_catalog,
    home,
    open_place,
    out,
    own_key,
    print_json,
    private_key_path,
    recipient_key,
    required_key,
    root_of,
    seen_folder,
    signing_key_path,
)
from tensorize_assets.core import rotation, sealing
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.errors import CatalogError, TensorizeAssetsError
from tensorize_assets.core.printable import printable
from tensorize_assets.core.sealing import KeyRecord, PrivateKey
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
    place = (path or private_key_path()).absolute()
    with errors():
        key = sealing.generate_private_key(place)
    if as_json:
        print_json({"private_key_file": str(place), "public_key": key.public_key})
    else:
        _say(f"private key: {place}")
        _say(f"public key:  {key.public_key}")


@keys_app.command("public")
def public(as_json: Json = False) -> None:
    """Print the public keys of this home: what others write into their catalogs. Makes none."""
    with errors():
        signing_key = own_key()
        in_environment = environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
        private_key = None
        if in_environment or private_key_path().exists():
            private_key = _own_private_key()
        if signing_key is None and private_key is None:
            raise CatalogError(
                f"there is no signing key at {signing_key_path()} and no private key at "
                f"{private_key_path()}; the first build makes the one, `tensorize keys "
                "generate` the other"
            )
    if as_json:
        print_json(
            {
                "signing_key": signing_key and signing_key.public_key,
                "signing_key_id": signing_key and signing_key.key_id,
                "public_key": private_key and private_key.public_key,
            }
        )
        return
    if signing_key:
        _say(f"signing key: {signing_key.public_key} (id {signing_key.key_id}; for `trust`)")
    if private_key:
        _say(f"public key:  {private_key.public_key} (for `recipients`)")


@keys_app.command("unseal")
def unseal(
    key_id: _KeyId,
    keyfile: Annotated[
        Path, typer.Argument(help="File to make, for vLLM's `encryption_keyfile`: mode 0600.")
    ],
    root: _Root = None,
    private_key: PrivateKeyFile = None,
    public_key: PublicKeys = None,
    as_json: Json = False,
) -> None:
    """Write a data key, opened with your private key, to a file for vLLM. Remove it after use."""
    place = keyfile.absolute()
    with errors():
        store, trusted = _store(root), believed_keys(public_key)
        own = recipient_key(store, key_id, private_key, trusted)
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
    private_key: PrivateKeyFile = None,
    public_key: PublicKeys = None,
    as_json: Json = False,
) -> None:
    """Add and remove recipients of a data key. Touches no tensor; signed and recorded.

    Who is removed may have kept the data key: only a new one, in a new build, shuts them out.
    """
    with errors():
        added = _recipients(add or [])
        if not added and not remove:
            raise CatalogError("name whom to add or remove: --add NAME=PUBLIC_KEY, --remove NAME")
        store, trusted = _store(root), believed_keys(public_key)
        own = recipient_key(store, key_id, private_key, trusted)
        record = sealing.amend(
            store,
            key_id,
            own,
            required_key(trusted),
            add=added,
            remove=remove or [],
            trusted=trusted,
        )
    catalog = found_catalog()
    if catalog and catalog.recipients and dict(catalog.recipients) != record.recipients:
        err.print(
            "the catalog's recipients are others, and the next run of this build seals its key to "
            f"those: {', '.join(sorted(catalog.recipients))}; change them there too",
            style="yellow",
            markup=False,
            highlight=False,
        )
    if as_json:
        print_json(_as_json(record))
        return
    _say(f"data key {key_id} is sealed to {', '.join(record.recipients)}")
    if note := record.changes[-1].note:
        err.print(note, style="yellow", markup=False, highlight=False)


@keys_app.command("rotate")
def rotate(
    model: Annotated[str, typer.Argument(help="Hub repo id of a model in the catalog.")],
    suffix: Annotated[str, typer.Argument(help="One of its profiles, published encrypted.")],
    as_json: Json = False,
) -> None:
    """Encrypt the published build anew, with a new data key, and publish it when it reloads.

    Nothing is sharded again. If it is interrupted, this command or the next build completes it,
    with the key that was made. The old build stays until it is removed, and opens with its old key.
    """
    with errors():
        catalog = found_catalog()
        if catalog is None:
            raise CatalogError(f"there is no catalog at {catalog_path()}")
        # What is in no profile, or is to be in plaintext, the build would not encrypt.
        if catalog.profile(model, suffix).encryption == "none":
            raise CatalogError(
                f"{model} {suffix} is not encrypted (`encryption: none`): there is no data key to "
                "change"
            )
        store, trusted = _store(None), believed_keys(None)
        begun = rotation.begin(
            store,
            model,
            suffix,
            recipients=catalog.recipients,
            own=_own_private_key(),
            key=required_key(trusted),
            trusted=trusted,
            seen=seen_folder(),
        )
        old = begun.old
        err.print(
            f"data key {begun.new_key_id} {'is made' if begun.made else 'was made before'}; "
            f"building {model} {suffix} with it",
            markup=False,
            highlight=False,
        )
        report = _build(catalog, model, suffix)
        now = rotation.published(store, model, suffix, trusted, seen_folder())
    moved = now.key_id == begun.new_key_id
    report |= {
        "old_key": old.key_id,
        "new_key": begun.new_key_id,
        "old_directory": old.directory,
        "published_key": now.key_id,
        "moved": moved,
    }
    if as_json:
        print_json(report)
    else:
        _show_rotation(report, now)
    if not moved or not report["success"]:
        raise typer.Exit(FAILED)


@keys_app.command("list")
def list_keys(
    key_id: Annotated[
        str | None, typer.Argument(help="One data key, with its history. Default: all.")
    ] = None,
    root: _Root = None,
    public_key: PublicKeys = None,
    as_json: Json = False,
) -> None:
    """Who can open each data key, and who could once."""
    records: list[KeyRecord] = []
    problems: list[str] = []
    with errors():
        store, trusted = _store(root), believed_keys(public_key)
        for name in [key_id] if key_id else sealing.key_ids(store):
            try:
                records.append(sealing.read_record(store, name, trusted).record)
            except TensorizeAssetsError as error:
                # One damaged record must not hide who can open the others.
                problems.append(printable(str(error)))
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


def _build(catalog: Catalog, model: str, suffix: str) -> dict[str, Any]:
    # Dagster takes a second to import, which the other commands do without.
    from tensorize_assets import running

    with running.open_instance(home()) as instance:
        return running.report(running.build_pair(instance, home(), catalog, model, suffix))


def _show_rotation(report: dict[str, Any], now: rotation.Published) -> None:
    _say(f"old data key: {report['old_key']} ({report['old_directory']})")
    _say(f"new data key: {report['new_key']}")
    for line in report["errors"]:
        err.print(f"  {line}", markup=False, highlight=False)
    if report["moved"]:
        _say(f"published:    {now.directory}, encrypted with the new key")
        _say(
            f"The old build still opens with the old key, until it is removed: {now.build_id} has "
            "taken its place in the channel, not in the store."
        )
    elif now.key_id == report["old_key"]:
        held = report.get("published", {}).get("held_by_rollback")
        err.print(
            "the channel has not moved: the build with the old key is still published. "
            + (
                "A rollback holds it there: materialize `published` with `republish: true`"
                if held
                else "Run this command again, or `tensorize build`: both go on with the new key"
            ),
            markup=False,
            highlight=False,
        )
    else:
        err.print(
            f"another build was published: {now.directory}, with data key {now.key_id} of its own. "
            "The model or its profile has changed since the old one was built",
            markup=False,
            highlight=False,
        )


def _own_private_key() -> PrivateKey:
    in_environment = environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
    return sealing.load_private_key(None if in_environment else private_key_path())


def _store(root: str | None) -> Store:
    return open_place(root_of(root))


def _recipients(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        # Base64 ends in `=`, names do not hold one.
        name, separator, key = text.partition("=")
        if not separator or not name or not key.strip("=") or name in found:
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
