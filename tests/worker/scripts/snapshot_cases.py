"""Have snapshots brought from a mirror to this machine; what came of each case goes to CASES.

python snapshot_cases.py OUT CASES
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tensorize_assets.core import mirror
from tensorize_assets.core.layout import snapshot_file_key
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry
from tensorize_assets.core.mirror import SnapshotList
from tensorize_assets.core.tasks import MirroredSnapshot, SnapshotSource
from tensorize_assets.worker import snapshots
from tensorize_assets.worker.session import Progress

MODEL = "tiny/llama"
FILES = {
    "config.json": b"{}",
    "model-1.safetensors": b"1" * 3_000_000,
    "model-2.safetensors": b"2" * 2_000_000,
    "copy/config.json": b"{}",
}
# Larger ones come one after another.
mirror.LARGE_BYTES = 1_000_000


class Machine:
    """A cache, and what was downloaded to it, by any process."""

    def __init__(self, out: Path, name: str) -> None:
        self.root = LocalStore(out / "root")
        self.cache = out / name
        self.log = out / f"{name}.log"
        self.lines: list[str] = []

    def source(self, files: dict[str, bytes], commit: str = "a") -> SnapshotSource:
        entries = tuple(
            FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            for path, data in sorted(files.items())
        )
        folder = self.root.root.parent / f"hub-{commit}"
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        found = SnapshotList(
            model=MODEL, commit=commit * 40, weights_format="safetensors", files=entries
        )
        mirror.upload(self.root, found, folder)
        mirrored = MirroredSnapshot(model=MODEL, commit=commit * 40, files=entries)
        return SnapshotSource(mirrored=mirrored)

    def folder(self, source: SnapshotSource, **options: Any) -> Path:
        os.environ[snapshots.CACHE_VARIABLE] = str(self.cache)
        get_file = LocalStore.get_file

        def noted(store: LocalStore, key: str, *arguments: Any, **more: Any) -> Any:
            with self.log.open("a") as log:
                log.write(f"{key[-8:]}\n")
            return get_file(store, key, *arguments, **more)

        progress = Progress(lambda message, _: self.lines.append(message))
        with patch.object(LocalStore, "get_file", noted):
            return snapshots.local_folder(source, str(self.root.root), None, progress, **options)

    def asked(self) -> int:
        """How many files were downloaded since this was asked last."""
        count = len(self.log.read_text().splitlines()) if self.log.exists() else 0
        self.log.unlink(missing_ok=True)
        return count


def content(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wanted(files: dict[str, bytes]) -> dict[str, str]:
    return {path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())}


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - a test reads which it was
        return f"{type(error).__name__}: {error}"
    return "none"


def child(work: Callable[[], object]) -> int:
    """Do it in another process, which is gone afterwards; return the process."""
    process = os.fork()
    if not process:
        # What this process uses is not in use by that one.
        snapshots._used.clear()
        try:
            work()
        except BaseException:  # noqa: BLE001 - it is not to go on as its parent
            os._exit(1)
        os._exit(0)
    return process


def ended(process: int) -> int:
    return os.waitpid(process, 0)[1]


def in_child(work: Callable[[], object]) -> None:
    assert not ended(child(work))


def main(out: Path, cases: Path) -> None:
    found: dict[str, Any] = {}

    # Processes first: what this one uses later, its forks would use too.
    many = Machine(out, "many")
    source = many.source(FILES)
    slow = LocalStore.open_read

    def slower(self: LocalStore, *arguments: Any) -> Any:
        time.sleep(0.3)
        return slow(self, *arguments)

    def checked() -> None:
        assert content(many.folder(source)) == wanted(FILES)

    with patch.object(LocalStore, "open_read", slower):
        processes = [child(checked) for _ in range(3)]
        found["many"] = [*map(ended, processes), many.asked()]

    killed = Machine(out, "killed")

    def dies(self: LocalStore, key: str, *arguments: Any) -> Any:
        if key.endswith(wanted(FILES)["model-2.safetensors"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return slow(self, key, *arguments)

    with patch.object(LocalStore, "open_read", dies):
        signalled = os.WTERMSIG(ended(child(lambda: killed.folder(source))))
    before = killed.asked()
    in_child(lambda: killed.folder(source))
    found["killed"] = [signalled, before, killed.asked()]
    found["left"] = [path.name for path in killed.cache.rglob("*part*")]

    full = Machine(out, "full")
    os.environ[snapshots.CACHE_BYTES_VARIABLE] = "6000000"
    others = [
        full.source({"model.safetensors": bytes([n]) * 2_000_000}, c)
        for n, c in ((1, "c"), (2, "d"))
    ]
    in_child(lambda: full.folder(source))
    old = [path.name for path in full.cache.iterdir() if path.is_dir()]
    used = full.folder(others[0])
    found["full"] = {
        # 5 MB that nobody uses made way; 2 MB that are in use do not, whatever is wanted.
        "gone": [name for name in old if name != "files" and (full.cache / name).exists()],
        "files": len(list((full.cache / "files").iterdir())),
    }
    in_child(lambda: full.folder(source))
    in_child(lambda: full.folder(others[1]))
    found["full"]["used"] = content(used) == wanted({"model.safetensors": b"\1" * 2_000_000})
    os.environ[snapshots.CACHE_BYTES_VARIABLE] = "lots"
    found["no number"] = refused(lambda: Machine(out, "new").folder(source))
    del os.environ[snapshots.CACHE_BYTES_VARIABLE]

    plain = Machine(out, "plain")
    small = plain.folder(source, wanted=snapshots.is_small)
    found["small"] = [sorted(content(small)), plain.asked()]
    whole = plain.folder(source)
    found["whole"] = [content(whole) == wanted(FILES), plain.asked()]
    assert whole == plain.folder(source)
    later = {**FILES, "README.md": b"better"}
    next_one = plain.folder(plain.source(later, "b"))
    found["next"] = [content(next_one) == wanted(later), plain.asked()]
    found["blocks"] = len({path.stat().st_ino for path in plain.cache.rglob("model-1*")})
    found["said"] = [line.partition(" in ")[0] for line in plain.lines]

    damaged = Machine(out, "damaged")
    key = snapshot_file_key(MODEL, wanted(FILES)["model-2.safetensors"])
    damaged.root.put_bytes(key, bytes(2_000_000))
    found["damaged"] = refused(lambda: damaged.folder(source))
    found["damaged folders"] = len(
        [path for path in damaged.cache.glob("tiny*") if not path.suffix]
    )
    damaged.asked()
    damaged.root.put_bytes(key, FILES["model-2.safetensors"])
    found["mended"] = [content(damaged.folder(source)) == wanted(FILES), damaged.asked()]

    usage = shutil.disk_usage(out)._replace(free=1000)
    with patch.object(shutil, "disk_usage", lambda _: usage):
        found["no room"] = refused(lambda: Machine(out, "no-room").folder(source))
    open_ = Machine(out, "open")
    open_.cache.mkdir()
    open_.cache.chmod(0o777)
    found["open"] = refused(lambda: open_.folder(source))

    silent = Progress.silent()
    there = SnapshotSource.model_validate(str(out))
    found["folder"] = snapshots.local_folder(there, None, None, silent) == out
    found["no root"] = refused(lambda: snapshots.local_folder(source, None, None, silent))
    cases.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
