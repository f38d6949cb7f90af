"""What S3 and boto3 refuse with, in words of ours: what failed, where, and what to do."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tensorize_assets.core.errors import StoreError, StoreUnavailableError

if TYPE_CHECKING:
    from tensorize_assets.core.s3 import S3Access

# S3's codes, and the statuses that stand in for them where an answer has no body.
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "Forbidden", "403"})
LACKING = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405"})
REFUSED = frozenset({"PreconditionFailed", "412"})
ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})

UNSAFE = (
    "two runs at once could overwrite each other's publication: use a server that honours "
    "If-None-Match and If-Match, or take the risk with `s3.unsafe_no_cas: true`"
)
"""Why a server that fails at conditional writes is refused, and what to do."""

_MAX_SAID = 300


@contextmanager
def explained(verb: str, uri: str, access: S3Access) -> Generator[None]:
    """Turn errors of boto3 into StoreError and StoreUnavailableError.

    `verb` is one of put, get, list, delete, copy, abort and list uploads of. The message says
    what failed, where, in S3's own words and in ours, and what to do. An answer that lacks what S3
    answers with is one too: what is looked up in it is looked up within.
    """
    try:
        yield
    except Exception as error:
        found = _explain(error, verb, uri, access)
        if found is None:
            raise
        # Not chained: the original's text may hold what was signed, and with what.
        raise found from None


def code_of(error: BaseException) -> str:
    """Return S3's code of an error of boto3, the HTTP status where it has none; else ``""``."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return ""
    return str(_part(response, "Error", "Code") or _status_of(error) or "")


def _part(response: Any, *names: str) -> Any:
    for name in names:
        response = response.get(name) if hasattr(response, "get") else None
    return response


def _status_of(error: BaseException) -> int | None:
    return _part(getattr(error, "response", None), "ResponseMetadata", "HTTPStatusCode")


_ACTIONS = {
    "put": "s3:PutObject",
    "get": "s3:GetObject, and s3:ListBucket, without which S3 says so of absent objects too",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "copy": "s3:GetObject at the source and s3:PutObject at the target",
    "abort": "s3:AbortMultipartUpload",
    "list uploads of": "s3:ListBucketMultipartUploads",
}

_SLOW = frozenset(
    {
        "BandwidthLimitExceeded",
        "InternalError",
        "OperationAborted",
        "PriorRequestNotComplete",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "ThrottledException",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
        "XMinioServerNotInitialized",
    }
)

_KEYS = (
    "the keys come from the resource's own setting, the profile, S3_ACCESS_KEY_ID with "
    "S3_SECRET_ACCESS_KEY, or boto3's own chain, whichever comes first"
)
_EXPIRED = "the session token has expired; get a new one, and set all three parts"
_TOKEN_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException"})
_RENEWED = (
    "the session token has expired before its time; the next run gets a new one, and if it stays "
    "so, look at what gives it, and at this machine's clock (NTP)"
)
_CLOCK = "the clocks of this machine and of the server differ; set this machine's (NTP)"

_ADVICE = {
    "NoSuchBucket": "make the bucket, or correct `root`; buckets are never made here",
    "InvalidBucketName": "correct the bucket in `root`",
    "InvalidAccessKeyId": f"this server does not know the access key: {_KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {_KEYS}",
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "InvalidToken": "the session token is not of these keys; set all three parts anew",
    "InvalidClientTokenId": f"this server does not know the access key: {_KEYS}",
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "InvalidObjectState": "the object lies in an archive; restore it to a class that can be read",
    "ObjectLocked": "the object is locked; it goes when its retention ends or its hold is removed",
    "ObjectLockConfigurationNotFoundError": "the bucket has no object lock configuration; give it "
    "one, or remove the lock settings",
    "InvalidRetentionPeriod": "correct the retention of the bucket's object lock",
    "PreconditionFailed": "it was changed or made by somebody else meanwhile; run again",
    "ConditionalRequestConflict": "somebody else writes it at this moment; run again",
    "EntityTooLarge": "this server takes no object or part of this size; see its limits",
    "EntityTooSmall": "this server wants larger parts; report it, with the server's name",
    "KeyTooLongError": "shorten the prefix in `root`, or the suffix",
    "MissingContentLength": "a proxy on the way strips Content-Length; go around it",
    "NotImplemented": "this server lacks a part of S3; `tensorize store check` shows which, and "
    "`s3.checksums: when_required` often helps",
    "MethodNotAllowed": "this server lacks a part of S3, or `s3.addressing` is the wrong one; "
    "`tensorize store check` shows which",
    "QuotaExceeded": "free some space there, or raise the quota",
    "InsufficientStorage": "free some space there",
    "XMinioStorageFull": "free some space there",
    "AccountProblem": "ask the owner of the account",
    "KMS.DisabledException": "enable the KMS key of the bucket",
    "KMS.NotFoundException": "correct the KMS key of the bucket",
    "NoSuchUpload": "its upload was aborted by another run that stored the same object, by "
    "`sweep` or by the bucket's lifecycle; run again",
}

