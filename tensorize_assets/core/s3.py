"""How S3 is reached: settings, credentials, and boto3's client."""

from __future__ import annotations

import base64
import hashlib
import importlib
import ipaddress
import os
import re
import socket
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field

from tensorize_assets.core import jsonio, layout
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.s3_errors import code_of, explained, without_passwords

ACCESS_VARIABLE = "TENSORIZE_ASSETS_S3_ACCESS"
"""Names the file from which a process of vLLM reads how to reach S3."""

_SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_MAX_ACCESS_BYTES = 64 * 1024

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60
_CONNECTIONS = 32


class S3Settings(jsonio.Record):
    """How an s3:// root is reached; no secrets."""

    endpoint_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^?#@\s]+$",
        description="URL of an S3 server that is not AWS, as in http://127.0.0.1:8333. Without it: "
        "S3_ENDPOINT_URL, then boto3's own settings, then AWS.",
    )
    region: str | None = Field(
        default=None,
        min_length=1,
        description="Region of the bucket. Without it: boto3's own settings. Most servers that are "
        "not AWS take any.",
    )
    profile: str | None = Field(
        default=None,
        min_length=1,
        description="Profile of the AWS configuration files to take credentials from, before "
        "S3_ACCESS_KEY_ID and AWS_* variables.",
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto",
        description="Where the bucket stands in a URL: in its path, or before the host name "
        "(virtual). auto: as AWS wants it there; elsewhere what the server answers to.",
    )
    ca_bundle: str | None = Field(
        default=None,
        min_length=1,
        description="File of certificates (PEM) to trust for https, instead of the system's. "
        "Without it: AWS_CA_BUNDLE.",
    )
    checksums: Literal["when_supported", "when_required"] | None = Field(
        default=None,
        description="when_required: for servers that refuse the checksums boto3 sends by default; "
        "uploads then carry Content-MD5. Without it: boto3's own settings.",
    )
    unsafe_no_cas: bool = Field(
        default=False,
        description="Publish on a server that ignores conditional writes. Two publishers at once "
        "may then lose one publication.",
    )
    reload_url: str | None = Field(
        default=None,
        pattern=r"^(presigned|https?://[^?#@\s]+)$",
        description="How the reload check reads tensors, when not through S3's own API: presigned, "
        "or the URL under which the root is public.",
    )
    max_attempts: int = Field(
        default=5, ge=1, le=20, description="Tries of one request, the first included."
    )


@dataclass(frozen=True)
class S3Credentials:
    """An access key, without blanks around its parts. Shows itself by nothing but its being there.

    Raises StoreError for parts that no request could carry.
    """

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("access_key_id", "secret_access_key"):
            object.__setattr__(self, name, _part_of_key(getattr(self, name), f"`{name}`"))
            if not getattr(self, name):
                raise StoreError(f"`{name}` is empty; set both keys, or neither")
        token = _part_of_key(self.session_token, "`session_token`")
        object.__setattr__(self, "session_token", token or None)

    def to_secrets(self) -> dict[str, bytes]:
        """Return the parts by name, to be handed over apart from everything else."""
        parts = {
            "s3_access_key_id": self.access_key_id,
            "s3_secret_access_key": self.secret_access_key,
            "s3_session_token": self.session_token,
        }
        return {name: part.encode() for name, part in parts.items() if part is not None}

    @staticmethod
    def from_secrets(secrets: Mapping[str, bytes]) -> S3Credentials | None:
        """Return what `to_secrets` gave away; None when `secrets` has none of it.

        Raises StoreError when only a part of it is there.
        """
        key, secret, token = (
            secrets[name].decode() if name in secrets else None
            for name in ("s3_access_key_id", "s3_secret_access_key", "s3_session_token")
        )
        if key is None and secret is None and token is None:
            return None
        if key is None or secret is None:
            raise StoreError(
                "only a part of the S3 credentials was handed over; hand over both keys, or none"
            )
        return S3Credentials(key, secret, token)


