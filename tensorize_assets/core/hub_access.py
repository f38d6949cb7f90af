"""Which Hub is asked, as whom, where its files are kept, and what goes wrong with it in our words.

Tokens, passwords in URLs and signatures stay out of every word. From the import of this module on,
each answer to huggingface_hub is looked at before its client does anything with it.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Generator
from pathlib import Path

import httpx
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import parse_ratelimit_headers

# It has no public name for the client that somebody has set before.
from huggingface_hub.utils._http import (
    _GLOBAL_CLIENT_FACTORY as _client_before,  # pyright: ignore[reportPrivateUsage]
)
from pydantic import ConfigDict, SecretStr, field_validator

from tensorize_assets.core.errors import HubError, HubUnavailableError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.retry_after import retry_after

# By this the requests of this package are told from those of others in the process.
LIBRARY = "tensorize_assets"
# Of what a server says, so much is repeated.
SAID_CHARS = 400

# Asked to wait for longer the client would sleep that long, where nobody can stop it.
_LONGEST_WAIT_S = 60.0

_CLIENT_ERRORS = (
    EntryNotFoundError,
    httpx.HTTPError,
    httpx.InvalidURL,
    httpx.StreamError,
    OSError,
    # The client's and the HTTP library's word for wrong input, and for broken state.
    ValueError,
    RuntimeError,
)
_BUSY = (408, 429, 500, 502, 503, 504)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_REFUSES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EEXIST,
)


class HubAccess(Record):
    """Which Hub, as whom, and where its files are kept.

    Without an endpoint it is the one that huggingface_hub is set to. Without a token the user's
    own login is used, but only there: it is never sent to another endpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint: str | None = None
    token: SecretStr | None = None
    cache_dir: Path

    @field_validator("endpoint")
    @classmethod
    def _without_slash(cls, endpoint: str | None) -> str | None:
        return endpoint.rstrip("/") if endpoint else None

    @field_validator("token")
    @classmethod
    def _sendable(cls, token: SecretStr | None) -> SecretStr | None:
        text = token.get_secret_value().strip() if token else ""
        # The HTTP client quotes a header that it refuses, and the token with it.
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise ValueError("the token holds characters that no token has")
        return SecretStr(text) if text else None


def cache_dir_of(access: HubAccess) -> Path:
    """Return the absolute folder of all downloads."""
    return access.cache_dir.expanduser().resolve()


def repo_dir_of(access: HubAccess, model: str) -> Path:
    """Return the folder of all that is kept of a model, at any commit."""
    return cache_dir_of(access) / repo_folder_name(repo_id=model, repo_type="model")


def snapshot_dir(access: HubAccess, model: str, commit: str) -> Path:
    """Return the folder of a model's files at a commit, whether they are there or not."""
    return repo_dir_of(access, model) / "snapshots" / commit


def endpoint_of(access: HubAccess) -> str:
    """Return the Hub's address, as it may be shown."""
    return _shown(access, access.endpoint or constants.ENDPOINT)


def token_of(access: HubAccess) -> str | bool | None:
    """Return what huggingface_hub takes: a token, None for the user's own login, False for none."""
    if access.token is not None:
        return access.token.get_secret_value()
    return None if access.endpoint in (None, constants.ENDPOINT) else False


@contextlib.contextmanager
def hub_errors(
    access: HubAccess, model: str, revision: str, *, gone: str | None = None
) -> Generator[None]:
    """Say in our words what goes wrong. `gone`: what was there when the revision was resolved."""
    try:
        yield
    except _CLIENT_ERRORS as error:
        if gone and isinstance(error, RevisionNotFoundError | RemoteEntryNotFoundError):
            raise HubUnavailableError(
                f"{gone} is gone from {endpoint_of(access)} since {revision} was resolved: a "
                "force-push, or a repo that was made anew; run again"
            ) from None
        # Without its cause: that one's text is the server's, and may quote the request.
        raise _explain(error, access, model, revision) from None


def not_a_hub(access: HubAccess, error: BaseException) -> HubError:
    """Return the error of an answer that no Hub gives."""
    return HubError(
        f"{endpoint_of(access)} does not answer as the Hub does: {_said(error, access)}; "
        "check the endpoint, and whether a proxy stands in between"
    )