_CHECKSUMS = frozenset(
    {
        "BadDigest",
        "InvalidDigest",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
        "InvalidChecksum",
        "ChecksumMismatch",
        "MalformedTrailerError",
        "IncompleteBody",
    }
)
_REGIONS = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "TemporaryRedirect",
        "IllegalLocationConstraintException",
        "InvalidRegion",
        "InvalidRegionName",
        "301",
        "307",
    }
)
_CHECKSUM_ADVICE = (
    "what arrived is not what was sent, or this server does not know boto3's checksums; set "
    "`s3.checksums: when_required`, and if it stays so look for damage on the way"
)


def _explain(error: Exception, verb: str, uri: str, access: S3Access) -> StoreError | None:
    exceptions: Any = importlib.import_module("botocore.exceptions")
    parsers: Any = importlib.import_module("botocore.parsers")
    urllib3: Any = importlib.import_module("urllib3.exceptions")
    what = f"cannot {verb} {uri} at {access.endpoint}"
    if isinstance(error, exceptions.ClientError):
        return _refusal(error, what, verb, access)
    if "nvalid header value" in str(error):
        # In its own words it would show the header: a key, or a token.
        return StoreError(
            f"{what}: a part of the credentials holds a line break or another character that no "
            "key has; set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the "
            "profile, anew, to nothing but the key"
        )
    # Where Python's limit is met inside the HTTP client, botocore wraps it.
    wrapped: dict[str, Any] = getattr(error, "kwargs", {})
    if isinstance(wrapped.get("error", error), RecursionError):
        # boto3 follows a redirect by asking for the bucket's region, which is redirected too.
        return StoreError(
            f"{what}: the server redirects every request; set `s3.endpoint_url` to where it "
            "answers (https?), or `s3.region` to the bucket's region"
        )
    if isinstance(error, exceptions.BotoCoreError | urllib3.HTTPError):
        return _trouble(error, what, access, exceptions)
    text = str(error)
    if isinstance(error, ValueError) and ("nvalid endpoint" in text or "nvalid IPv6 URL" in text):
        return StoreError(
            f"{what}: the endpoint is no URL; correct `s3.endpoint_url`, S3_ENDPOINT_URL or "
            "AWS_ENDPOINT_URL"
        )
    if isinstance(error, json.JSONDecodeError):
        # S3 itself speaks no JSON. Not shown: what was printed may hold a key.
        return StoreError(
            f"{what}: what should give the credentials gave no JSON; correct the profile's "
            "`credential_process` in ~/.aws/config"
        )
    if isinstance(error, LookupError | ValueError | parsers.ResponseParserError):
        return not_s3(what)
    if isinstance(error, OSError) and "TLS CA certificate" in str(error):
        return StoreError(f"{what}: {error}; correct `s3.ca_bundle` or AWS_CA_BUNDLE")
    if isinstance(error, OSError) and error.filename is not None:
        names = "AWS_WEB_IDENTITY_TOKEN_FILE, the profile's `credential_process` or another setting"
        return StoreError(
            f"{what}: {error.filename}: {error.strerror}; {names} of boto3 names it: correct "
            "that, or unset it"
        )
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return _down(what, str(error) or type(error).__name__)
    return None


def not_s3(what: str) -> StoreError:
    """Return what is said of a server that answers well, and not with what S3 answers with."""
    return StoreError(
        f"{what}: this server does not answer as S3 does; is `s3.endpoint_url` right?"
    )


def _refusal(error: Exception, what: str, verb: str, access: S3Access) -> StoreError:
    """Return what S3's answer means."""
    code, status = code_of(error), _status_of(error) or 0
    message = _part(getattr(error, "response", None), "Error", "Message")
    if code == "NoSuchKey":
        return StoreError(f"{what}: it does not exist; build it again")
    said = _shown(message, access)
    said = f"{what}: {said} ({code})" if said and said != code else f"{what}: {code}"
    if code in _SLOW or (status >= 500 and status not in (501, 507)) or status == 429:
        return StoreUnavailableError(f"{said}; the server is in trouble or busy; run again later")
    if code == "NoSuchUpload":
        return StoreUnavailableError(f"{said}; {_ADVICE[code]}")
    if code in _TOKEN_EXPIRED and access.renews():
        return StoreUnavailableError(f"{said}; {_RENEWED}")
    if code in _REGIONS:
        return StoreError(f"{said}; {_region_advice(error)}")
    if code in _CHECKSUMS:
        return StoreError(f"{said}; {_CHECKSUM_ADVICE}")
    if code == "InvalidRequest" and message and "checksum" in str(message).lower():
        return StoreError(f"{said}; {_CHECKSUM_ADVICE}")
    if code in DENIED:
        action = _ACTIONS.get(verb, "what was asked")
        lock = "; an object lock or a retention may also forbid it" if verb == "delete" else ""
        return StoreError(f"{said}; allow these credentials {action}{lock}")
    if code in ("404", "NotFound"):
        return StoreError(f"{said}; it or its bucket does not exist")
    if code == "400":
        # HEAD has no body to give a reason in.
        return StoreError(f"{said}; the credentials, the region or the clock may be wrong")
    if status == 501:
        return StoreError(f"{said}; {_ADVICE['NotImplemented']}")
    advice = _ADVICE.get(code, "`tensorize store check` tries each verb and says what to set")
    return StoreError(f"{said}; {advice}")