@dataclass(frozen=True)
class S3Access:
    """Settings, and credentials or None for boto3's own chain; makes the client for both."""

    settings: S3Settings = field(default_factory=S3Settings)
    credentials: S3Credentials | None = None
    _made: _Made = field(
        default_factory=lambda: _Made(), init=False, repr=False, compare=False, hash=False
    )

    @property
    def client(self) -> Any:
        """boto3's S3 client, thread-safe, the same at each call in one process.

        Raises StoreError for settings that boto3 does not take.
        """
        return self._client("virtual" if self.settings.addressing == "virtual" else None)

    def client_for(self, bucket: str) -> Any:
        """Return the client that addresses `bucket` as the server answers to.

        With addressing `auto` and a server that is not AWS that is found out by the first call.
        Raises StoreError for settings that boto3 does not take.
        """
        client = self.client
        if self.settings.addressing != "auto" or _is_aws(client):
            return client
        with self._made.probing:
            if self._made.style is None:
                self._made.style = self._probe(bucket, client)
        return self._client(self._made.style)

    @property
    def endpoint(self) -> str:
        """The server as messages call it."""
        client = self._made.clients.get((os.getpid(), self._default_style()))
        url = client.meta.endpoint_url if client else self.settings.endpoint_url
        return without_passwords(url) if url else "AWS"

    def signed_with(self) -> Iterator[str | None]:
        """Yield the parts of every key that requests were signed with so far."""
        for client in list(self._made.clients.values()):
            found = client._request_signer._credentials
            # Asked for its parts, a key that is renewed would be renewed.
            found = getattr(found, "_frozen_credentials", found)
            if found is not None:
                yield from (found.access_key, found.secret_key, found.token)

    def renews(self) -> bool:
        """Say whether boto3 renews the key that requests are signed with: a role's, for instance.

        Asked after a request, of the client that made it.
        """
        return any(
            hasattr(client._request_signer._credentials, "refresh_needed")
            for client in list(self._made.clients.values())
        )

    def write(self, path: Path) -> None:
        """Write this to a new file that only its owner can read. Raises StoreError."""
        document = _AccessFile(
            settings=self.settings,
            access_key_id=self.credentials.access_key_id if self.credentials else None,
            secret_access_key=self.credentials.secret_access_key if self.credentials else None,
            session_token=self.credentials.session_token if self.credentials else None,
        )
        data = jsonio.canonical(jsonio.dump_record(document))
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                # A umask only takes bits away, but an ACL of the folder may add some.
                os.fchmod(descriptor, 0o600)
                stream.write(data)
        except OSError as error:
            raise StoreError(
                f"cannot write the S3 access to {path}: {error.strerror}; give it a folder that "
                "this user can write, and a name that is not taken"
            ) from error

    @staticmethod
    def read(path: Path) -> S3Access:
        """Read what `write` wrote. Raises StoreError, also for a file that others can read."""
        try:
            with path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                if status.st_mode & 0o077 or status.st_uid != os.geteuid():
                    raise StoreError(
                        f"{path} holds S3 credentials and others can read or change it: "
                        "chmod 600 it, and have it owned by this user"
                    )
                data = stream.read(_MAX_ACCESS_BYTES)
        except OSError as error:
            raise StoreError(
                f"cannot read the S3 access from {path}: {error.strerror}; "
                f"{ACCESS_VARIABLE} names the file, unset it when it is gone"
            ) from error
        found = jsonio.load_record(_AccessFile, data, str(path))
        if found.access_key_id is None or found.secret_access_key is None:
            return S3Access(found.settings)
        return S3Access(
            found.settings,
            S3Credentials(found.access_key_id, found.secret_access_key, found.session_token),
        )

    def _default_style(self) -> str | None:
        return "virtual" if self.settings.addressing == "virtual" else None

    def _client(self, style: str | None) -> Any:
        made = self._made
        # A client's connections must not be shared with a process that was forked off.
        where = (os.getpid(), style)
        with made.lock:
            if where not in made.clients:
                made.clients[where] = _make_client(self, style)
            return made.clients[where]

    def _probe(self, bucket: str, client: Any) -> str | None:
        """Return the style to address `bucket` in: path, unless only virtual is answered to."""
        host = _host(client)
        if _is_address(host) or _answers_to(client, bucket):
            return None
        # Many names have no such subdomain, and the question would wait for its time-outs.
        try:
            socket.getaddrinfo(f"{bucket}.{host}", None)
        except OSError:
            return None
        return "virtual" if _answers_to(self._client("virtual"), bucket) else None


