from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tensorize_assets.core import jsonio, layout, signing, verify
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.s3_store import S3Store
from tensorize_assets.core.store import FileDigest, digest
from tensorize_assets.core.verify import VerifyReport, verify_directory, verify_folder

KEY = signing.SecretKey(bytes(range(32)))
TRUSTED = {KEY.public_key}
GOLDEN = Path(__file__).parent / "golden" / "manifest.json"
CONTENT = {
    "model-rank-000.tensors": b"rank 0" * 1000,
    "model-rank-001.tensors": b"rank 1" * 1000,
    "config.json": b"{}",
    "1_Pooling/config.json": b"[]",
}
EXTRA = {"path": "../outside", "size": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}


def built(content: dict[str, bytes]) -> Manifest:
    """The golden manifest with the files of this test."""
    golden = manifests.decode(GOLDEN.read_bytes(), TRUSTED)
    files = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in content.items()
    ]
    return Manifest.model_validate({**golden.model_dump(), "files": files})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def directory(store: LocalStore) -> str:
    """A complete artifact directory."""
    manifest = built(CONTENT)
    directory = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    for path, data in CONTENT.items():
        store.put_bytes(layout.file_key(directory, path), data)
    store.put_bytes(layout.manifest_key(directory), manifests.encode(manifest, KEY))
    return directory


@pytest.fixture
def folder(store: LocalStore, directory: str) -> Path:
    return store.root / directory


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(problem.kind, problem.path) for problem in report.problems]


def test_a_complete_directory_is_fine(store: LocalStore, directory: str, folder: Path) -> None:
    """In its store, and copied anywhere under any name."""
    report = verify_directory(store, directory, TRUSTED)
    assert report.ok
    assert () == report.problems
    assert (4, 12_004, KEY.key_id) == (report.files, report.bytes, report.key_id)
    data = (folder / "manifest.json").read_bytes()
    assert manifests.manifest_sha256(data) == report.manifest_sha256
    elsewhere = store.root.parent / "elsewhere"
    shutil.copytree(folder, elsewhere)
    copied = verify_folder(elsewhere, TRUSTED)
    assert copied.ok
    assert str(elsewhere) == copied.where
    assert report.manifest == copied.manifest


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def exchange(folder: Path) -> None:
    first, second = folder / "model-rank-000.tensors", folder / "model-rank-001.tensors"
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda d: flip(d / "model-rank-001.tensors"), [("hash", "model-rank-001.tensors")]),
        (
            lambda d: os.truncate(d / "model-rank-000.tensors", 5999),
            [("size", "model-rank-000.tensors")],
        ),
        (lambda d: (d / "config.json").unlink(), [("missing", "config.json")]),
        (lambda d: (d / "modeling.py").write_bytes(b""), [("extra", "modeling.py")]),
        (
            lambda d: os.rename(d / "1_Pooling", d / "2_Pooling"),
            [("missing", "1_Pooling/config.json"), ("extra", "2_Pooling/config.json")],
        ),
        (
            exchange,
            [("hash", "model-rank-000.tensors"), ("hash", "model-rank-001.tensors")],
        ),
        (lambda d: (d / "link").symlink_to("config.json"), [("extra", "link")]),
        (
            lambda d: Path(os.fsdecode(os.fsencode(d) + b"/\xff")).touch(),
            [("extra", "\ufffd")],
        ),
        (lambda d: flip(d / "manifest.json"), [("signature", "manifest.json")]),
        (lambda d: (d / "manifest.json").unlink(), [("missing", "manifest.json")]),
        (lambda d: (d / "manifest.json").write_bytes(b""), [("signature", "manifest.json")]),
    ],
)
def test_damage_is_found_in_the_store_and_in_a_folder(
    store: LocalStore,
    directory: str,
    folder: Path,
    damage: Callable[[Path], object],
    expected: list[tuple[str, str]],
) -> None:
    """tensorizer itself loads a flipped byte or a short file without a word."""
    damage(folder)
    assert expected == found(verify_directory(store, directory, TRUSTED))
    assert expected == found(verify_folder(folder, TRUSTED))


