"""Fixtures for more than one folder of tests."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3

if TYPE_CHECKING:
    from tensorize_assets.core.s3 import S3Access


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    """A running local Hub without repos."""
    with LocalHub() as running:
        yield running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A running S3 server, one for the whole session."""
    with LocalS3(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3_root(s3: LocalS3) -> Iterator[str]:
    """A root in a bucket of its own, as a catalog names it."""
    bucket = f"test-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    yield f"s3://{bucket}/some/prefix"
    # With all that it holds: SeaweedFS frees the disk of a bucket at once, of objects late.
    s3.client().delete_bucket(Bucket=bucket)


@pytest.fixture
def s3_access(s3: LocalS3) -> S3Access:
    """The administrator's access to the S3 server."""
    from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings

    return S3Access(
        settings=S3Settings(endpoint_url=s3.endpoint, region=REGION),
        credentials=S3Credentials(access_key_id=s3.access_key, secret_access_key=s3.secret_key),
    )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random snapshot of each architecture, by its name."""
    folder = tmp_path_factory.mktemp("tiny-models")
    script = Path(__file__).parent / "worker" / "scripts" / "tiny_models.py"
    # In a process of its own: transformers stays out of pytest's.
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI every part is installed, so that a skip there is a missing part; a GPU is excepted."""
    report = yield
    if (
        report.skipped
        and os.environ.get("TENSORIZE_ASSETS_CI")
        and not item.get_closest_marker("cuda")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


def pytest_collection_finish() -> None:
    """The worker sets its process's environment, and with it that of every later test's processes.

    Among else it keeps huggingface_hub offline. Tests of it are scripts in processes of their own.
    """
    if "tensorize_assets.worker" in sys.modules:
        raise pytest.UsageError("a test module imports tensorize_assets.worker; run it in a script")