class _Made:
    """What an S3Access made so far, apart from what it is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.probing = threading.Lock()
        self.clients: dict[tuple[int, str | None], Any] = {}
        self.style: str | None = None

    def __reduce__(self) -> tuple[type[_Made], tuple[()]]:
        # Neither locks nor connections go to another process.
        return _Made, ()


class _AccessFile(jsonio.Record):
    settings: S3Settings
    access_key_id: str | None
    secret_access_key: str | None
    session_token: str | None


def is_s3(root: str) -> bool:
    """Say whether `root` is meant as an S3 URI, which `split_uri` may still refuse."""
    return root.startswith(_SCHEME)


def is_other_url(root: str) -> bool:
    """Say whether `root` is a URL that no store has, as `S3://`, `s3:/` and `gs://` are.

    As a path it would be a folder of that name, and a copy to it a success.
    """
    return not is_s3(root) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", root) is not None


def split_uri(uri: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix; the prefix may be empty.

    Raises StoreError for what is no such URI.
    """
    if not is_s3(uri):
        raise StoreError(f"{uri!r} is no S3 URI; write s3://bucket/prefix")
    bucket, _, prefix = uri.removeprefix(_SCHEME).partition("/")
    if "@" in bucket or ":" in bucket:
        # Not shown: it may hold a key.
        raise StoreError(
            "an S3 URI is s3://bucket/prefix, without credentials, host or port; keys come from "
            "S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY, the server from `s3.endpoint_url`"
        )
    if not bucket:
        raise StoreError(f"{uri!r} names no bucket; write s3://bucket/prefix")
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"{bucket!r} in {uri!r} cannot be a bucket: names have 3 to 63 lower-case letters, "
            "digits, dots and hyphens"
        )
    prefix = prefix.removesuffix("/")
    if "?" in prefix or "#" in prefix:
        raise StoreError(
            "an S3 URI has no query and no fragment (after ? or #); write s3://bucket/prefix"
        )
    return bucket, layout.check_key(prefix) if prefix else ""


@dataclass(frozen=True)
class Preferred:
    """What a command's own options say of S3, where they do."""

    credentials: S3Credentials | None = None
    endpoint_url: str | None = None


_preferred = Preferred()


def prefer(options: Preferred) -> None:
    """Have `resolve` take these before all else from now on: in this process, and nowhere else."""
    global _preferred
    _preferred = options


def resolve(
    settings: S3Settings | None = None,
    credentials: S3Credentials | None = None,
    environ: Mapping[str, str] = os.environ,
) -> S3Access:
    """Return how S3 is reached, each part from the first place that has it.

    Credentials: `credentials`; a command's options (see `prefer`); the profile that `settings`
    names; S3_ACCESS_KEY_ID with S3_SECRET_ACCESS_KEY (and S3_SESSION_TOKEN); boto3's own chain:
    AWS_* variables, web identity (IRSA), the configuration files, container and instance roles.
    Endpoint: a command's options, `settings`, S3_ENDPOINT_URL, boto3's own. What is a pair is taken
    from one place as a whole.

    Raises StoreError when a place has one key of the two, or S3_ENDPOINT_URL is no URL.
    """
    settings = settings or S3Settings()
    if _preferred.endpoint_url is not None:
        settings = settings.model_copy(update={"endpoint_url": _preferred.endpoint_url})
    credentials = credentials or _preferred.credentials
    endpoint = environ.get("S3_ENDPOINT_URL")
    if settings.endpoint_url is None and endpoint:
        try:
            # Its port and brackets are looked at by nothing else before the first request.
            _ = urlsplit(endpoint).port
            settings = S3Settings.model_validate(
                {**settings.model_dump(), "endpoint_url": endpoint}
            )
        except ValueError:
            # Not shown: it may hold a key.
            raise StoreError(
                "S3_ENDPOINT_URL is no URL of a server, as in http://127.0.0.1:8333"
            ) from None
    if credentials is None and settings.profile is None:
        credentials = _from_variables(environ)
    return S3Access(settings, credentials)


def from_environment(environ: Mapping[str, str] = os.environ) -> S3Access:
    """Return the access in the file that ACCESS_VARIABLE names; without it, `resolve()`.

    Raises StoreError as `resolve` and `S3Access.read` do.
    """
    path = environ.get(ACCESS_VARIABLE)
    return S3Access.read(Path(path)) if path else resolve(environ=environ)


# Client


def _make_client(access: S3Access, style: str | None) -> Any:
    settings = access.settings
    bundle = settings.ca_bundle
    if bundle is not None and not Path(bundle).expanduser().is_file():
        raise StoreError(f"`ca_bundle` {bundle} is no file; name a file of certificates (PEM)")
    boto3: Any = importlib.import_module("boto3")
    config: Any = importlib.import_module("botocore.config")
    endpoint = settings.endpoint_url
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": settings.max_attempts},
        "max_pool_connections": _CONNECTIONS,
        "tcp_keepalive": True,
        # boto3 still presigns URLs as of 2006 where it is not told, and newer regions refuse that.
        "signature_version": "s3v4",
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "read_timeout": _READ_TIMEOUT_S,
    }
    if settings.checksums is not None:
        options["request_checksum_calculation"] = settings.checksums
        options["response_checksum_validation"] = settings.checksums
    with explained("reach", endpoint or "S3", access):
        session = boto3.session.Session(profile_name=settings.profile)
        secrets = access.credentials
        given: dict[str, Any] = {
            "region_name": settings.region,
            "endpoint_url": endpoint,
            "verify": str(Path(bundle).expanduser()) if bundle else None,
        }
        if secrets is not None:
            # All three: boto3 takes no token of the environment to these keys.
            given["aws_access_key_id"] = secrets.access_key_id
            given["aws_secret_access_key"] = secrets.secret_access_key
            given["aws_session_token"] = secrets.session_token

        def make(addressing: str) -> Any:
            # Over http boto3 would hash each part once more to sign it, and the server to compare.
            # What arrives is compared by its checksum, as over https, and by the manifest's hash
            # when it is read.
            s3 = {"addressing_style": addressing, "payload_signing_enabled": False}
            merged = config.Config(**options, s3=s3)
            client = session.client("s3", **given, config=merged)
            _recipes[client] = _Recipe(session, given, merged)
            return client

        if style == "virtual" or settings.addressing == "path":
            return make("virtual" if style == "virtual" else "path")
        # The endpoint may also come from boto3's own settings, which only the client knows.
        client = make("auto")
        return client if _is_aws(client) else make("path")