def _region_advice(error: Exception) -> str:
    response: Any = getattr(error, "response", None)
    region = _part(response, "Error", "Region") or _part(
        response, "ResponseMetadata", "HTTPHeaders", "x-amz-bucket-region"
    )
    right = f"`s3.region: {region}`" if region else "`s3.region` to the bucket's region"
    endpoint = _part(response, "Error", "Endpoint")
    also = f", or the endpoint, which would be {endpoint}" if endpoint else ""
    return f"the bucket is in another region: set {right}{also}"


def _trouble(error: Exception, what: str, access: S3Access, exceptions: Any) -> StoreError:
    """Return what kept boto3 from an answer."""
    said = f"{what}: {_shown(error, access)}"
    text = str(error)
    if isinstance(error, exceptions.NoCredentialsError):
        return StoreError(
            f"{what}: no credentials were found, neither set explicitly, nor in S3_ACCESS_KEY_ID "
            "and S3_SECRET_ACCESS_KEY, nor by boto3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "web identity, ~/.aws/credentials and ~/.aws/config (AWS_PROFILE), a container's or an "
            "instance's role; set one of them"
        )
    if isinstance(error, exceptions.PartialCredentialsError):
        return StoreError(f"{said}; set both keys, or neither")
    if isinstance(error, exceptions.ProfileNotFound):
        return StoreError(
            f"{said}; correct `s3.profile` or AWS_PROFILE, or add the profile to ~/.aws/config"
        )
    if isinstance(
        error,
        exceptions.CredentialRetrievalError
        | exceptions.TokenRetrievalError
        | exceptions.UnauthorizedSSOTokenError
        | exceptions.SSOError,
    ):
        return StoreError(f"{said}; get new credentials, as with `aws sso login`")
    if isinstance(error, exceptions.SSLError) or "CERTIFICATE_VERIFY_FAILED" in text:
        if "CERTIFICATE_VERIFY_FAILED" in text or "certificate" in text:
            return StoreError(
                f"{what}: the server's certificate is not trusted; name the certificates to trust "
                "in `s3.ca_bundle` or AWS_CA_BUNDLE"
            )
        return StoreError(f"{said}; does this server speak https at this port?")
    if isinstance(error, exceptions.FlexibleChecksumError):
        # Of an answer: what was damaged on the way may arrive whole the next time.
        return StoreUnavailableError(f"{said}; {_CHECKSUM_ADVICE}")
    if not isinstance(error, exceptions.BotoCoreError) or isinstance(
        error,
        exceptions.ConnectionError | exceptions.HTTPClientError | exceptions.IncompleteReadError,
    ):
        return _down(what, _shown(error, access))
    return StoreError(f"{said}; correct the S3 settings")


def _down(what: str, said: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{what}: {said}; is the server up, and `s3.endpoint_url` right? If so, run again later"
    )


def _shown(said: object, access: S3Access) -> str:
    """Return S3's or boto3's words as they may be shown: short, one line, without secrets."""
    text = str(said or "")
    for secret in _secrets(access):
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    # A query may hold a signature.
    text = without_passwords(re.sub(r"(https?://[^\s\"'?]+)\?[^\s\"']*", r"\1", text))
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]}…"


def without_passwords(text: str) -> str:
    """Return a text whose URLs have no user and no password before the host."""
    return re.sub(r"(https?://)[^\s\"'/]*@", r"\1", text)


_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
)

# What is shorter is no secret, and stands in many words.
_SHORTEST_SECRET = 4


def _secrets(access: S3Access) -> list[str]:
    """Return whatever may be signed with, as it is and as a repr shows it; longest first."""
    found = {os.environ.get(name) for name in _SECRET_VARIABLES}
    given = access.credentials
    if given is not None:
        found |= {given.access_key_id, given.secret_access_key, given.session_token}
    found |= set(access.signed_with())
    known = {form for one in found if one for form in (one, one.strip())}
    shown = known | {repr(one)[1:-1] for one in known} | {repr(one.encode())[2:-1] for one in known}
    return sorted((one for one in shown if len(one) >= _SHORTEST_SECRET), key=len, reverse=True)
