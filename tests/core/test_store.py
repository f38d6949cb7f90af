"""What every store promises, on a disk, in S3, and in S3 with a versioned bucket."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensorize_assets.core import jsonio, local_store, s3_store
from tensorize_assets.core import store as stores
from tensorize_assets.core.errors import ConflictError, StoreError
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import FileDigest, Store, StoredObject, open_store
from tensorize_assets.demo.s3_server import LocalS3

KEY = "vllm/gpt2/v1/model.tensors"
FORK = multiprocessing.get_context("fork")
SIZE = stores.CHUNK_BYTES + 17


@pytest.fixture(params=["local", "s3", "s3-versioned"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind."""
    if request.param == "local":
        yield open_store(str(tmp_path / "root"))
        return
    s3: LocalS3 = request.getfixturevalue("s3")
    access: S3Access = request.getfixturevalue("s3_access")
    bucket = f"test-{uuid.uuid4().hex}"
    s3.create_bucket(bucket, versioned=request.param == "s3-versioned")
    yield open_store(f"s3://{bucket}/some/prefix", access)
    s3.client().delete_bucket(Bucket=bucket)


@pytest.fixture
def other(store: Store, tmp_path: Path) -> Store:
    """Another store that `store` can copy from by itself."""
    root = store.uri("").rstrip("/")
    if root.startswith("s3://"):
        return open_store(f"{root}-other", getattr(store, "access", None))
    return open_store(str(tmp_path / "other"))


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A file larger than one chunk."""
    path = tmp_path / "scratch.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content(store: Store, key: str) -> bytes:
    with store.open_read(key) as stream:
        return stream.read()


def pieces(data: bytes, size: int = 1_000_000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def race(count: int, work: Callable[[int], object]) -> None:
    """Run `work` in `count` processes that start together; all must end well."""
    barrier = FORK.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    processes = [FORK.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * count == [process.exitcode for process in processes]


def test_a_file_is_stored_and_read_back_with_its_hash(store: Store, scratch: Path) -> None:
    """One pass over the file both stores it and gives the manifest its hash."""
    data = scratch.read_bytes()
    expected = FileDigest(len(data), sha256(data))
    assert expected == store.put_file(KEY, scratch, sha256=expected.sha256)
    assert expected == stores.digest(store, KEY)
    assert len(data) == store.stat(KEY)
    assert scratch.exists()
    assert (KEY,) == store.list("")


def test_a_file_replaces_what_is_there(store: Store, scratch: Path) -> None:
    """A build that is run again overwrites what the one before left incomplete."""
    store.put_bytes(KEY, b"before")
    store.put_file(KEY, scratch)
    assert scratch.read_bytes() == content(store, KEY)


def test_an_empty_file_is_an_object_too(store: Store, tmp_path: Path) -> None:
    """Tokenizers have empty files, and a manifest lists them."""
    (tmp_path / "empty").touch()
    assert FileDigest(0, sha256(b"")) == store.put_file("a", tmp_path / "empty")
    assert (0, b"") == (store.stat("a"), content(store, "a"))
    assert b"" == content(store, "a")


def test_a_file_that_differs_from_its_hash_is_not_stored(store: Store, scratch: Path) -> None:
    """A shard damaged in scratch must not reach the store, copied or moved."""
    for move in (False, True):
        with pytest.raises(StoreError, match="nothing was written there"):
            store.put_file(KEY, scratch, sha256="0" * 64, move=move)
    assert store.stat(KEY) is None
    assert () == store.list("")
    assert scratch.exists()


def test_a_moved_file_is_gone(store: Store, scratch: Path) -> None:
    """Scratch has room for two shards."""
    data = scratch.read_bytes()
    assert sha256(data) == store.put_file(KEY, scratch, sha256=sha256(data), move=True).sha256
    assert data == content(store, KEY)
    assert not scratch.exists()


@pytest.mark.parametrize("move", [False, True])
def test_chunks_are_believed_to_be_the_file(store: Store, scratch: Path, move: bool) -> None:
    """Whoever reads a shard to verify it reads it for the store too: no byte is read twice."""
    data = scratch.read_bytes()
    found = store.put_file(KEY, scratch, sha256=sha256(data), move=move, chunks=pieces(data))
    assert FileDigest(len(data), sha256(data)) == found
    assert data == content(store, KEY)
    assert move != scratch.exists()


@pytest.mark.parametrize("move", [False, True])
def test_an_error_after_the_last_chunk_keeps_the_object_from_appearing(
    store: Store, scratch: Path, move: bool
) -> None:
    """Only at its end is it known whether a shard is what was to be written."""

    def chunks() -> Iterator[bytes]:
        yield from pieces(scratch.read_bytes())
        raise OSError("not what was written")

    with pytest.raises(OSError, match=r"^not what was written$"):
        store.put_file(KEY, scratch, move=move, chunks=chunks())
    assert () == store.list("")
    assert SIZE == scratch.stat().st_size


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0])
def test_a_stream_of_another_length_is_not_stored(store: Store, size: int) -> None:
    """A stream that broke off must not become a shorter object."""
    with pytest.raises(StoreError, match=f"expected {size}"):
        store.put_stream(KEY, pieces(b"x" * SIZE), size=size)
    assert () == store.list("")


def test_a_stream_that_does_not_end_is_stopped(store: Store) -> None:
    """It would fill the disk before its size is looked at."""
    taken: list[int] = []

    def endless() -> Iterator[bytes]:
        while True:
            taken.append(1)
            yield b"x"

    with pytest.raises(StoreError, match="expected 3"):
        store.put_stream(KEY, endless(), size=3)
    assert 4 == len(taken)
    assert () == store.list("")


def test_a_stream_is_stored_with_its_hash(store: Store) -> None:
    """What is copied between stores never lies on a disk."""
    data = os.urandom(SIZE)
    found = store.put_stream(KEY, pieces(data), size=SIZE, sha256=sha256(data))
    assert FileDigest(SIZE, sha256(data)) == found
    assert data == content(store, KEY)
    with pytest.raises(StoreError, match="nothing was written there"):
        store.put_stream("b", pieces(data), size=SIZE, sha256="0" * 64)
    assert (KEY,) == store.list("")


def test_small_objects_come_back_with_the_etag_that_was_returned(store: Store) -> None:
    """The ETag of a write is what the next conditional write compares."""
    etag = store.put_bytes("a/b.json", b"{}")
    assert StoredObject(b"{}", etag) == store.get_bytes("a/b.json")
    assert etag != store.put_bytes("a/b.json", b"[]")


def test_absent_objects_are_none_not_errors(store: Store) -> None:
    """A root that does not exist yet is an empty store."""
    assert store.get_bytes("a/b") is None
    assert store.stat("a/b") is None
    assert () == store.list("")
    store.delete("a/b")
    with pytest.raises(StoreError, match="does not exist"):
        store.open_read("a/b")


def test_any_part_can_be_read_by_any_thread(store: Store, scratch: Path) -> None:
    """An object that is absent is refused at once; the rest is as it was stored."""
    digest = store.put_file(KEY, scratch, move=False)
    data = scratch.read_bytes()
    ranges = store.ranges(KEY)
    assert (store.uri(KEY), digest.size) == (ranges.uri, ranges.size)
    places = [(0, 10), (SIZE - 5, 5), (1000, stores.CHUNK_BYTES - 1000), (17, 0)]
    read: dict[tuple[int, int], bytes] = {}

    def part(start: int, length: int) -> None:
        buffer = bytearray(length)
        if length:
            ranges.read_into(start, memoryview(buffer), lambda: False)
        read[start, length] = bytes(buffer)

    threads = [threading.Thread(target=part, args=place) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {place: data[place[0] : sum(place)] for place in places} == read
    with pytest.raises(StoreError, match=r"nothing.*build it again"):
        store.ranges("nothing")


def test_a_folder_is_no_object(store: Store) -> None:
    """Stores with folders inside, SeaweedFS for one, may answer to their names."""
    store.put_bytes("a/b", b"")
    assert store.get_bytes("a") is None
    assert store.stat("a") is None
    assert ("a/b",) == store.list("")


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, None, b"0123456789"), (4, None, b"456789"), (2, 5, b"234"), (8, 99, b"89"), (3, 3, b"")],
)
def test_ranges_end_where_they_should(
    store: Store, start: int, end: int | None, expected: bytes
) -> None:
    """Readers ask for a header without the gigabytes behind it."""
    store.put_bytes("a", b"0123456789")
    with store.open_read("a", start, end) as stream:
        assert expected == stream.read()


def test_a_range_backwards_is_refused(store: Store) -> None:
    """It would read as an empty object."""
    store.put_bytes("a", b"0123456789")
    with pytest.raises(StoreError, match="no bytes 5 to 2"):
        store.open_read("a", 5, 2)


def test_what_is_opened_can_be_sought(store: Store, scratch: Path) -> None:
    """A shard's index is read first, then its tensors in any order."""
    store.put_file(KEY, scratch)
    with store.open_read(KEY) as stream:
        assert SIZE - 5 == stream.seek(-5, io.SEEK_END)
        assert scratch.read_bytes()[-5:] == stream.read()
        stream.seek(0)
        assert scratch.read_bytes() == stream.read()


