"""A build between stores: every direction, interrupted anywhere, never half."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorize_assets.core import layout, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.copy import copy_build, directory_of
from tensorize_assets.core.errors import ManifestError, StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.s3_server import LocalS3

KEY = signing.SecretKey(bytes(range(32)))
TRUSTED = {KEY.public_key}
GOLDEN = Path(__file__).parent / "golden" / "manifest.json"
MIB = 1 << 20
CONTENT = {
    # Two parts of a multipart upload.
    "model-rank-000.tensors": os.urandom(20 * MIB + 3),
    "model-rank-001.tensors": b"rank 1" * 1000,
    "config.json": b"{}",
    "1_Pooling/config file+%.json": b"[]",
}


def _nothing(_: str) -> None: ...


def seal(store: Store, content: dict[str, bytes] = CONTENT) -> str:
    """Put a complete artifact with evidence into `store`; returns its directory."""
    golden = manifests.decode(GOLDEN.read_bytes(), TRUSTED)
    files = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in content.items()
    ]
    manifest = Manifest.model_validate({**golden.model_dump(), "files": files})
    directory = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    for path, data in content.items():
        store.put_bytes(layout.file_key(directory, path), data)
    encoded = manifests.encode(manifest, KEY)
    store.put_bytes(layout.manifest_key(directory), encoded)
    sha256 = manifests.manifest_sha256(encoded)
    store.put_bytes(layout.evidence_key(sha256, "cpu", "0.31.0"), b"evidence")
    return directory


@pytest.fixture
def remote(s3_root: str, s3_access: S3Access) -> Store:
    return open_store(f"{s3_root}/a", s3_access)


@pytest.fixture
def other_remote(s3_root: str, s3_access: S3Access) -> Store:
    """Another root on the same endpoint."""
    return open_store(f"{s3_root}/b", s3_access)


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "disk")


@pytest.fixture(params=["disk to s3", "s3 to disk", "s3 to s3", "disk to disk"])
def stores(
    request: pytest.FixtureRequest,
    disk: LocalStore,
    tmp_path: Path,
    remote: Store,
    other_remote: Store,
) -> tuple[Store, Store]:
    pairs = {
        "disk to s3": (disk, remote),
        "s3 to disk": (remote, disk),
        "s3 to s3": (remote, other_remote),
        "disk to disk": (disk, LocalStore(tmp_path / "other")),
    }
    return pairs[request.param]


def test_a_copy_is_the_same_artifact_with_its_evidence(stores: tuple[Store, Store]) -> None:
    """And copying once more reads, and writes nothing."""
    source, target = stores
    directory = seal(source)
    report = copy_build(source, directory, target, TRUSTED, _nothing)
    assert (4, 0, 1) == (report.copied, report.kept, report.evidence)
    assert sum(map(len, CONTENT.values())) == report.copied_bytes
    assert verify_directory(target, directory, TRUSTED).ok
    assert source.list("") == target.list("")
    again = copy_build(source, directory, target, TRUSTED, _nothing)
    assert (0, 4) == (again.copied, again.kept)


def test_one_endpoint_copies_by_itself(remote: Store, other_remote: Store) -> None:
    """The bytes of a fleet do not go through the machine that asks for it."""
    directory = seal(remote)
    report = copy_build(remote, directory, other_remote, TRUSTED, _nothing)
    assert 4 == report.server_side


class Failing:
    """A store whose `number`-th file cannot be written."""

    def __init__(self, store: Store, number: int) -> None:
        self._store = store
        self._left = number

    def __getattr__(self, name: str) -> object:
        if name in ("put_stream", "copy"):
            self._left -= 1
            if self._left < 0:
                raise StoreError("the network is gone")
        return getattr(self._store, name)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupted_copy_is_no_artifact_and_is_resumed(
    stores: tuple[Store, Store], number: int
) -> None:
    """Gigabytes that arrived are not sent again."""
    source, target = stores
    directory = seal(source)
    with pytest.raises(StoreError, match="the network is gone"):
        copy_build(source, directory, Failing(target, number), TRUSTED, _nothing)  # type: ignore[arg-type]
    assert manifests.read_manifest(target, directory, TRUSTED) is None
    there = len(target.list(directory))
    report = copy_build(source, directory, target, TRUSTED, _nothing)
    assert (there, 4 - there) == (report.kept, report.copied)
    assert verify_directory(target, directory, TRUSTED).ok


def test_damage_does_not_arrive(stores: tuple[Store, Store]) -> None:
    """What is not what the manifest says stays where it is."""
    source, target = stores
    directory = seal(source)
    key = layout.file_key(directory, "model-rank-001.tensors")
    source.put_bytes(key, b"rank X" * 1000)
    with pytest.raises(StoreError, match=r"model-rank-001\.tensors") as caught:
        copy_build(source, directory, target, TRUSTED, _nothing)
    assert source.uri(key) in str(caught.value)
    assert target.stat(key) is None
    assert target.stat(layout.manifest_key(directory)) is None


def test_half_a_file_at_the_target_is_replaced(stores: tuple[Store, Store]) -> None:
    """Another tool's copy stopped in it."""
    source, target = stores
    directory = seal(source)
    target.put_bytes(layout.file_key(directory, "model-rank-000.tensors"), b"half")
    copy_build(source, directory, target, TRUSTED, _nothing)
    assert verify_directory(target, directory, TRUSTED).ok


