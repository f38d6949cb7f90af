"""How S3 is reached, and what is said when it is not."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ConnectionClosedError

from tensorize_assets.core import s3 as s3s
from tensorize_assets.core import s3_errors
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.s3_store import S3Store
from tensorize_assets.core.store_check_bucket import check_bucket
from tensorize_assets.demo.s3_server import REGION, LocalS3

SECRETS = ("topsecretkey", "topsecrettoken")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever runs the tests may have settings of their own."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "S3_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = FILEDEFAULT\naws_secret_access_key = x\n"
        "[other]\naws_access_key_id = FILEOTHER\naws_secret_access_key = x\n"
        "aws_session_token = file-token\n"
    )
    (tmp_path / "config").write_text(
        "[profile other]\nregion = eu-central-1\n"
        "[profile served]\nendpoint_url = http://127.0.0.1:7\n"
        "aws_access_key_id = CONFIGSERVED\naws_secret_access_key = x\n"
    )


def used(access: S3Access) -> tuple[str, str | None]:
    """The access key and session token that requests are signed with."""
    found = access.client._request_signer._credentials
    return found.access_key, found.token


# Where things come from


def test_the_first_place_that_has_credentials_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented order: explicit, S3_* variables, boto3's own chain."""
    assert ("FILEDEFAULT", None) == used(s3s.resolve())
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert ("FILEOTHER", "file-token") == used(s3s.resolve())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AWSVARIABLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "aws-token")
    monkeypatch.delenv("AWS_PROFILE")
    assert ("AWSVARIABLE", "aws-token") == used(s3s.resolve())
    ours = {"S3_ACCESS_KEY_ID": "S3VARIABLE", "S3_SECRET_ACCESS_KEY": "x"}
    assert ("S3VARIABLE", None) == used(s3s.resolve(environ=ours))
    ours["S3_SESSION_TOKEN"] = "s3-token"
    assert ("S3VARIABLE", "s3-token") == used(s3s.resolve(environ=ours))
    explicit = S3Credentials("EXPLICIT", "x")
    assert ("EXPLICIT", None) == used(s3s.resolve(credentials=explicit, environ=ours))


def test_a_profile_in_the_settings_goes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a catalog names is meant for this catalog; variables may be of anything."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AWSVARIABLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    ours = {"S3_ACCESS_KEY_ID": "S3VARIABLE", "S3_SECRET_ACCESS_KEY": "x"}
    access = s3s.resolve(S3Settings(profile="other"), environ=ours)
    assert ("FILEOTHER", "file-token") == used(access)
    assert "eu-central-1" == access.client.meta.region_name


def test_web_identity_and_other_roles_are_left_to_boto3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A pod with a role (IRSA) has no key at all."""
    (tmp_path / "credentials").unlink()
    (tmp_path / "token").write_text("jwt")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/pod")
    access = s3s.resolve()
    assert access.credentials is None
    assert "assume-role-with-web-identity" == access.client._request_signer._credentials.method


@pytest.mark.parametrize("there", ["S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"])
def test_one_key_alone_is_refused(there: str) -> None:
    """The other half must not come from another account's settings."""
    (missing,) = {"S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"} - {there}
    with pytest.raises(StoreError, match=f"{there} is set and {missing} is not"):
        s3s.resolve(environ={there: "x"})


def test_endpoints_come_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3_ENDPOINT_URL is what tensorizer's users have set."""
    ours = {"S3_ENDPOINT_URL": "http://127.0.0.1:2"}
    settings = S3Settings(endpoint_url="http://127.0.0.1:1")
    assert "http://127.0.0.1:1" == s3s.resolve(settings, environ=ours).endpoint
    assert "http://127.0.0.1:2" == s3s.resolve(environ=ours).client.meta.endpoint_url
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:3")
    assert "http://127.0.0.1:3" == s3s.resolve().client.meta.endpoint_url
    assert "http://127.0.0.1:2" == s3s.resolve(environ=ours).client.meta.endpoint_url
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    served = S3Settings(profile="served")
    assert "http://127.0.0.1:7" == s3s.resolve(served).client.meta.endpoint_url
    with pytest.raises(StoreError, match="S3_ENDPOINT_URL is no URL"):
        s3s.resolve(environ={"S3_ENDPOINT_URL": "127.0.0.1:9000"})