def _check_answer(answer: httpx.Response) -> None:
    """Refuse what the client would do as the Hub says: write elsewhere, or sleep for hours."""
    asked = answer.request
    if LIBRARY not in asked.headers.get("User-Agent", ""):
        return
    after = _retry_after(answer.headers) if answer.status_code in _BUSY else None
    if after is not None and after > _LONGEST_WAIT_S:
        raise HfHubHTTPError("it wants to be left alone for long", response=answer)
    if asked.method != "HEAD":
        return
    # The client names the file in the cache by the one, and its folder by the other.
    etag = answer.headers.get("X-Linked-Etag") or answer.headers.get("ETag")
    name = None if etag is None else etag.lstrip("W/").strip('"')
    commit = answer.headers.get("X-Repo-Commit")
    wanted = re.search("/resolve/([0-9a-f]{40})/", asked.url.path)
    if name is not None and (not name.strip(".") or re.search(r"[/\\\0]", name)):
        said = f"ETag {name[:80]!r}, by which it would be written elsewhere than in the cache"
    elif wanted and commit and commit != wanted[1]:
        said = f"commit {commit[:80]!r}, which is not the one that was asked for"
    else:
        return
    where = str(asked.url.copy_with(query=None, userinfo=b""))
    raise HubError(
        f"{where} is answered with {said}: this Hub, or a proxy before it, is broken or hostile; "
        "check the endpoint"
    )


def _checking_client() -> httpx.Client:
    client = _client_before()
    client.event_hooks["response"].append(_check_answer)
    return client


set_client_factory(_checking_client)


def _explain(error: BaseException, access: HubAccess, model: str, revision: str) -> HubError:
    what = f"{model}@{revision} on {endpoint_of(access)}"
    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and cause is not None:
        return _explain(cause, access, model, revision)
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(
            f"{what} cannot be asked for: HF_HUB_OFFLINE is set; unset it, or run where it is unset"
        )
    if isinstance(error, HfHubHTTPError):
        return _explain_answer(error, access, model, revision)
    if isinstance(error, HFValidationError):
        return HubError(f"{model!r} is no model of the Hub: {_said(error, access)}")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return HubError(f"the endpoint {endpoint_of(access)} is not a URL: {_said(error, access)}")
    if isinstance(error, ValueError | FileMetadataError | httpx.TooManyRedirects):
        return not_a_hub(access, error)
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return HubError(
            f"the disk became full while downloading {what} to {cache_dir_of(access)}; "
            "free some space or use another cache folder"
        )
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return HubError(
            f"{what} cannot be kept in {cache_dir_of(access)}: {_said(error, access)}; "
            "use another cache folder"
        )
    return HubUnavailableError(
        f"{what} could not be read: {_said(error, access)}; check the network and run again"
    )


def _explain_answer(
    error: HfHubHTTPError, access: HubAccess, model: str, revision: str
) -> HubError:
    what = f"{model}@{revision} on {endpoint_of(access)}"
    status = error.response.status_code
    with_token = "authorization" in error.response.request.headers
    if isinstance(error, GatedRepoError):
        account = "the token's account has no access yet" if with_token else "no token was sent"
        return HubError(
            f"{what} is gated and {account}: request access at {endpoint_of(access)}/{model}, then "
            "set a token of the account that has it (HF_TOKEN, or `hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(
            f"{model} on {endpoint_of(access)} has no revision {revision!r}: "
            "name a branch, a tag or a commit that it has"
        )
    if isinstance(error, RepositoryNotFoundError):
        hidden = "the token has no access to it" if with_token else "needs a token, none was sent"
        return HubError(
            f"{model} does not exist on {endpoint_of(access)}, or is private and {hidden}: "
            "check the name, or set a token (HF_TOKEN, or `hf auth login`)"
        )
    if status == 401:
        return HubError(
            f"{endpoint_of(access)} refuses the token (401) for {model}: it is wrong or has "
            "expired; set a valid one (HF_TOKEN, or `hf auth login`)"
        )
    if status in (408, 429) or status >= 500:
        after = _retry_after(error.response.headers)
        when = "try again later" if after is None else f"try again after {after:.0f} s"
        return HubUnavailableError(
            f"{what} answered {status}: {_said(error, access)}; {when}", after
        )
    return HubError(f"{what} answered {status}: {_said(error, access)}")


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds until the server wants to be asked again; None where it does not say."""
    after = retry_after(headers.get("Retry-After"))
    if after is not None:
        return after
    # The Hub's own word for it, which stands in every answer.
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and not limit.remaining else None


def _said(error: BaseException, access: HubAccess) -> str:
    text = _shown(access, " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:SAID_CHARS]


def _shown(access: HubAccess, text: str) -> str:
    """Return `text` without tokens, and URLs without user, password and query (signatures)."""
    if access.token is not None:
        text = text.replace(access.token.get_secret_value(), "***")
    text = re.sub(r"\bhf_\w{6,}", "***", text)
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1", text)
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