def test_all_problems_are_reported_at_once(store: LocalStore, directory: str, folder: Path) -> None:
    """Whoever repairs a directory wants the whole list."""
    flip(folder / "model-rank-000.tensors")
    (folder / "config.json").unlink()
    (folder / "extra").touch()
    report = verify_directory(store, directory, TRUSTED)
    expected = [("missing", "config.json"), ("hash", "model-rank-000.tensors"), ("extra", "extra")]
    assert expected == found(report)
    assert (2, 6002) == (report.files, report.bytes)
    assert "SHA-256" in report.problems[1].message


def test_a_file_that_cannot_be_believed_is_not_read(folder: Path, tmp_path: Path) -> None:
    """A link may lead to a file with the right content that its owner changes tomorrow."""
    outside = tmp_path / "outside"
    os.rename(folder / "config.json", outside)
    (folder / "config.json").symlink_to(outside)
    assert [("unreadable", "config.json")] == found(verify_folder(folder, TRUSTED))


def test_a_signed_manifest_that_names_a_file_outside_reads_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """Verifying a stranger's directory must not become a way to probe this machine."""
    (folder.parent / "outside").write_bytes(b"secret")
    payload = jsonio.dump_record(built(CONTENT))
    files = payload["files"]
    assert isinstance(files, list)
    payload["files"] = [*files, {**EXTRA}]
    (folder / "manifest.json").write_bytes(signing.sign("manifest", payload, KEY))
    report = verify_folder(folder, TRUSTED)
    assert [("manifest", "manifest.json")] == found(report)
    assert report.manifest is None
    assert "cannot be part of a path" in report.problems[0].message


def test_an_unknown_signer_is_a_problem_of_its_own(folder: Path) -> None:
    """Intact files say nothing about who made them."""
    assert [("signature", "manifest.json")] == found(verify_folder(folder, ()))
    assert verify_folder(folder, None).ok


def test_a_whole_old_build_put_in_a_new_ones_place_is_found(
    store: LocalStore, directory: str
) -> None:
    """Every file fits its manifest and the signature is good: only the place is wrong."""
    other = directory[:-12] + "0" * 12
    shutil.copytree(store.root / directory, store.root / other)
    report = verify_directory(store, other, TRUSTED)
    assert [("manifest", "manifest.json")] == found(report)
    assert "was moved or put back" in report.problems[0].message


def test_the_stores_own_leftovers_are_no_extra_files(folder: Path) -> None:
    """A writer killed in the middle leaves nothing that counts."""
    (folder / ".tmp-0123").write_bytes(b"half")
    assert verify_folder(folder, TRUSTED).ok


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """A shard given instead of its folder is a likely slip."""
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"give the folder that holds manifest\.json"):
        verify_folder(tmp_path / "file", TRUSTED)


def test_files_of_a_remote_store_are_read_two_at_a_time(
    s3_root: str, s3_access: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read by several requests at once, and holds their buffers."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    manifest = built(CONTENT)
    directory = layout.artifact_dir(manifest.model, manifest.suffix, manifest.build_id)
    store = S3Store(s3_root, s3_access)
    for path, data in CONTENT.items():
        store.put_bytes(layout.file_key(directory, path), data)
    store.put_bytes(layout.manifest_key(directory), manifests.encode(manifest, KEY))
    third = threading.Barrier(3)
    met: list[bool] = []

    def waiting(self: S3Store, key: str) -> FileDigest:
        with suppress(threading.BrokenBarrierError):
            third.wait(0.2)
            met.append(True)
        return digest(self, key)

    monkeypatch.setattr(verify, "digest", waiting)
    report = verify_directory(store, directory, TRUSTED)
    assert (4, ()) == (report.files, report.problems)
    assert [] == met