@dataclass(frozen=True)
class _Recipe:
    """What a client was made of, and others that were made of it."""

    session: Any
    given: dict[str, Any]
    config: Any
    others: dict[str, Any] = field(default_factory=dict[str, Any])


_recipes: WeakKeyDictionary[Any, _Recipe] = WeakKeyDictionary()
_recipes_lock = threading.Lock()


def like(client: Any, **options: Any) -> Any:
    """Return a client like `client`, an S3Access's, but for `options` of botocore's Config.

    It has the same credentials and connections of its own, and is made once.
    """
    config: Any = importlib.import_module("botocore.config")
    recipe = _recipes[client]
    with _recipes_lock:
        if (name := repr(options)) not in recipe.others:
            merged = recipe.config.merge(config.Config(**options))
            recipe.others[name] = recipe.session.client("s3", **recipe.given, config=merged)
        return recipe.others[name]


def _host(client: Any) -> str:
    endpoint: str = client.meta.endpoint_url
    return urlsplit(endpoint).hostname or ""


def _is_aws(client: Any) -> bool:
    return _host(client).endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _answers_to(client: Any, bucket: str) -> bool:
    """Say whether the server understands how `client` addresses `bucket`, whatever it answers."""
    exceptions: Any = importlib.import_module("botocore.exceptions")
    try:
        client.list_objects_v2(Bucket=bucket, MaxKeys=1)
    except exceptions.ClientError as error:
        # Servers that want the other style take the bucket for a key, or say so in words of
        # their own. Refusals of keys, rights and clocks come after the address was understood.
        return code_of(error) in _UNDERSTOOD
    except exceptions.BotoCoreError:
        # Nothing was found out; the request that follows explains it.
        return True
    return True


_UNDERSTOOD = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "AuthorizationHeaderMalformed",
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
    }
)


# Checksums


def sums_by_md5(client: Any) -> bool:
    """Say whether uploads carry Content-MD5 instead of the checksums of newer servers."""
    return client.meta.config.request_checksum_calculation == "when_required"


def checksum(client: Any, data: bytes | memoryview) -> dict[str, str]:
    """Return the checksum that the server compares with what arrives, as boto3 takes it."""
    # Given, boto3 computes none: its own would be sent after the data, in a form that many
    # servers do not know.
    if sums_by_md5(client):
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(md5).decode()}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


def algorithm(client: Any) -> dict[str, str]:
    """Return what an upload in parts is begun with, so that its parts may carry `checksum`."""
    return {} if sums_by_md5(client) else {"ChecksumAlgorithm": "CRC32"}


# Credentials


def _from_variables(environ: Mapping[str, str]) -> S3Credentials | None:
    names = ("S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_SESSION_TOKEN")
    key, secret, token = (_part_of_key(environ.get(name), name) for name in names)
    if key and secret:
        return S3Credentials(key, secret, token)
    if key or secret:
        there, missing = names[:2][:: 1 if key else -1]
        raise StoreError(f"{there} is set and {missing} is not; set both, or neither")
    if token:
        raise StoreError(
            "S3_SESSION_TOKEN is set, and the keys that it belongs to are not; set "
            "S3_ACCESS_KEY_ID and S3_SECRET_ACCESS_KEY too, or none of the three"
        )
    return None


def _part_of_key(value: str | None, name: str) -> str | None:
    """Return a part of a key without the blanks that files and editors put around it."""
    part = value.strip() if value else value
    # Sent in a header, such a part would be refused in words that show it.
    if part and (" " in part or not part.isascii() or not part.isprintable()):
        raise StoreError(
            f"{name} holds a blank, a line break or another character that no key has; set it "
            "anew, to nothing but the key"
        )
    return part