def test_listing_is_by_prefix_and_sorted(store: Store) -> None:
    """A prefix is a string, as in object stores, not a folder."""
    for key in ("b/2", "a/v1/x", "a/v1-2/x", "a/v2/x"):
        store.put_bytes(key, b"")
    assert ("a/v1-2/x", "a/v1/x") == store.list("a/v1")
    assert ("a/v1/x",) == store.list("a/v1/")
    assert ("a/v1-2/x", "a/v1/x", "a/v2/x", "b/2") == store.list("")
    with pytest.raises(StoreError, match="cannot be part of a path"):
        store.list("../")


def test_a_listing_tells_sizes_and_times(store: Store) -> None:
    """What can go is told from it, without a look at each object; hidden ones are not shown."""
    before = time.time()
    store.put_bytes("a/v1/x", b"12345")
    store.put_bytes("a/v1/y", b"")
    store.put_bytes("b", b"1")

    found = store.listing("a/")

    assert [("a/v1/x", 5), ("a/v1/y", 0)] == [(one.key, one.size) for one in found]
    # S3 has whole seconds, and a disk the time of the last tick.
    assert all(before - 2 <= one.modified <= time.time() + 2 for one in found)
    assert store.list("") == tuple(one.key for one in store.listing(""))
    assert () == store.listing("nothing/here")


