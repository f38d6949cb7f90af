"""The mirror: each file once, the list last, and nothing taken from it that is another file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from wrapped_store import Killed, wrapped

from tensorize_assets.core import layout, mirror
from tensorize_assets.core.errors import StoreError, StoreUnavailableError
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.mirror import SnapshotList, download, holds, read_list, upload
from tensorize_assets.core.store import Store

MODEL = "tiny/llama"
COMMIT = "a" * 40


def snapshot(folder: Path, files: dict[str, bytes], commit: str = COMMIT) -> SnapshotList:
    """Files on a disk, as a download from the Hub leaves them."""
    entries: list[FileEntry] = []
    for path, content in sorted(files.items()):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        entries.append(FileEntry(path=path, size=len(content), sha256=sha256))
    return SnapshotList(
        model=MODEL, commit=commit, weights_format="safetensors", files=tuple(entries)
    )


def sent(calls: list[tuple[str, str]]) -> list[str]:
    return [key for method, key in calls if method == "put_file"]


def noted(store: Store) -> tuple[Any, list[tuple[str, str]]]:
    """A store, and its calls so far."""
    calls: list[tuple[str, str]] = []
    return wrapped(store, lambda method, key: calls.append((method, key))), calls


def test_what_goes_up_comes_down(
    store: Store, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files and small ones; each content is one object, and the list is the last of them."""
    monkeypatch.setattr(mirror, "LARGE_BYTES", 250_000)
    whole = snapshot(tmp_path / "hub", files)
    noting, calls = noted(store)
    said: list[tuple[int, int]] = []

    report = upload(noting, whole, tmp_path / "hub", lambda *bytes_: said.append(bytes_))

    total = sum({entry.sha256: entry.size for entry in whole.files}.values())
    assert (total, 0) == report
    assert (total, total) == said[-1]
    assert ("put_bytes", layout.snapshot_key(MODEL, COMMIT)) == [
        call for call in calls if call[0].startswith("put")
    ][-1]
    keys = {layout.snapshot_file_key(MODEL, entry.sha256) for entry in whole.files}
    assert 4 == len(keys)
    assert {*keys, layout.snapshot_key(MODEL, COMMIT)} == set(store.list(""))
    assert whole == read_list(store, MODEL, COMMIT)
    assert holds(store, MODEL, COMMIT, whole.files)
    out = tmp_path / "out"
    (out / "special").mkdir(parents=True)
    download(store, MODEL, whole.files, lambda file: out / file.path)
    assert files == {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("stops", [StoreUnavailableError("gone"), Killed()])
def test_an_upload_goes_on_where_it_was_stopped(
    store: Store,
    files: dict[str, bytes],
    tmp_path: Path,
    stops: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is complete is not sent again; until the end there is no snapshot for anybody."""
    monkeypatch.setattr(mirror, "LARGE_BYTES", 0)
    whole = snapshot(tmp_path / "hub", files)
    count = 0

    def stop(method: str, key: str) -> None:
        nonlocal count
        count += method == "put_file"
        if count >= 3:
            raise stops

    with pytest.raises(type(stops)):
        upload(wrapped(store, stop), whole, tmp_path / "hub")
    assert read_list(store, MODEL, COMMIT) is None
    before = set(store.list(""))
    assert 2 == len(before)
    noting, calls = noted(store)

    report = upload(noting, whole, tmp_path / "hub")

    assert 2 == len(sent(calls))
    assert not before & set(sent(calls))
    kept = sum(store.stat(key) or 0 for key in before)
    assert kept == report.kept_bytes > 0
    assert report.sent_bytes + kept == sum(
        {entry.sha256: entry.size for entry in whole.files}.values()
    )
    again, calls = noted(store)
    assert 0 == upload(again, whole, tmp_path / "hub").sent_bytes
    assert [] == [key for method, key in calls if method.startswith("put")]


def test_revisions_share_files(store: Store, files: dict[str, bytes], tmp_path: Path) -> None:
    """A new README does not send the weights again."""
    upload(store, snapshot(tmp_path / "one", files), tmp_path / "one")
    later = snapshot(tmp_path / "two", {**files, "README.md": b"better"}, "b" * 40)
    noting, calls = noted(store)

    report = upload(noting, later, tmp_path / "two")

    assert 6 == report.sent_bytes
    assert 1 == len(sent(calls))
    assert 2 == len([key for key in store.list("") if key.endswith("snapshot.json")])


@pytest.mark.parametrize("large", [True, False])
def test_a_file_that_was_changed_in_the_store_is_not_taken(
    store: Store,
    files: dict[str, bytes],
    tmp_path: Path,
    large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever may write there, or its disk, cannot pass anything off as the Hub's."""
    monkeypatch.setattr(mirror, "LARGE_BYTES", 0 if large else 10**9)
    whole = snapshot(tmp_path / "hub", files)
    upload(store, whole, tmp_path / "hub")
    victim = whole.files[1]
    key = layout.snapshot_file_key(MODEL, victim.sha256)
    store.put_bytes(key, bytes(victim.size))
    out = tmp_path / "out"
    (out / "special").mkdir(parents=True)

    with pytest.raises(StoreError, match=f"{victim.path} of {MODEL} cannot be taken") as caught:
        download(store, MODEL, whole.files, lambda file: out / file.path)

    assert store.uri(key) in str(caught.value)
    assert not (out / victim.path).exists()
    store.delete(key)
    with pytest.raises(StoreError, match="cannot be taken"):
        download(store, MODEL, [victim], lambda file: out / file.path)


def test_a_file_that_changed_on_the_disk_is_not_sent(
    store: Store, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Between the Hub's check and the upload anything may happen to a cache."""
    whole = snapshot(tmp_path / "hub", files)
    victim = whole.files[1]
    (tmp_path / "hub" / victim.path).write_bytes(bytes(victim.size))
    with pytest.raises(StoreError, match=victim.sha256):
        upload(store, whole, tmp_path / "hub")
    assert read_list(store, MODEL, COMMIT) is None
    assert store.stat(layout.snapshot_file_key(MODEL, victim.sha256)) is None


def test_what_goes_while_it_is_uploaded_is_sent_again(
    store: Store, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Retention may have found, a moment before, that nobody needs a file."""
    whole = snapshot(tmp_path / "hub", files)
    upload(store, whole, tmp_path / "hub")
    store.delete(layout.snapshot_key(MODEL, COMMIT))
    key = layout.snapshot_file_key(MODEL, whole.files[0].sha256)

    def removes(method: str, written: str) -> None:
        if method == "put_bytes" and written.endswith("snapshot.json"):
            store.delete(key)

    upload(wrapped(store, after=removes), whole, tmp_path / "hub")

    assert () == mirror.missing(store, MODEL, whole.files)


@pytest.mark.parametrize("damage", [b"{", b'{"model": "other/model"}', b""])
def test_a_damaged_list_is_none_and_is_written_anew(
    store: Store, files: dict[str, bytes], tmp_path: Path, damage: bytes
) -> None:
    """It says nothing that is not known from the Hub."""
    whole = snapshot(tmp_path / "hub", files)
    store.put_bytes(layout.snapshot_key(MODEL, COMMIT), damage)
    assert read_list(store, MODEL, COMMIT) is None
    assert not holds(store, MODEL, COMMIT, whole.files)
    upload(store, whole, tmp_path / "hub")
    assert whole == read_list(store, MODEL, COMMIT)


def test_lists_of_one_commit_add_up(store: Store, files: dict[str, bytes], tmp_path: Path) -> None:
    """A release that chooses other files of a repo keeps what an earlier one has listed."""
    fewer = {path: content for path, content in files.items() if path != "tokenizer.json"}
    upload(store, snapshot(tmp_path / "one", fewer), tmp_path / "one")
    more = {**files, "chat_template.jinja": b"{{ messages }}"}
    upload(store, snapshot(tmp_path / "two", more), tmp_path / "two")
    upload(store, snapshot(tmp_path / "one", fewer), tmp_path / "one")
    found = read_list(store, MODEL, COMMIT)
    assert found is not None
    assert sorted(more) == [entry.path for entry in found.files]
