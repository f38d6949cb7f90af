"""What every `tensorize` command has: the Dagster home, exit codes, output, and S3 settings."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from os import environ
from pathlib import Path
from typing import Annotated, NamedTuple, cast

import typer
from pydantic import JsonValue, SecretStr, ValidationError
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tensorize_assets.core import jsonio, s3, sealing
from tensorize_assets.core.catalog import Catalog, load_catalog, resolve_root
from tensorize_assets.core.errors import (
    CatalogError,
    SignatureError,
    TensorizeAssetsError,
    WorkerError,
)
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.printable import printable
from tensorize_assets.core.signing import (
    KEY_VARIABLE,
    SecretKey,
    check_verify_key,
    load_or_create_signing_key,
    require_own_trusted,
)
from tensorize_assets.core.store import Reader, Store, open_store

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
_IN_PS = "Shows in the process list, as the variable does not."
S3AccessKeyId = Annotated[
    str | None,
    typer.Option("--s3-access-key-id", help=f"Before S3_ACCESS_KEY_ID. {_IN_PS}"),
]
S3SecretAccessKey = Annotated[
    str | None,
    typer.Option("--s3-secret-access-key", help=f"Before S3_SECRET_ACCESS_KEY. {_IN_PS}"),
]
S3Endpoint = Annotated[
    str | None,
    typer.Option(
        "--s3-endpoint",
        help="URL of an S3 server that is not AWS: before the catalog's and S3_ENDPOINT_URL.",
    ),
]
PublicKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--public-key",
        help="Public signing key that is believed: base64, or a file of it; may be repeated. "
        "Default: the catalog's `trust`, or else this home's own key.",
    ),
]
PrivateKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--private-key",
        help=f"File of your private key. Default: {sealing.PRIVATE_KEY_VARIABLE}, or else "
        "keys/private.key in the Dagster home.",
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


def home_and_catalog() -> tuple[Path, Catalog]:
    """The Dagster home and its catalog. Raises CatalogError for a wrong one, and without one."""
    folder = home()
    return folder, load_catalog(catalog_path(folder))


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
    if not place:
        # It would be the folder one happens to be in.
        raise CatalogError("a place is a folder or s3://bucket/prefix, and this one is empty")
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


def believed_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """As `trusted_keys`. Raises CatalogError when there is none."""
    trusted = trusted_keys(given)
    if not trusted:
        raise CatalogError(
            f"there is no signing key at {signing_key_path()} whose records could be believed: "
            "give --public-key, that of whoever signed them"
        )
    return trusted


def root_of(given: str | None) -> str:
    """The root that was given, or else the catalog's. Raises CatalogError without either."""
    if given is not None:
        return given
    catalog = found_catalog()
    if catalog is None:
        raise CatalogError(f"give --root: there is no catalog at {catalog_path()}")
    return resolve_root(catalog, catalog_path())


def private_key_path() -> Path:
    """The file of the home's private key."""
    return home() / "keys" / "private.key"


def recipient_key(
    store: Reader, key_id: str, path: Path | None, trusted: Sequence[str]
) -> sealing.PrivateKey:
    """The private key at `path`, in the environment, or else the home's.

    Raises SealingError, which says who can open the data key `key_id`, when there is none.
    """
    in_environment = environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
    try:
        return sealing.load_private_key(
            None if path is None and in_environment else path or private_key_path()
        )
    except sealing.SealingError as error:
        record = sealing.read_record(store, key_id, trusted).record
        wrong = f"{error}; data key {key_id}: {sealing.who_can_open(record)}"
    raise sealing.SealingError(wrong)


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


class Signer(NamedTuple):
    """Whose signature a manifest has: whether it is trusted, and whether it is this home's."""

    trusted: bool
    ours: bool | None
    said: str


def signer_of(key_id: str | None, listed: Sequence[str] | None) -> Signer:
    """Who signed a manifest that was believed if there is a list, and read by any key if not."""
    if listed is not None:
        # Without a look at this home: it needs none.
        return Signer(key_id is not None, None, f"signed by key {key_id}, which is trusted")
    own = own_key()
    ours = None if own is None or key_id is None else own.key_id == key_id
    if ours:
        return Signer(True, ours, f"signed by key {key_id}, this home's own")
    not_ours = ", which is NOT this home's" if ours is False else ""
    said = f"signed by key {key_id}{not_ours}, not checked against a trusted key"
    return Signer(False, ours, said)


def hub_access() -> HubAccess:
    """The Hub as the home's runs reach it."""
    # As in definitions and resources.hub, whose import takes as long as Dagster's.
    token = environ.get("HF_TOKEN")
    return HubAccess(
        endpoint=environ.get("HF_ENDPOINT"),
        token=SecretStr(token) if token else None,
        cache_dir=Path(environ.get("TENSORIZE_HUB_CACHE") or home() / "hub"),
    )


def prefer_s3(
    access_key_id: str | None, secret_access_key: str | None, endpoint: str | None
) -> None:
    """Have this process reach S3 as a command's options say, each part that is given.

    Raises CatalogError for half a pair, and for what is no URL; StoreError as S3Credentials.
    """
    credentials: s3.S3Credentials | None = None
    if access_key_id or secret_access_key:
        key = access_key_id or environ.get("S3_ACCESS_KEY_ID")
        secret = secret_access_key or environ.get("S3_SECRET_ACCESS_KEY")
        if not key or not secret:
            raise CatalogError(
                "--s3-access-key-id and --s3-secret-access-key are a pair: give both, or set the "
                "other as S3_ACCESS_KEY_ID or S3_SECRET_ACCESS_KEY"
            )
        # Without S3_SESSION_TOKEN, which belongs to the pair that is set.
        credentials = s3.S3Credentials(key, secret)
    url = None
    if endpoint:
        # tensorizer's own form has no scheme.
        url = endpoint if "://" in endpoint else f"https://{endpoint}"
        try:
            s3.S3Settings(endpoint_url=url)
        except ValidationError:
            # Not shown: it may hold a key.
            raise CatalogError(
                "--s3-endpoint is no URL of a server, as in http://127.0.0.1:8333"
            ) from None
    s3.prefer(s3.Preferred(credentials, url))


def json_object(text: str | None, option: str) -> dict[str, JsonValue]:
    """The JSON object that an option holds; empty without it. Raises CatalogError."""
    if text is None:
        return {}
    try:
        value = jsonio.loads(text)
    except ValueError as error:
        raise CatalogError(f"{option}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CatalogError(
            f"{option}: wants a JSON object, argument by argument, as in '{{\"name\": 1}}'; this "
            f"is {'an array' if isinstance(value, list) else 'a single value'}"
        )
    return cast("dict[str, JsonValue]", value)


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