def test_deleting_removes_the_object_only(store: Store) -> None:
    """Neighbours stay."""
    store.put_bytes("a/1", b"")
    store.put_bytes("a/2", b"")
    store.delete("a/1")
    assert ("a/2",) == store.list("")
    assert store.get_bytes("a/1") is None


def test_an_object_is_copied_inside_the_store_or_from_its_like(
    store: Store, other: Store, scratch: Path
) -> None:
    """Gigabytes that are in the store already need not come here."""
    store.put_file("a", scratch)
    other.put_file("c", scratch)
    store.put_bytes("b/1", b"before")
    assert store.copy("a", "b/1")
    assert store.copy("c", "b/2", source=other)
    for key in ("b/1", "b/2"):
        assert scratch.read_bytes() == content(store, key)
    with pytest.raises(StoreError, match="does not exist"):
        store.copy("absent", "d")
    assert ("a", "b/1", "b/2") == store.list("")


def test_a_copy_between_kinds_of_stores_is_left_to_the_caller(
    store: Store, s3_root: str, s3_access: S3Access, tmp_path: Path
) -> None:
    """Only the caller can carry the bytes."""
    root = str(tmp_path / "else") if store.uri("").startswith("s3://") else s3_root
    origin = open_store(root, s3_access)
    origin.put_bytes("a", b"x")
    assert not store.copy("a", "a", source=origin)
    assert () == store.list("")


