from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorize_assets.core import store as stores
from tensorize_assets.core.errors import ConflictError, StoreError
from tensorize_assets.core.store import FileDigest, LocalStore, StoredObject, open_store

KEY = "vllm/gpt2/v1/model.tensors"
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A file on the store's file system, larger than one chunk."""
    path = tmp_path / "scratch.bin"
    path.write_bytes(os.urandom(stores.CHUNK_BYTES + 17))
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything_under(root: Path) -> list[str]:
    """Every file, hidden ones too, but the locks."""
    files = (path for path in root.rglob("*") if path.is_file())
    names = (path.relative_to(root).as_posix() for path in files)
    return sorted(name for name in names if not name.startswith(".tmp-locks/"))


def run_killed_at(step: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that gets SIGKILL before its `step`-th call into the file system.

    Returns whether it was killed, False when it has fewer steps and finished.
    """
    child = os.fork()
    if child == 0:
        left = step

        def hook(event: str, _: object) -> None:
            nonlocal left
            if event == "open" or event.startswith(("os.", "fcntl.")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        left = -1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert signal.SIGKILL == os.WTERMSIG(status)
        return True
    assert 0 == os.WEXITSTATUS(status)
    return False


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


def test_a_file_is_stored_and_read_back_with_its_hash(store: LocalStore, scratch: Path) -> None:
    """One pass over the file both stores it and gives the manifest its hash."""
    data = scratch.read_bytes()
    expected = FileDigest(len(data), sha256(data))
    assert expected == store.put_file(KEY, scratch, sha256=expected.sha256)
    assert expected == stores.digest(store, KEY)
    assert len(data) == store.stat(KEY)
    assert scratch.exists()
    assert [KEY] == everything_under(store.root)


def test_a_stored_file_is_readable_by_whoever_the_umask_lets(
    store: LocalStore, scratch: Path
) -> None:
    """The account that serves an artifact is often not the one that built it."""
    scratch.chmod(0o600)
    store.put_file(KEY, scratch)
    plain = store.root / "plain"
    plain.touch()
    assert plain.stat().st_mode == (store.root / KEY).stat().st_mode


def test_a_file_that_differs_from_its_hash_is_not_stored(store: LocalStore, scratch: Path) -> None:
    """A shard damaged in scratch must not reach the store, copied or moved."""
    for move in (False, True):
        with pytest.raises(StoreError, match="nothing was stored"):
            store.put_file(KEY, scratch, sha256="0" * 64, move=move)
    assert store.stat(KEY) is None
    assert [] == everything_under(store.root)
    assert scratch.exists()


def test_moving_takes_the_file_itself(store: LocalStore, scratch: Path) -> None:
    """Shards are gigabytes: on one file system not a byte of them is written twice."""
    inode = scratch.stat().st_ino
    expected = sha256(scratch.read_bytes())
    assert expected == store.put_file(KEY, scratch, sha256=expected, move=True).sha256
    assert inode == (store.root / KEY).stat().st_ino
    assert not scratch.exists()


@pytest.mark.parametrize("make_alias", [os.symlink, os.link])
def test_moving_copies_a_file_that_has_another_name(
    store: LocalStore, scratch: Path, tmp_path: Path, make_alias: Callable[[Path, Path], None]
) -> None:
    """Whoever holds the other name could change what is stored; a moved link would dangle."""
    alias = tmp_path / "alias"
    make_alias(scratch, alias)
    data = scratch.read_bytes()
    store.put_file(KEY, alias, move=True)
    scratch.write_bytes(b"changed")
    with store.open_read(KEY) as stream:
        assert data == stream.read()
    assert not (store.root / KEY).is_symlink()
    assert not os.path.lexists(alias)


def test_small_objects_come_back_with_the_etag_that_was_returned(store: LocalStore) -> None:
    """The ETag of a write is what the next conditional write compares."""
    etag = store.put_bytes("a/b.json", b"{}")
    assert StoredObject(b"{}", etag) == store.get_bytes("a/b.json")
    assert etag != store.put_bytes("a/b.json", b"[]")


def test_absent_objects_are_none_not_errors(store: LocalStore) -> None:
    """A root that does not exist yet is an empty store."""
    assert store.get_bytes("a/b") is None
    assert store.stat("a/b") is None
    assert () == store.list("")
    store.delete("a/b")
    with pytest.raises(StoreError, match="does not exist"):
        store.open_read("a/b")
    store.put_bytes("a", b"")
    assert store.get_bytes("a/b") is None


def test_folders_and_pipes_are_no_objects(store: LocalStore) -> None:
    """A pipe put in an object's place would otherwise hold its reader forever."""
    store.put_bytes("a/b", b"")
    os.mkfifo(store.root / "pipe")
    for key in ("a", "pipe"):
        assert store.get_bytes(key) is None
        assert store.stat(key) is None


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, None, b"0123456789"), (4, None, b"456789"), (2, 5, b"234"), (8, 99, b"89"), (3, 3, b"")],
)
def test_ranges_end_where_they_should(
    store: LocalStore, start: int, end: int | None, expected: bytes
) -> None:
    """Readers ask for a header without the gigabytes behind it."""
    store.put_bytes("a", b"0123456789")
    with store.open_read("a", start, end) as stream:
        assert expected == stream.read()