def test_another_artifact_at_the_target_stays(stores: tuple[Store, Store]) -> None:
    """A directory is written once."""
    source, target = stores
    directory = seal(source)
    seal(target, {**CONTENT, "config.json": b"[]"})
    before = target.list("")
    with pytest.raises(ManifestError, match="holds another artifact"):
        copy_build(source, directory, target, TRUSTED, _nothing)
    assert before == target.list("")


def test_without_a_manifest_there_is_nothing_to_copy(stores: tuple[Store, Store]) -> None:
    """A build that is still running looks like this."""
    source, target = stores
    directory = seal(source)
    source.delete(layout.manifest_key(directory))
    with pytest.raises(ManifestError, match="no finished artifact"):
        copy_build(source, directory, target, TRUSTED, _nothing)
    assert () == target.list("")


def test_the_place_of_an_artifact_is_the_end_of_its_path() -> None:
    """A root may hold the word vllm, and so may an organisation."""
    manifest = manifests.decode(GOLDEN.read_bytes(), TRUSTED)
    key = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    for path in (f"/vllm/a/{key}", f"s3://b/{key}/"):
        assert key == directory_of(manifest, path)
    with pytest.raises(ManifestError, match="name it there"):
        directory_of(manifest, "/somewhere/else")


@pytest.fixture
def environment(s3: LocalS3, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "S3_ENDPOINT_URL": s3.endpoint,
        "S3_ACCESS_KEY_ID": s3.access_key,
        "S3_SECRET_ACCESS_KEY": s3.secret_key,
        "DAGSTER_HOME": str(tmp_path / "nowhere"),
    }


def test_the_command_copies_to_s3_and_back(
    disk: LocalStore, s3_root: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Keys come from the environment; no catalog is needed."""

    def tensorize(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tensorize_assets.cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    directory = seal(disk)
    there = tensorize("copy", f"{disk.root}/{directory}", s3_root, "--json")
    assert 0 == there.returncode, there.stderr
    assert 4 == json.loads(there.stdout)["copied"]
    checked = tensorize("verify", f"{s3_root}/{directory}")
    assert 0 == checked.returncode, checked.stderr
    back = tensorize("copy", f"{s3_root}/{directory}/", str(tmp_path / "back"))
    assert 0 == back.returncode, back.stderr
    assert "4 files copied" in back.stdout
    assert verify_directory(LocalStore(tmp_path / "back"), directory, TRUSTED).ok
    assert environment["S3_SECRET_ACCESS_KEY"] not in there.stderr + back.stderr + back.stdout
    nothing = tensorize("copy", f"{s3_root}/nothing", str(tmp_path / "back"))
    assert 1 == nothing.returncode
    assert "no finished artifact" in nothing.stderr