def test_an_object_is_fetched_to_a_file(store: Store, scratch: Path, tmp_path: Path) -> None:
    """A server that reads from its own disk gets the object whole, or keeps what it had."""
    data = scratch.read_bytes()
    store.put_file(KEY, scratch)
    path = tmp_path / "fetched" / "file"
    assert FileDigest(SIZE, sha256(data)) == store.get_file(KEY, path, sha256=sha256(data))
    assert data == path.read_bytes()
    path.write_bytes(b"before")
    with pytest.raises(StoreError, match="expected 0000"):
        store.get_file(KEY, path, sha256="0" * 64)
    with pytest.raises(StoreError, match="does not exist"):
        store.get_file("absent", path)
    assert b"before" == path.read_bytes()
    assert ["file"] == os.listdir(path.parent)


def test_if_absent_never_replaces(store: Store) -> None:
    """A manifest is written once."""
    store.put_bytes("a", b"first", if_absent=True)
    with pytest.raises(ConflictError, match="exists already"):
        store.put_bytes("a", b"second", if_absent=True)
    assert b"first" == content(store, "a")
    assert ("a",) == store.list("")


def test_what_was_deleted_can_be_written_as_absent(store: Store) -> None:
    """In a versioned bucket a deleted object is still there, under a marker."""
    store.put_bytes("a", b"first", if_absent=True)
    store.delete("a")
    store.put_bytes("a", b"second", if_absent=True)
    assert b"second" == content(store, "a")


def test_if_match_loses_to_a_change_and_to_a_removal(store: Store) -> None:
    """A channel read before another's move must not overwrite that move."""
    etag = store.put_bytes("a", b"1")
    store.put_bytes("a", b"2", if_match=etag)
    with pytest.raises(ConflictError, match="changed since it was read"):
        store.put_bytes("a", b"3", if_match=etag)
    store.delete("a")
    with pytest.raises(ConflictError, match="removed since it was read"):
        store.put_bytes("a", b"3", if_match=etag)
    assert store.get_bytes("a") is None
    assert () == store.list("")


@pytest.mark.fault("Race", "16 processes create one object", "one wins, the others are told")
def test_of_16_processes_creating_an_object_exactly_one_wins(store: Store, tmp_path: Path) -> None:
    """Two runs that finish one build at once must agree on whose manifest stands."""
    keys = [f"a/{number}" for number in range(20)]

    def create_all(number: int) -> None:
        won: list[str] = []
        for key in keys:
            try:
                store.put_bytes(key, str(number).encode(), if_absent=True)
            except ConflictError:
                continue
            won.append(key)
        (tmp_path / f"won-{number}").write_text("\n".join(won))

    race(16, create_all)
    claims = {number: (tmp_path / f"won-{number}").read_text().split() for number in range(16)}
    assert keys == sorted((key for won in claims.values() for key in won), key=keys.index)
    for number, won in claims.items():
        for key in won:
            assert str(number).encode() == content(store, key)


@pytest.mark.fault("Race", "16 processes count by compare-and-swap", "no step is lost")
def test_16_processes_counting_by_if_match_lose_no_step(store: Store) -> None:
    """Every lost update would be a publication that vanished from a channel."""
    store.put_bytes("counter", b"0")

    def count(number: int) -> None:
        for step in range(5):
            while True:
                found = store.get_bytes("counter")
                assert found
                value = int(found.data.split()[0]) + 1
                try:
                    # Of two writers of the same bytes an object store may tell both they won.
                    mine = b"%d %d.%d" % (value, number, step)
                    store.put_bytes("counter", mine, if_match=found.etag)
                    break
                except ConflictError:
                    continue

    race(16, count)
    assert b"80" == content(store, "counter").split()[0]