def test_a_range_backwards_is_refused(store: LocalStore) -> None:
    """It would read as an empty object."""
    store.put_bytes("a", b"0123456789")
    with pytest.raises(StoreError, match="no bytes 5 to 2"):
        store.open_read("a", 5, 2)


def test_listing_is_by_prefix_and_sorted(store: LocalStore) -> None:
    """A prefix is a string, as in object stores, not a folder."""
    for key in ("b/2", "a/v1/x", "a/v1-2/x", "a/v2/x"):
        store.put_bytes(key, b"")
    assert ("a/v1-2/x", "a/v1/x") == store.list("a/v1")
    assert ("a/v1/x",) == store.list("a/v1/")
    assert ("a/v1-2/x", "a/v1/x", "a/v2/x", "b/2") == store.list("")
    with pytest.raises(StoreError, match="cannot be part of a path"):
        store.list("../")


def test_deleting_removes_the_object_only(store: LocalStore) -> None:
    """Neighbours stay."""
    store.put_bytes("a/1", b"")
    store.put_bytes("a/2", b"")
    store.delete("a/1")
    assert ("a/2",) == store.list("")


def test_if_absent_never_replaces(store: LocalStore) -> None:
    """A manifest is written once."""
    store.put_bytes("a", b"first", if_absent=True)
    with pytest.raises(ConflictError, match="exists already"):
        store.put_bytes("a", b"second", if_absent=True)
    assert b"first" == (store.root / "a").read_bytes()
    assert ["a"] == everything_under(store.root)


def test_if_match_loses_to_a_change_and_to_a_removal(store: LocalStore) -> None:
    """A channel read before another's move must not overwrite that move."""
    etag = store.put_bytes("a", b"1")
    store.put_bytes("a", b"2")
    with pytest.raises(ConflictError, match="changed since it was read"):
        store.put_bytes("a", b"3", if_match=etag)
    store.delete("a")
    with pytest.raises(ConflictError, match="removed since it was read"):
        store.put_bytes("a", b"3", if_match=etag)
    assert store.get_bytes("a") is None
    assert [] == everything_under(store.root)


def test_of_16_processes_creating_an_object_exactly_one_wins(
    store: LocalStore, tmp_path: Path
) -> None:
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
            assert str(number) == (store.root / key).read_text()


def test_16_processes_counting_by_if_match_lose_no_step(store: LocalStore) -> None:
    """Every lost update would be a publication that vanished from a channel."""
    store.put_bytes("counter", b"0")

    def count(_: int) -> None:
        for _ in range(5):
            while True:
                found = store.get_bytes("counter")
                assert found
                try:
                    store.put_bytes("counter", b"%d" % (int(found.data) + 1), if_match=found.etag)
                    break
                except ConflictError:
                    continue

    race(16, count)
    assert b"80" == (store.root / "counter").read_bytes()


def test_threads_of_one_process_exclude_each_other_too(store: LocalStore) -> None:
    """POSIX locks, the obvious choice, do not hold between threads."""
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


def test_a_put_killed_at_any_step_shows_all_or_nothing(store: LocalStore, scratch: Path) -> None:
    """Every build may be killed at any point and run again."""
    data = scratch.read_bytes()
    expected = sha256(data)
    for what, work in (
        ("copy", lambda: store.put_file(KEY, scratch, sha256=expected)),
        ("absent", lambda: store.put_bytes(KEY, data, if_absent=True)),
        ("bytes", lambda: store.put_bytes(KEY, data)),
    ):
        step, shown = 1, 0
        while run_killed_at(step, work):
            seen = stores.digest(store, KEY).sha256 if store.stat(KEY) is not None else None
            assert seen in (None, expected), f"{what}, killed at step {step}"
            assert store.list("") == ((KEY,) if seen else ())
            shown += seen is None
            store.delete(KEY)
            step += 1
        assert shown > 3, what
        # The run that was not killed removed what the others left.
        assert [KEY] == everything_under(store.root)
        store.delete(KEY)


def test_a_move_killed_at_any_step_keeps_the_file_in_one_place(
    store: LocalStore, scratch: Path
) -> None:
    """A shard that is neither in scratch nor in the store would have to be built again."""
    data = scratch.read_bytes()
    step = 1
    while run_killed_at(step, lambda: store.put_file(KEY, scratch, move=True)):
        places = [path for path in (scratch, store.root / KEY) if path.exists()]
        assert [data] == [path.read_bytes() for path in places]
        scratch.write_bytes(data)
        store.delete(KEY)
        step += 1
    assert step > 3


def test_an_overwrite_killed_at_any_step_leaves_the_old_or_the_new(store: LocalStore) -> None:
    """A channel torn between two versions would be no channel at all."""
    etag = store.put_bytes("a", b"old")
    step = 1
    while run_killed_at(step, lambda: store.put_bytes("a", b"new", if_match=etag)):
        assert (store.root / "a").read_bytes() in (b"old", b"new")
        store.put_bytes("a", b"old")
        step += 1
    assert b"new" == (store.root / "a").read_bytes()
    assert step > 3


