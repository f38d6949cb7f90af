"""`tensorize store check`, as a process: exit codes, settings, text and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorize_assets.demo.s3_server import LocalS3

CATALOG = """
root: {root}
s3: {{endpoint_url: "{endpoint}", region: eu-somewhere-1}}
models:
  org/tiny:
    profiles:
      v1: {{reload_device: cpu}}
"""


def check(
    home: Path, *arguments: str, server: LocalS3 | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in `home`, with the keys of `server` and no others."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "S3_"))}
    keys = (
        {}
        if server is None
        else {"S3_ACCESS_KEY_ID": server.access_key, "S3_SECRET_ACCESS_KEY": server.secret_key}
    )
    # No keys of the developer's, nor an hour's wait for an instance's.
    nobody = {"HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", "store", "check", *arguments],
        env={**inherited, **nobody, **keys, "DAGSTER_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def home(tmp_path: Path, s3: LocalS3, s3_root: str) -> Path:
    """A Dagster home whose catalog has its root in S3."""
    text = CATALOG.format(root=s3_root, endpoint=s3.endpoint)
    (tmp_path / "models.yaml").write_text(text)
    return tmp_path


def test_the_catalogs_root_is_checked_as_the_catalog_says(
    home: Path, s3: LocalS3, s3_root: str
) -> None:
    """The same settings as those of a build, so that the answer holds for it."""
    done = check(home, server=s3)

    assert 0 == done.returncode, done.stdout + done.stderr
    for said in (s3_root, "put if absent", "MB/s", "s3:AbortMultipartUpload", "eu-somewhere-1"):
        assert said in done.stdout
    assert "The product can work here." in done.stdout


def test_json_is_one_document(home: Path, s3: LocalS3, s3_root: str) -> None:
    """For a deployment that checks its store before it starts."""
    done = check(home, "--json", server=s3)

    report = json.loads(done.stdout)
    assert (True, s3_root, []) == (report["healthy"], report["root"], report["left"])
    assert {"works"} == {verb["status"] for verb in report["verbs"]}


def test_options_go_before_the_catalog(tmp_path: Path, s3: LocalS3, s3_root: str) -> None:
    """To try a setting before it is written down: none of the catalog's would work."""
    text = CATALOG.format(root=s3_root, endpoint="http://127.0.0.1:9")
    wrong = text.replace("region:", "addressing: virtual, checksums: when_supported, region:")
    (tmp_path / "models.yaml").write_text(wrong)
    options = ("--region", "us-west-7", "--addressing", "path", "--checksums", "when_required")
    done = check(tmp_path, s3_root, *options, "--endpoint-url", s3.endpoint, "--json", server=s3)

    report = json.loads(done.stdout)
    assert report["healthy"]
    assert {
        "endpoint": s3.endpoint,
        "region": "us-west-7",
        "addressing": "path",
        "checksums": "Content-MD5 (when_required)",
    } == report["facts"]


def test_without_a_catalog_the_environment_leads(tmp_path: Path, s3: LocalS3, s3_root: str) -> None:
    """A host that only loads artifacts has no catalog."""
    done = check(tmp_path, s3_root, server=s3, S3_ENDPOINT_URL=s3.endpoint)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_what_fails_is_1_with_the_reason(home: Path, s3: LocalS3) -> None:
    """A script must notice."""
    done = check(home, server=s3, S3_SECRET_ACCESS_KEY="wrong")

    assert 1 == done.returncode
    assert "the secret key does not belong to the access key" in " ".join(done.stdout.split())
    assert "The product cannot work here as it is." in done.stdout
    assert s3.secret_key not in done.stdout + done.stderr


def test_no_credentials_is_1_with_where_was_looked(home: Path) -> None:
    """The most common first mistake."""
    done = check(home)

    assert 1 == done.returncode
    assert "S3_ACCESS_KEY_ID" in done.stdout
    assert "Traceback" not in done.stderr


def test_half_of_the_keys_is_1(home: Path) -> None:
    """They would be mixed with those of another place."""
    done = check(home, S3_ACCESS_KEY_ID="only")
    assert 1 == done.returncode
    assert "S3_SECRET_ACCESS_KEY is not" in done.stderr


@pytest.mark.parametrize(
    "option",
    [("--addressing", "sideways"), ("--checksums", "never"), ("--endpoint-url", "ftp://x")],
)
def test_a_wrong_option_is_2(home: Path, option: tuple[str, str]) -> None:
    """It was asked wrongly; nothing was tried."""
    done = check(home, *option)
    assert 2 == done.returncode
    assert option[0].strip("-").replace("-", "_") in done.stderr


def test_nothing_to_check_is_2(tmp_path: Path) -> None:
    """Neither a URI nor a catalog."""
    done = check(tmp_path)
    assert 2 == done.returncode
    assert "give the store to check" in done.stderr


def test_a_private_certificate_is_trusted_when_it_is_named(tmp_path: Path) -> None:
    """Servers in a company's network have one."""
    with LocalS3(tmp_path / "s3", tls=True) as server:
        server.create_bucket("some-bucket")
        arguments = ("s3://some-bucket/prefix", "--endpoint-url", server.endpoint)
        without = check(tmp_path, *arguments, server=server)
        named = check(tmp_path, *arguments, "--ca-bundle", str(server.ca_bundle), server=server)

    assert 1 == without.returncode
    assert "`s3.ca_bundle` or AWS_CA_BUNDLE" in " ".join(without.stdout.split())
    assert 0 == named.returncode, named.stdout + named.stderr


def test_a_folder_is_checked_too(tmp_path: Path) -> None:
    """The root may be a network share that lacks locks or hard links."""
    done = check(tmp_path, str(tmp_path / "root"))
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "create exclusively" in done.stdout
    assert not (tmp_path / "root").exists()