@pytest.mark.fault("Race", "threads of one process count by compare-and-swap", "no step is lost")
def test_threads_of_one_process_exclude_each_other_too(store: Store) -> None:
    """POSIX locks, the obvious choice on a disk, do not hold between threads."""
    etag = store.put_bytes("a", b"0")
    outcomes: list[bool] = []

    def move(number: int) -> None:
        try:
            store.put_bytes("a", b"%d" % number, if_match=etag)
            outcomes.append(True)
        except ConflictError:
            outcomes.append(False)

    threads = [threading.Thread(target=move, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (1, 8) == (outcomes.count(True), len(outcomes))


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".tmp-x", "a/.tmp-x"]
)
def test_keys_that_escape_or_hide_are_refused(store: Store, key: str) -> None:
    """Keys also come out of documents that others wrote."""
    for reach in (
        lambda: store.get_bytes(key),
        lambda: store.put_bytes(key, b""),
        lambda: store.put_bytes(key, b"", if_absent=True),
        lambda: store.put_stream(key, [], size=0),
        lambda: store.open_read(key),
        lambda: store.stat(key),
        lambda: store.copy("a", key),
        lambda: store.copy(key, "a"),
        lambda: store.delete(key),
        lambda: store.local_path(key),
    ):
        with pytest.raises(StoreError, match="cannot be part of a path"):
            reach()


@pytest.mark.parametrize(
    "name",
    [
        "with space",
        " edges ",
        "plus+sign",
        "100%25",
        "a#b",
        "a?b=c&d",
        "quotes'\"`",
        "<&>;,:=@$!*()[]{}|^~",
        "ünïcödé-模型-🤗",
        "e\u0301 is not \u00e9",
        # In a versioned bucket SeaweedFS adds `.versions` to the name.
        "x" * 240,
    ],
)
def test_any_name_a_key_may_have_is_kept_as_it_is(store: Store, name: str) -> None:
    """Models and files are called what their authors like; signatures and URLs must not mind."""
    key = f"a/{name}/{name}"
    data = os.urandom(100)
    etag = store.put_bytes(key, data, if_absent=True)
    assert StoredObject(data, etag) == store.get_bytes(key)
    assert 100 == store.stat(key)
    assert (key,) == store.list(f"a/{name}/")
    assert data[10:20] == store.open_read(key, 10, 20).read()
    assert store.copy(key, f"b/{name}")
    assert data == content(store, f"b/{name}")
    store.delete(key)
    assert (f"b/{name}",) == store.list("")


def test_an_object_too_large_for_a_document_is_not_read_into_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the store must not be able to fill a reader's memory."""
    assert local_store.MAX_BYTES == s3_store.MAX_BYTES == jsonio.MAX_BYTES
    for module in (local_store, s3_store):
        monkeypatch.setattr(module, "MAX_BYTES", 1000)
    store.put_stream("a", [bytes(1000)], size=1000)
    assert store.get_bytes("a") is not None
    store.put_stream("a", [bytes(1001)], size=1001)
    with pytest.raises(StoreError, match="has more than 1000 bytes"):
        store.get_bytes("a")


def test_nothing_is_left_to_sweep_where_nobody_was_killed(store: Store, scratch: Path) -> None:
    """Sweeping is for what killed writers left."""
    store.put_file(KEY, scratch)
    assert 0 == store.sweep("", 0)
    assert (KEY,) == store.list("")


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("", "has no root"),
        ("gs://bucket/prefix", r"gs:… is no store"),
        ("S3://bucket/prefix", r"S3:… is no store"),
        ("s3:/bucket/prefix", r"s3:… is no store"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://Bucket", "cannot be a bucket"),
        ("s3://bucket/../x", "cannot be part of a path"),
        ("s3://bucket/a//b", "cannot be part of a path"),
        ("s3://bucket/a?versionId=1", "no query"),
        ("s3://AKIA:verysecret@bucket/a", "without credentials"),
        ("s3://127.0.0.1:8333/bucket", "without credentials, host or port"),
    ],
)
def test_roots_that_are_no_store_are_refused(root: str, message: str) -> None:
    """`s3:/bucket` must not become a folder, nor a mistyped URI another bucket."""
    with pytest.raises(StoreError, match=message) as caught:
        open_store(root)
    assert "verysecret" not in str(caught.value)