def test_a_session_token_is_sent(
    s3: LocalS3, proxy: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary keys are refused without theirs."""
    tokens: list[str | None] = []
    proxy.before = lambda asked: tokens.append(asked.headers.pop("X-Amz-Security-Token", None))
    settings = S3Settings(endpoint_url=proxy.endpoint, region=REGION)
    with_token = S3Credentials(s3.access_key, s3.secret_key, "the-token")
    S3Store(s3_root, S3Access(settings, with_token)).put_bytes("a", b"")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another's")
    without = S3Credentials(s3.access_key, s3.secret_key)
    S3Store(s3_root, S3Access(settings, without)).put_bytes("a", b"")
    assert {"the-token", None} == set(tokens)


# Handing over


def test_credentials_cross_as_named_secrets() -> None:
    """The launcher hands secrets to the worker apart from the request."""
    for given in (S3Credentials("a", "b"), S3Credentials("a", "b", "c")):
        assert given == S3Credentials.from_secrets({**given.to_secrets(), "hf_token": b"x"})
    assert S3Credentials.from_secrets({"hf_token": b"x"}) is None
    with pytest.raises(StoreError, match="only a part"):
        S3Credentials.from_secrets({"s3_access_key_id": b"x"})


@pytest.mark.parametrize(
    "credentials", [None, S3Credentials("a", "b"), S3Credentials("a", "b", "c")]
)
def test_an_access_is_handed_over_in_a_private_file(
    tmp_path: Path, credentials: S3Credentials | None
) -> None:
    """vLLM's rank processes start with a copy of the environment, which others can read."""
    path = tmp_path / "access"
    access = S3Access(S3Settings(region="x", max_attempts=2), credentials)
    access.write(path)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert access == S3Access.read(path)
    assert access == s3s.from_environment({s3s.ACCESS_VARIABLE: str(path)})
    with pytest.raises(StoreError, match="File exists"):
        access.write(path)


def test_a_file_that_others_can_read_is_not_believed(tmp_path: Path) -> None:
    """Whoever could write it could send the data to another server."""
    path = tmp_path / "access"
    S3Access(S3Settings(), S3Credentials("a", SECRETS[0])).write(path)
    path.chmod(0o640)
    with pytest.raises(StoreError, match="chmod 600"):
        S3Access.read(path)
    path.chmod(0o600)
    path.write_text(json.dumps({"settings": {}, "access_key_id": SECRETS[0]}))
    with pytest.raises(StoreError, match="not a valid") as caught:
        S3Access.read(path)
    assert SECRETS[0] not in str(caught.value)
    with pytest.raises(StoreError, match="No such file"):
        s3s.from_environment({s3s.ACCESS_VARIABLE: str(tmp_path / "absent")})


@pytest.mark.parametrize("name", ["S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY", "S3_SESSION_TOKEN"])
@pytest.mark.parametrize("inside", ["\n", " ", "\0", "\x7f", "…"])
def test_a_key_with_a_line_break_is_refused_unseen(name: str, inside: str) -> None:
    """A header that holds it is refused in words that show it."""
    variables = {
        "S3_ACCESS_KEY_ID": "AKIAKEY",
        "S3_SECRET_ACCESS_KEY": "topsecretkey",
        "S3_SESSION_TOKEN": "topsecrettoken",
    }
    parts = list(variables.values())
    around = {key: f" {value}\n" for key, value in variables.items()}
    assert S3Credentials(*parts) == s3s.resolve(environ=around).credentials
    variables[name] = f"topsec{inside}ret"
    with pytest.raises(StoreError, match=name) as error:
        s3s.resolve(environ=variables)
    assert "topsec" not in str(error.value)
    with pytest.raises(StoreError, match=name.removeprefix("S3_").lower()) as error:
        S3Credentials(*variables.values())
    assert "topsec" not in str(error.value)


def test_a_session_token_without_keys_is_refused() -> None:
    """The token of one key with another key, from elsewhere, is refused by S3 without a reason."""
    with pytest.raises(StoreError, match=r"S3_SESSION_TOKEN is set.*S3_ACCESS_KEY_ID"):
        s3s.resolve(environ={"S3_SESSION_TOKEN": "topsecrettoken"})


def test_a_line_break_in_a_key_of_boto3_shows_nothing(
    s3: LocalS3, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 takes what its variables hold as it is, and shows the header it could not send."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecretkey")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "topsecrettoken\nx")
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION, max_attempts=1)
    with pytest.raises(StoreError, match="AWS_SESSION_TOKEN") as error:
        S3Store(s3_root, S3Access(settings)).stat("a.json")
    assert not isinstance(error.value, StoreUnavailableError)
    assert not [secret for secret in SECRETS if secret in str(error.value)]


