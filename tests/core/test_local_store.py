"""What holds of a folder as a store, beyond what every store promises."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorize_assets.core import store as stores
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.store import open_store

KEY = "vllm/gpt2/v1/model.tensors"


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


def test_a_stored_file_is_readable_by_whoever_the_umask_lets(
    store: LocalStore, scratch: Path
) -> None:
    """The account that serves an artifact is often not the one that built it."""
    scratch.chmod(0o600)
    store.put_file(KEY, scratch)
    plain = store.root / "plain"
    plain.touch()
    assert plain.stat().st_mode == (store.root / KEY).stat().st_mode


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


def test_folders_and_pipes_are_no_objects(store: LocalStore) -> None:
    """A pipe put in an object's place would otherwise hold its reader forever."""
    store.put_bytes("a/b", b"")
    os.mkfifo(store.root / "pipe")
    for key in ("a", "pipe"):
        assert store.get_bytes(key) is None
        assert store.stat(key) is None


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


def test_local_path_is_where_the_object_is(store: LocalStore) -> None:
    """vLLM reads an artifact directory by its path."""
    store.put_bytes("a/b", b"x")
    path = store.local_path("a")
    assert path
    assert store.root / "a" == path
    assert b"x" == (path / "b").read_bytes()


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


def test_a_path_that_is_no_folder_is_no_root(tmp_path: Path) -> None:
    """It would be found out by the first write only."""
    assert LocalStore(tmp_path) == open_store(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is not a folder"):
        open_store(str(tmp_path / "file"))


def test_boto3_is_not_imported_for_a_folder() -> None:
    """Its import takes as long as everything else that a worker's store needs."""
    code = (
        "import sys; from tensorize_assets.core.store import open_store; open_store('/tmp'); "
        "sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hidden_file_that_is_old_and_nobody_writes_is_swept(store: LocalStore) -> None:
    """A killed writer's half file lies in a folder that may never be written to again."""
    store.put_bytes("a/b/kept", b"")
    for folder in ("a", "a/b"):
        left = store.root / folder / ".tmp-left"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    (store.root / "a/b/.tmp-young").write_bytes(b"half")
    assert 1 == store.sweep("a/b/", 3600)
    assert ["a/.tmp-left", "a/b/.tmp-young", "a/b/kept"] == everything_under(store.root)
    assert 2 == store.sweep("", 0)
    assert ["a/b/kept"] == everything_under(store.root)


def test_a_copy_within_a_disk_is_killed_at_any_step_without_a_trace(
    store: LocalStore, scratch: Path
) -> None:
    """As every other write."""
    store.put_file("source", scratch)
    step = 1
    while run_killed_at(step, lambda: store.copy("source", KEY)):
        if store.stat(KEY) is not None:
            assert scratch.read_bytes() == (store.root / KEY).read_bytes()
        store.delete(KEY)
        step += 1
    assert step > 3
    assert scratch.read_bytes() == (store.root / KEY).read_bytes()
    assert ["source", KEY] == everything_under(store.root)


def test_chunks_that_go_on_while_the_file_is_moved_are_compared_with_its_size(
    store: LocalStore, scratch: Path
) -> None:
    """A reader that stopped early has not verified the file."""
    with pytest.raises(StoreError, match="nothing was written there"):
        store.put_file(KEY, scratch, move=True, chunks=[b"less"])
    assert scratch.exists()
    assert [] == everything_under(store.root)
