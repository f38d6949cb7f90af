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
from tensorize_assets.core.build import build_id
from tensorize_assets.core.copy import copy_build, directory_of
from tensorize_assets.core.errors import EvidenceError, ManifestError, StoreError
from tensorize_assets.core.evidence import Evidence, encode, write_evidence
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import EncryptionEntry, FileEntry, Manifest
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings
from tensorize_assets.core.store import Store, digest, open_store
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
    write_evidence(store, KEY, evidence(sha256))
    return directory


def evidence(manifest_sha256: str, **fields: object) -> Evidence:
    """Passing evidence of a manifest."""
    return Evidence.model_validate(
        {
            "model": "org/tiny",
            "suffix": "v1",
            "build_id": "0" * 12,
            "manifest_sha256": manifest_sha256,
            "device": "cpu",
            "device_name": "a CPU",
            "vllm_version": "0.31.0",
            "tensor_parallel_size": 1,
            "dtype": "bfloat16",
            "passed": True,
            "checks": ({"name": "a", "passed": True, "description": "fine"},),
            "perplexity": 1.0,
            "load": {
                "bytes": 1,
                "seconds": 1.0,
                "bytes_per_second": 1.0,
                "host_memory_before": 1,
                "host_memory_after": 1,
            },
            "default_load_seconds": None,
            "prompts_digest": "x",
            "when": "2026-11-29T00:00:00Z",
            **fields,
        }
    )


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


def test_a_copy_onto_itself_is_refused_and_removes_nothing(
    disk: LocalStore, remote: Store, s3_access: S3Access, s3_root: str, tmp_path: Path
) -> None:
    """A damaged file that was removed "there" would be the only copy."""
    (tmp_path / "link").symlink_to(disk.root)
    for source, target in (
        (disk, LocalStore(tmp_path / "link")),
        (remote, open_store(f"{s3_root}/a", s3_access)),
    ):
        directory = seal(source)
        before = source.list("")
        with pytest.raises(StoreError, match="lies at the target already"):
            copy_build(source, directory, target, TRUSTED, _nothing)
        assert before == source.list("")


def test_sizes_are_held_against_the_manifest_first(stores: tuple[Store, Store]) -> None:
    """What a manifest claims must not make room for it in memory, nor a fat object fill a disk."""
    source, target = stores
    directory = seal(source)
    source.put_bytes(layout.file_key(directory, "model-rank-001.tensors"), b"fat" * 100_000)
    with pytest.raises(StoreError, match="nothing was copied"):
        copy_build(source, directory, target, TRUSTED, _nothing)
    assert () == target.list("")


def test_newer_evidence_goes_along_and_foreign_does_not(stores: tuple[Store, Store]) -> None:
    """The reload was run again at the source; somebody else's evidence lies in its place."""
    source, target = stores
    directory = seal(source)
    first = copy_build(source, directory, target, TRUSTED, _nothing)
    newer = evidence(first.manifest_sha256, device_name="another CPU")
    key = write_evidence(source, KEY, newer)
    copy_build(source, directory, target, TRUSTED, _nothing)
    copied, original = target.get_bytes(key), source.get_bytes(key)
    assert copied is not None
    assert original is not None
    assert original.data == copied.data
    source.put_bytes(key, encode(evidence("0" * 64), KEY))
    with pytest.raises(EvidenceError, match="another build"):
        copy_build(source, directory, target, TRUSTED, _nothing)
    stored = target.get_bytes(key)
    assert stored is not None
    assert encode(newer, KEY) == stored.data


def test_another_artifact_at_the_target_stays(stores: tuple[Store, Store]) -> None:
    """A directory is written once."""
    source, target = stores
    directory = seal(source)
    seal(target, {**CONTENT, "config.json": b"[]"})
    before = {key: digest(target, key) for key in target.list("")}
    with pytest.raises(ManifestError, match="holds another artifact"):
        copy_build(source, directory, target, TRUSTED, _nothing)
    assert before == {key: digest(target, key) for key in target.list("")}


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


def test_an_encrypted_artifact_has_a_place_of_its_own() -> None:
    """Its name ends in another word than the plaintext's, and it is copied as that one is."""
    golden = manifests.decode(GOLDEN.read_bytes(), TRUSTED)
    inputs = golden.inputs.model_copy(update={"data_key": "0" * 16})
    encryption = EncryptionEntry(key_id="0" * 16)
    changes = {"inputs": inputs, "build_id": build_id(inputs), "encryption": encryption}
    manifest = golden.model_copy(update=changes)
    key = layout.encrypted_dir(manifest.model, manifest.suffix, manifest.build_id)
    assert key == directory_of(manifest, f"/a/{key}")
    with pytest.raises(ManifestError, match="-encrypted; name it there"):
        directory_of(manifest, f"/a/{key.removesuffix('-encrypted')}")


@pytest.fixture
def environment(s3: LocalS3, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "S3_ENDPOINT_URL": s3.endpoint,
        "S3_ACCESS_KEY_ID": s3.access_key,
        "S3_SECRET_ACCESS_KEY": s3.secret_key,
        "DAGSTER_HOME": str(tmp_path / "nowhere"),
    }


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_copies_between_two_s3_services(
    s3: LocalS3, s3_root: str, s3_access: S3Access, tmp_path: Path
) -> None:
    """Each side has its own endpoint and keys; the same bucket name is two buckets."""
    bucket = s3_root.removeprefix("s3://").partition("/")[0]
    directory = seal(open_store(s3_root, s3_access))
    with LocalS3(tmp_path / "other") as other:
        other.create_bucket(bucket)
        config = tmp_path / "credentials"
        config.write_text(
            "".join(
                f"[{name}]\naws_access_key_id={server.access_key}\n"
                f"aws_secret_access_key={server.secret_key}\n"
                for name, server in (("here", s3), ("there", other))
            )
        )
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("S3_")},
            "AWS_SHARED_CREDENTIALS_FILE": str(config),
            "AWS_DEFAULT_REGION": "us-east-1",
            "DAGSTER_HOME": str(tmp_path / "nowhere"),
        }
        done = run(
            environment,
            *("copy", f"{s3_root}/{directory}", f"s3://{bucket}/elsewhere", "--json"),
            *("--source-endpoint-url", s3.endpoint, "--source-profile", "here"),
            *("--target-endpoint-url", other.endpoint, "--target-profile", "there"),
        )
        assert 0 == done.returncode, done.stderr
        report = json.loads(done.stdout)
        assert (4, 0) == (report["copied"], report["server_side"])
        settings = S3Settings(endpoint_url=other.endpoint, region="us-east-1")
        access = S3Access(settings, S3Credentials(other.access_key, other.secret_key))
        target = open_store(f"s3://{bucket}/elsewhere", access)
        assert verify_directory(target, directory, TRUSTED).ok


def test_the_command_copies_to_s3_and_back(
    disk: LocalStore, s3_root: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Keys come from the environment; no catalog is needed."""

    def tensorize(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(environment, *arguments)

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
    for target in ("S3://bucket/x", "s3:/bucket/x", "gs://bucket/x"):
        elsewhere = tensorize("copy", f"{disk.root}/{directory}", target)
        assert 2 == elsewhere.returncode
        assert "this is another URL" in elsewhere.stderr
    nothing = tensorize("copy", f"{s3_root}/nothing", str(tmp_path / "back"))
    assert 1 == nothing.returncode
    assert "no finished artifact" in nothing.stderr