def test_keys_of_any_place_are_masked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What boto3 found by itself is as secret as what was set here."""
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = FILEKEY\naws_secret_access_key = filesecret\n"
    )
    access = S3Access(S3Settings(region=REGION))
    assert access.client is not None
    monkeypatch.setenv("AWS_SESSION_TOKEN", "topsecret\ntoken")
    words = "filesecret FILEKEY b'topsecret\\ntoken' 'topsecret\ntoken'"
    with pytest.raises(StoreError) as error, s3_errors.explained("get", "s3://b/k", access):
        raise ConnectionClosedError(endpoint_url=words)
    assert not re.search("filesecret|FILEKEY|topsecret", str(error.value))


def test_a_password_in_the_endpoint_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3's variables take URLs that ours refuse."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://someone:topsecretkey@127.0.0.1:9/x")
    access = S3Access(S3Settings(region=REGION, max_attempts=1))
    with pytest.raises(StoreUnavailableError, match=r"http://127\.0\.0\.1:9") as error:
        S3Store("s3://bucket/prefix", access).stat("a.json")
    report = check_bucket("s3://bucket/prefix", access)
    assert "http://127.0.0.1:9/x" == report.facts["endpoint"]
    assert "topsecretkey" not in f"{error.value}{report}{access.endpoint}"


@pytest.mark.parametrize(
    ("variables", "config", "expected"),
    [
        (
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/no/such/token", "AWS_ROLE_ARN": "arn:aws:iam::1:r/p"},
            "",
            "/no/such/token: No such file.*AWS_WEB_IDENTITY_TOKEN_FILE",
        ),
        ({}, "credential_process = echo topsecretkey", "no JSON.*credential_process"),
        ({}, "credential_process = /no/such/program", "/no/such/program.*credential_process"),
        ({"AWS_ENDPOINT_URL": "http://[::1"}, "", "endpoint is no URL.*AWS_ENDPOINT_URL"),
        ({"S3_ENDPOINT_URL": "http://[::1"}, "", "S3_ENDPOINT_URL is no URL"),
        ({"S3_ENDPOINT_URL": "http://127.0.0.1:x"}, "", "S3_ENDPOINT_URL is no URL"),
    ],
)
def test_settings_that_boto3_stumbles_over_are_named(
    variables: dict[str, str],
    config: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """boto3 raises whatever comes, as a missing file's own error, without a word on the setting."""
    (tmp_path / "credentials").unlink()
    (tmp_path / "config").write_text(f"[default]\nregion = {REGION}\n{config}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=expected) as error:
        S3Store("s3://bucket/prefix", s3s.resolve()).stat("a.json")
    assert not isinstance(error.value, StoreUnavailableError)
    assert "topsecretkey" not in str(error.value)


def test_secrets_are_in_no_repr() -> None:
    """Reprs end in logs and tracebacks."""
    access = S3Access(S3Settings(), S3Credentials("AKIAKEY", *SECRETS))
    for shown in (repr(access), str(access), repr(access.credentials), f"{access.credentials}"):
        assert not [secret for secret in (*SECRETS, "AKIAKEY") if secret in shown]


def test_an_access_goes_to_another_process_without_its_client() -> None:
    """Connections must not be shared between processes."""
    access = S3Access(S3Settings(region="x"), S3Credentials("a", "b"))
    assert access.client is access.client
    assert access == pickle.loads(pickle.dumps(access))  # noqa: S301 - made here
    reader, writer = os.pipe()
    here = id(access.client)
    child = os.fork()
    if child == 0:
        os.write(writer, b"other" if id(access.client) != here else b"same")
        os._exit(0)
    os.waitpid(child, 0)
    assert b"other" == os.read(reader, 10)
    os.close(reader)
    os.close(writer)


def test_threads_share_one_client() -> None:
    """Making one takes as long as a hundred requests."""
    access = S3Access(S3Settings(region="x"), S3Credentials("a", "b"))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(id(access.client))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (8, 1) == (len(found), len(set(found)))


# Client


def test_no_transfer_manager_of_boto3_moves_data(
    s3_root: str, s3_access: S3Access, tmp_path: Path
) -> None:
    """Where awscrt is installed boto3 chooses its client unasked, and that ignores the endpoint."""
    code = (
        "import sys, boto3.s3.inject, boto3.s3.transfer\n"
        "def refuse(*a, **k): raise SystemExit('a transfer manager moved data')\n"
        "boto3.s3.inject.create_transfer_manager = refuse\n"
        "boto3.s3.transfer.create_transfer_manager = refuse\n"
        "from pathlib import Path\n"
        "from tensorize_assets.core.store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put_stream('a', [bytes(20 << 20)], size=20 << 20)\n"
        "store.get_file('a', Path(sys.argv[2]))\n"
        "assert store.copy('a', 'b')\n"
    )
    s3_access.write(tmp_path / "access")
    environ = {**os.environ, "TENSORIZE_ASSETS_S3_ACCESS": str(tmp_path / "access")}
    command = [sys.executable, "-c", code, s3_root, str(tmp_path / "file")]
    subprocess.run(command, env=environ, check=True)


@pytest.mark.parametrize("checksums", [None, "when_supported", "when_required"])
def test_checksums_are_boto3s_own_unless_set(
    checksums: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users of stores that break on them have set a variable already."""
    settings = S3Settings(region="x", checksums=checksums)
    config = s3s.resolve(settings).client.meta.config
    assert (checksums or "when_supported") == config.request_checksum_calculation
    assert (checksums or "when_supported") == config.response_checksum_validation
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    config = s3s.resolve(settings).client.meta.config
    assert (checksums or "when_required") == config.request_checksum_calculation


@pytest.mark.parametrize(
    ("given", "addressing", "style"),
    [
        ({}, "auto", "auto"),
        ({}, "path", "path"),
        ({"endpoint_url": "https://s3.eu-central-1.amazonaws.com"}, "auto", "auto"),
        ({"endpoint_url": "http://127.0.0.1:1"}, "auto", "path"),
        ({"endpoint_url": "http://store.test"}, "virtual", "virtual"),
    ],
)
def test_buckets_stand_where_the_settings_or_aws_want_them(
    given: dict[str, Any], addressing: Any, style: str
) -> None:
    """AWS takes new buckets in virtual style only, most others by path."""
    access = s3s.resolve(S3Settings(region="eu-central-1", addressing=addressing, **given))
    assert style == access.client.meta.config.s3["addressing_style"]


def virtual_only(refusal: Any, styles: list[str]) -> Callable[[Any], Any]:
    """A server that wants the bucket before its name, as some providers do."""

    def before(asked: Any) -> Any:
        host = asked.headers["Host"].partition(":")[0]
        bucket = host.removesuffix(".localhost")
        styles.append("path" if bucket == "localhost" else "virtual")
        if bucket == "localhost":
            return refusal(403, "SecondLevelDomainForbidden", "Please use virtual hosted style.")
        asked.target = f"/{bucket}{asked.target}"
        return None

    return before


def test_a_server_that_wants_virtual_style_gets_it(
    s3: LocalS3, proxy: Any, refusal: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out by the first request, and asked once."""
    find = socket.getaddrinfo

    def resolves(host: Any, *args: Any, **kwargs: Any) -> Any:
        return find("127.0.0.1" if str(host).endswith("localhost") else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolves)
    styles: list[str] = []
    proxy.before = virtual_only(refusal, styles)
    settings = S3Settings(endpoint_url=f"http://localhost:{proxy.port}", region=REGION)
    access = S3Access(settings, S3Credentials(s3.access_key, s3.secret_key))
    store = S3Store(s3_root, access)
    store.put_bytes("a b/ü+", b"x", if_absent=True)
    assert ("a b/ü+",) == store.list("")
    assert b"x" == store.open_read("a b/ü+").read()
    assert ("path", 1) == (styles[0], styles.count("path"))


# Bad cases


def said(store: S3Store, act: Callable[[S3Store], object] | None = None) -> StoreError:
    """The error of a request; what no message may hold is not in it."""
    with pytest.raises(StoreError) as caught:
        (act or (lambda s: s.get_bytes("a")))(store)
    shown = f"{caught.value!r} {caught.value}"
    for chained in (
        caught.value.__cause__,
        None if caught.value.__suppress_context__ else caught.value.__context__,
    ):
        shown += repr(chained)
    assert not [secret for secret in SECRETS if secret in shown]
    return caught.value


def at(endpoint: str, root: str, key: str, secret: str, **settings: Any) -> S3Store:
    access = S3Access(
        S3Settings(endpoint_url=endpoint, region=REGION, max_attempts=2, **settings),
        S3Credentials(key, secret),
    )
    return S3Store(root, access)


ACTS: list[Callable[[S3Store], object]] = [
    lambda s: s.get_bytes("a"),
    lambda s: s.put_bytes("a", b"", if_absent=True),
    lambda s: s.list(""),
    lambda s: s.open_read("a"),
    lambda s: s.delete("a"),
    lambda s: s.put_stream("a", [bytes(20 << 20)], size=20 << 20),
]


@pytest.mark.parametrize("act", ACTS)
def test_an_unknown_key_is_named_as_such(
    s3: LocalS3, s3_root: str, act: Callable[[S3Store], object]
) -> None:
    """The right key may stand in a place that comes later in the order."""
    error = said(at(s3.endpoint, s3_root, "AKIANOBODY", SECRETS[0]), act)
    assert re.search(r"InvalidAccessKeyId.*does not know the access key.*S3_ACCESS_KEY", str(error))
    assert not error.retryable


@pytest.mark.parametrize("act", ACTS)
def test_a_wrong_secret_key_is_named_as_such(
    s3: LocalS3, s3_root: str, act: Callable[[S3Store], object]
) -> None:
    """The most common mistake of all."""
    error = said(at(s3.endpoint, s3_root, s3.access_key, SECRETS[0]), act)
    assert re.search(r"SignatureDoesNotMatch.*secret key does not belong", str(error))
    assert not error.retryable


def test_no_credentials_lists_where_they_were_looked_for(
    s3: LocalS3, s3_root: str, tmp_path: Path
) -> None:
    """Instead of boto3's three words."""
    (tmp_path / "credentials").unlink()
    access = s3s.resolve(S3Settings(endpoint_url=s3.endpoint, region=REGION))
    error = said(S3Store(s3_root, access))
    assert re.search(r"S3_ACCESS_KEY_ID.*AWS_ACCESS_KEY_ID.*credentials.*role", str(error))
    assert not error.retryable


def test_a_profile_that_does_not_exist_is_named(s3_root: str) -> None:
    """A mistyped profile must not fall back to the default one."""
    with pytest.raises(StoreError, match=r"nowhere.*correct `s3.profile`"):
        S3Store(s3_root, s3s.resolve(S3Settings(profile="nowhere"))).get_bytes("a")


@pytest.mark.fault("Bad network", "every verb: nobody listens", "one error, to be tried again")
@pytest.mark.parametrize("act", ACTS)
def test_an_endpoint_where_nobody_listens_may_be_up_later(
    s3_root: str, act: Callable[[S3Store], object]
) -> None:
    """A server that starts beside us is a little late; Dagster's retries wait for it."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        error = said(at(endpoint, s3_root, "a", SECRETS[0]), act)
    assert isinstance(error, StoreUnavailableError)
    assert re.search(rf"{s3_root}.*at {endpoint}.*is the server up", str(error))


def test_a_host_that_does_not_exist_is_named(s3_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped endpoint."""

    def unknown(host: Any, *args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, f"{host}: Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", unknown)
        error = said(at("http://no-such-host.invalid:1", s3_root, "a", SECRETS[0]))
    assert re.search(r"no-such-host.invalid.*`s3.endpoint_url` right", str(error))


@pytest.fixture
def secure(s3_strict: LocalS3) -> Iterator[str]:
    """A root on the server that speaks https."""
    bucket = f"secure-{uuid.uuid4().hex}"
    s3_strict.create_bucket(bucket)
    yield f"s3://{bucket}/p"
    s3_strict.client().delete_bucket(Bucket=bucket)


def test_a_certificate_that_is_not_trusted_says_what_to_set(
    s3_strict: LocalS3, secure: str
) -> None:
    """A store inside a company has a certificate of the company."""
    store = at(s3_strict.endpoint, secure, s3_strict.access_key, s3_strict.secret_key)
    error = said(store)
    assert re.search(r"certificate is not trusted.*`s3.ca_bundle` or AWS_CA_BUNDLE", str(error))
    assert not error.retryable


def test_a_ca_bundle_is_trusted(
    s3_strict: LocalS3, secure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set in the catalog or by the variable that every AWS tool knows."""
    key = (s3_strict.endpoint, secure, s3_strict.access_key, s3_strict.secret_key)
    bundle = str(s3_strict.ca_bundle)
    store = at(*key, ca_bundle=bundle)
    data = os.urandom(20 << 20)
    store.put_stream("a", [data], size=len(data))
    store.put_bytes("b", b"x", if_absent=True)
    assert data == store.open_read("a").read()
    monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
    assert ("a", "b") == at(*key).list("")
    error = said(at(*key, ca_bundle="/nowhere/ca.pem"))
    assert "`ca_bundle` /nowhere/ca.pem is no file" in str(error)


def test_https_and_http_are_not_mixed_up_silently(s3: LocalS3, s3_strict: LocalS3) -> None:
    """A missing or extra `s` looks like a broken server."""
    wrong = at(s3.endpoint.replace("http:", "https:"), "s3://secure/p", "a", SECRETS[0])
    assert "https" in str(said(wrong))
    wrong = at(s3_strict.endpoint.replace("https:", "http:"), "s3://secure/p", "a", SECRETS[0])
    assert s3_strict.endpoint.removeprefix("https:") in str(said(wrong))


@pytest.mark.fault(
    "Bad network",
    "every verb: the clock is an hour behind (RequestTimeTooSkewed)",
    "one error that names NTP",
)
@pytest.mark.parametrize("act", ACTS)
def test_a_wrong_clock_is_named(
    s3: LocalS3,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[S3Store], object],
) -> None:
    """Virtual machines wake up in the past, and S3 only says no."""

    def an_hour_ago(remove_tzinfo: bool = True) -> datetime.datetime:
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
        return now.replace(tzinfo=None) if remove_tzinfo else now

    with monkeypatch.context() as patch:
        for module in ("botocore.auth", "botocore.crt.auth"):
            with suppress(ImportError):
                patch.setattr(importlib.import_module(module), "get_current_datetime", an_hour_ago)
        error = said(at(s3.endpoint, s3_root, s3.access_key, s3.secret_key), act)
    assert re.search(r"RequestTimeTooSkewed.*clock.*NTP", str(error))
    assert not error.retryable


@pytest.mark.fault(
    "Bad network", "get: each of the codes that S3 refuses with", "one error: what to do"
)
@pytest.mark.parametrize(
    ("status", "code", "more", "message", "retryable"),
    [
        (
            400,
            "AuthorizationHeaderMalformed",
            {"Region": "eu-west-3"},
            "s3.region: eu-west-3",
            False,
        ),
        (400, "IllegalLocationConstraintException", {}, "another region", False),
        (
            301,
            "PermanentRedirect",
            {"Endpoint": "b.s3.eu-west-3.amazonaws.com"},
            "eu-west-3",
            False,
        ),
        (400, "ExpiredToken", {}, "session token has expired", False),
        (400, "InvalidToken", {}, "session token is not of these keys", False),
        (403, "AccessDenied", {}, "s3:GetObject", False),
        (403, "InvalidObjectState", {}, "restore it", False),
        (501, "NotImplemented", {}, "lacks a part of S3", False),
        (400, "EntityTooLarge", {}, "limits", False),
        (400, "XAmzContentChecksumMismatch", {}, "when_required", False),
        (507, "XMinioStorageFull", {}, "free some space", False),
        (418, "Teapot", {}, "tensorize store check", False),
        (503, "SlowDown", {}, "run again later", True),
        (500, "InternalError", {}, "run again later", True),
        (503, "ServiceUnavailable", {}, "run again later", True),
        (429, "TooManyRequests", {}, "run again later", True),
    ],
)
def test_what_a_server_refuses_with_is_explained(
    s3: LocalS3,
    s3_root: str,
    proxy: Any,
    refusal: Any,
    status: int,
    code: str,
    more: dict[str, str],
    message: str,
    retryable: bool,
) -> None:
    """What SeaweedFS never says, AWS and others do."""
    words = f"no: {SECRETS[0]}"
    # boto3 looks for the region of a bucket by HEAD.
    proxy.before = lambda asked: (
        None if asked.method == "HEAD" else refusal(status, code, words, **more)
    )
    store = at(proxy.endpoint, s3_root, "AKIAKEY", SECRETS[0], addressing="path")
    error = said(store)
    assert retryable == error.retryable
    assert re.search(rf"cannot get {s3_root}/a at {proxy.endpoint}.*{code}.*{message}", str(error))


def test_a_server_that_only_redirects_is_explained(s3_root: str, proxy: Any, refusal: Any) -> None:
    """As one that wants https; boto3 goes in circles there until Python stops it."""
    proxy.before = lambda asked: refusal(301, "PermanentRedirect")
    error = said(at(proxy.endpoint, s3_root, "AKIAKEY", SECRETS[0], addressing="path"))
    assert re.search(r"redirects every request; set `s3.endpoint_url`", str(error))
    assert not error.retryable


@pytest.mark.fault("Bad network", "get: the body of a small object breaks off", "read again")
def test_a_body_that_breaks_off_is_read_again(
    s3: LocalS3, s3_root: str, s3_access: S3Access, proxy: Any
) -> None:
    """boto3 tries a request again, but not the reading of its answer."""
    data = os.urandom(1000)
    S3Store(s3_root, s3_access).put_bytes("a", data)
    broken = 1

    def break_off(asked: Any, answer: Any) -> Any:
        nonlocal broken
        if broken and asked.method == "GET" and asked.target.endswith("/a"):
            broken -= 1
            answer.headers["Content-Length"] = "1000"
            answer.headers["Connection"] = "close"
            answer.body = answer.body[:500]
        return answer

    proxy.after = break_off
    store = at(proxy.endpoint, s3_root, s3.access_key, s3.secret_key)
    found = store.get_bytes("a")
    assert found
    assert data == found.data


# URIs


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://my.bucket-1/a/b", ("my.bucket-1", "a/b")),
        ("s3://bucket/a b/ü%20/", ("bucket", "a b/ü%20")),
    ],
)
def test_uris_are_taken_as_they_are_written(uri: str, parts: tuple[str, str]) -> None:
    """Nothing is decoded: a key is the text that follows the bucket."""
    assert parts == s3s.split_uri(uri)


@pytest.mark.parametrize(
    "uri", ["bucket/a", "http://bucket/a", "s3:/bucket", "s3://b", "s3://bucket//a", "s3://b_ /a"]
)
def test_what_is_no_uri_is_refused(uri: str) -> None:
    """See also the roots that `open_store` refuses."""
    with pytest.raises(StoreError):
        s3s.split_uri(uri)


@pytest.mark.parametrize(
    "values",
    [
        {"endpoint_url": "127.0.0.1:8333"},
        {"endpoint_url": "http://key:secret@127.0.0.1:8333"},
        {"reload_url": "http://host/x?X-Amz-Signature=1"},
        {"max_attempts": 0},
        {"addressing": "dns"},
        {"secret_access_key": "x"},
    ],
)
def test_settings_hold_no_secrets_and_no_nonsense(values: dict[str, Any]) -> None:
    """They stand in the catalog and cross in requests that are logged."""
    with pytest.raises(ValueError, match="validation error"):
        S3Settings(**values)