def half_written(root: Path) -> Path:
    """Wait for a hidden file that holds one chunk, and return it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for path in root.rglob(".tmp-*"):
            if path.is_file() and path.stat().st_size == stores.CHUNK_BYTES:
                return path
        time.sleep(0.01)
    raise TimeoutError("the child wrote nothing within 10 s")


def test_a_put_killed_while_copying_is_invisible_and_swept(
    store: LocalStore, tmp_path: Path
) -> None:
    """Half a shard is the largest leftover there is; it must neither be listed nor stay."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = os.fork()
    if child == 0:
        store.put_file(KEY, pipe)
        os._exit(1)
    with pipe.open("wb") as source:
        source.write(b"x" * (stores.CHUNK_BYTES + 1))
        source.flush()
        half = half_written(store.root)
        # While its writer lives, another put into the folder leaves it alone.
        store.put_bytes("vllm/gpt2/v1/config.json", b"{}")
        assert half.exists()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ("vllm/gpt2/v1/config.json",) == store.list("")
    assert store.stat(KEY) is None
    assert half.exists()
    store.put_bytes("vllm/gpt2/v1/config.json", b"{}")
    assert not half.exists()


def test_links_that_lead_out_of_the_root_are_refused(store: LocalStore, tmp_path: Path) -> None:
    """A key must reach nothing but the store, whatever someone put into its folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store.put_bytes("a/b", b"")
    (store.root / "out").symlink_to(outside)
    (store.root / "a/link").symlink_to(outside / "secret")
    (store.root / "a/dangling").symlink_to(outside / "new")
    for key in ("out/secret", "out/new", "a/link", "a/dangling"):
        for reach in (
            lambda key=key: store.get_bytes(key),
            lambda key=key: store.open_read(key),
            lambda key=key: store.stat(key),
            lambda key=key: store.put_bytes(key, b"overwritten"),
            lambda key=key: store.put_file(key, outside / "secret"),
            lambda key=key: store.delete(key),
            lambda key=key: store.local_path(key),
        ):
            with pytest.raises(StoreError, match="leads out of the store"):
                reach()
    assert ["secret"] == os.listdir(outside)
    assert b"secret" == (outside / "secret").read_bytes()
    # Named, so that a directory holding one is seen not to be clean; not followed.
    assert ("a/b", "a/dangling", "a/link", "out") == store.list("")


def test_a_root_that_is_itself_a_link_works(tmp_path: Path) -> None:
    """Large disks are often mounted elsewhere and linked."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "root")
    store.put_bytes("a/b", b"x")
    assert ("a/b",) == store.list("a/")


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".tmp-x", "a/.tmp-x"]
)
def test_keys_that_escape_or_hide_are_refused(store: LocalStore, key: str) -> None:
    """Keys also come out of documents that others wrote."""
    for reach in (
        lambda: store.get_bytes(key),
        lambda: store.put_bytes(key, b""),
        lambda: store.delete(key),
        lambda: store.local_path(key),
    ):
        with pytest.raises(StoreError, match="cannot be part of a path"):
            reach()


def test_local_path_is_where_the_object_is(store: LocalStore) -> None:
    """vLLM reads an artifact directory by its path."""
    store.put_bytes("a/b", b"x")
    path = store.local_path("a")
    assert path
    assert store.root / "a" == path
    assert b"x" == (path / "b").read_bytes()


def test_an_object_too_large_for_a_document_is_not_read_into_memory(store: LocalStore) -> None:
    """Whoever may write to the store must not be able to fill a reader's memory."""
    store.put_bytes("a", b"")
    os.truncate(store.root / "a", 10**12)
    with pytest.raises(StoreError, match="has more than 67108864 bytes"):
        store.get_bytes("a")


def test_errors_of_the_file_system_say_what_and_what_to_do(store: LocalStore) -> None:
    """A bare OSError names neither the object nor a remedy."""
    store.put_bytes("a", b"")
    with pytest.raises(StoreError, match=r"cannot write .*/a/b: .*; a file has the name of one"):
        store.put_bytes("a/b", b"")
    store.put_bytes("c/d", b"")
    with pytest.raises(StoreError, match=r"cannot write .*/c: .*; a folder has the object's name"):
        store.put_bytes("c", b"")
    with pytest.raises(StoreError, match=r"cannot store .*/absent as .*: No such file"):
        store.put_file("e", store.root / "absent")


def test_only_folders_are_stores_in_this_release(tmp_path: Path) -> None:
    """`s3://bucket` must not become a folder named `s3:`."""
    assert LocalStore(tmp_path) == open_store(str(tmp_path))
    with pytest.raises(StoreError, match=r"s3://… is not in this release"):
        open_store("s3://bucket/prefix")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not a folder"):
        open_store(str(tmp_path / "file"))
    with pytest.raises(StoreError, match="has no root"):
        open_store("")
