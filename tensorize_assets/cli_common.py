"""What every `tensorize` command has: the Dagster home, exit codes, output, and S3 settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from os import environ
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tensorize_assets.core import jsonio, s3
from tensorize_assets.core.catalog import Catalog, load_catalog
from tensorize_assets.core.errors import (
    CatalogError,
    SignatureError,
    TensorizeAssetsError,
    WorkerError,
)
from tensorize_assets.core.printable import printable
from tensorize_assets.core.signing import (
    KEY_VARIABLE,
    SecretKey,
    check_verify_key,
    load_or_create_signing_key,
    require_own_trusted,
)
from tensorize_assets.core.store import Store, open_store

FAILED = 1
WRONG = 2

_MAX_KEY_FILE = 4096

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

# Without a terminal there is no width to keep to, and tables must not lose digits.
_WIDTH = None if sys.stdout.isatty() else 140


class _Console(Console):
    """A console on which names and fields of a store cannot move the cursor."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = printable(segment.text, keep="\n")
            yield segment if segment.control else Segment(text, segment.style)


out = _Console(soft_wrap=True, width=_WIDTH)
err = _Console(stderr=True, soft_wrap=True)


EndpointUrl = Annotated[str | None, typer.Option(help="URL of an S3 server that is not AWS.")]
Region = Annotated[str | None, typer.Option(help="Region of the bucket.")]
AwsProfile = Annotated[str | None, typer.Option(help="Profile of the AWS configuration files.")]
CaBundle = Annotated[
    str | None, typer.Option(help="File of certificates (PEM) to trust for https.")
]
PublicKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--public-key",
        help="Public signing key that is believed: base64, or a file of it; may be repeated. "
        "Default: the catalog's `trust`, or else this home's own key.",
    ),
]
AnyOrPublicKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--public-key",
        help="Public signing key that is believed: base64, or a file of it; may be repeated. "
        "Default: the catalog's `trust`; without one any key is, and the output says that it was "
        "not checked.",
    ),
]


@contextmanager
def errors() -> Generator[None]:
    """Show an error of ours, or of the file system, and leave with its exit code."""
    try:
        yield
    except TensorizeAssetsError as error:
        # Lists of mistakes, and logs; the others are of one line, whatever they quote.
        lines = isinstance(error, CatalogError | WorkerError)
        _fail(printable(str(error), keep="\n" if lines else ""))
        raise typer.Exit(WRONG if isinstance(error, CatalogError) else FAILED) from error
    except OSError as error:
        said = error.strerror or type(error).__name__
        _fail(printable(f"cannot use {error.filename}: {said}" if error.filename else said))
        raise typer.Exit(FAILED) from error


def _fail(said: str) -> None:
    err.print(f"error: {said}", markup=False, highlight=False)


def print_json(value: object) -> None:
    """Write the one document of `--json`."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def say(line: str) -> None:
    """Write a line of progress, beside the document of `--json`."""
    err.print(line, markup=False)


def home() -> Path:
    """The folder of everything a user edits."""
    # As in definitions, whose import takes as long as Dagster's.
    return Path(environ.get("DAGSTER_HOME") or "dagster_home").absolute()


def catalog_path(folder: Path | None = None) -> Path:
    """The catalog file of a Dagster home."""
    return Path(environ.get("TENSORIZE_CATALOG") or (folder or home()) / "models.yaml")


def found_catalog() -> Catalog | None:
    """The catalog of the Dagster home, where there is one. Raises CatalogError for a wrong one."""
    path = catalog_path()
    try:
        path.lstat()
        is_file = path.is_file()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CatalogError(f"{path} cannot be read: {error.strerror}") from None
    # Not None: what its trust list keeps out would be believed.
    if not is_file:
        raise CatalogError(f"{path} is no file; restore the catalog, or remove it")
    return load_catalog(path)


def open_place(place: str, given: Mapping[str, str | None] | None = None) -> Store:
    """The store at a folder or s3:// URI; S3 is reached as `given` and the catalog say.

    Raises CatalogError for another URL, and as `s3_access`; StoreError for no such store.
    """
    return open_store(absolute(place), s3_access(given) if s3.is_s3(place) else None)


def absolute(place: str) -> str:
    """An s3:// URI as it is, a folder made absolute. Raises CatalogError for another URL."""
    if s3.is_other_url(place):
        raise CatalogError("a place is a folder or s3://bucket/prefix; this is another URL")
    return place if s3.is_s3(place) else str(Path(place).absolute())


def signing_key_path() -> Path:
    """The file of the home's signing key."""
    return home() / "keys" / "signing.key"


def own_key() -> SecretKey | None:
    """The home's signing key; None where there is none, and none is made."""
    path = signing_key_path()
    if not environ.get(KEY_VARIABLE, "").strip() and not path.exists():
        return None
    return load_or_create_signing_key(path)


def seen_folder() -> Path:
    """The folder in which the home keeps how far it saw each channel."""
    # As in definitions.
    return home() / "seen"


def listed_keys(given: Sequence[str] | None) -> tuple[str, ...] | None:
    """The public signing keys given, or else on the catalog's trust list; None without either.

    Raises CatalogError for what is no public key, and for a wrong catalog.
    """
    if given:
        return tuple(_public_key(text) for text in given)
    catalog = found_catalog()
    return catalog.trust if catalog else None


def trusted_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """As `listed_keys`, and without a list the home's own key, where it has one.

    None is made: a new one has signed nothing.
    """
    listed = listed_keys(given)
    if listed is not None:
        return listed
    own = own_key()
    return (own.public_key,) if own else ()


def required_key(trusted: Sequence[str]) -> SecretKey:
    """The home's own key, to sign with. Makes none: nobody would believe it.

    Raises CatalogError when there is none, SignatureError when it is not one of `trusted`.
    """
    own = own_key()
    if own is None:
        raise CatalogError(
            f"there is no signing key at {signing_key_path()} to sign with; put the key of the "
            "home that built there"
        )
    return require_own_trusted(own, trusted)


def _public_key(text: str) -> str:
    try:
        return check_verify_key(text)
    except SignatureError as error:
        try:
            with Path(text).open(encoding="ascii", errors="replace") as stream:
                lines = stream.read(_MAX_KEY_FILE).split()
            return check_verify_key(lines[0] if len(lines) == 1 else "")
        except SignatureError:
            raise CatalogError(f"--public-key {text}: {error}") from None
        except (OSError, ValueError):
            # Not quoted: it may be a secret.
            raise CatalogError(f"--public-key: {error}, and no file of it either") from None


def s3_access(given: Mapping[str, str | None] | None = None) -> s3.S3Access:
    """How S3 is reached: options, then the catalog's `s3`, then the environment.

    Raises CatalogError for a wrong catalog or option, StoreError for credentials that are half
    there.
    """
    catalog = found_catalog()
    settings = (catalog.s3 if catalog else None) or s3.S3Settings()
    changes = {name: value for name, value in (given or {}).items() if value is not None}
    try:
        settings = s3.S3Settings.model_validate({**settings.model_dump(), **changes})
    except ValidationError as error:
        # Not the values: an endpoint may hold a key.
        raise CatalogError(f"S3 settings: {jsonio.describe(error)}") from None
    return s3.resolve(settings)
