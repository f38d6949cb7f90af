"""Tries what the product needs of a folder, in one of its own that is removed again."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorize_assets.core import layout
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.local_store import copy_in_kernel, sync_folder
from tensorize_assets.core.store import explained as explained_file
from tensorize_assets.core.store_verbs import (
    SMALL,
    STREAMS,
    StoreReport,
    Tried,
    Wrong,
    large_content,
)

# Free space below which a folder is not fit for any model, in bytes.
_LITTLE_BYTES = 1024 * 1024 * 1024

_FOLDER_VERBS = {
    "write": "write access",
    "write 64 MiB": "disk space",
    "read 64 MiB": "read access",
    "rename": "write access",
    "create exclusively": "hard links",
    "lock": "flock",
    "list": "read access",
    "copy in the kernel": "copy_file_range",
    "delete": "write access",
    "free space": "at least 1 GiB",
}


def check_folder(root: Path) -> StoreReport:
    """Try every verb on a folder. Raises StoreError for what is none."""
    with explained_file("look into", str(root)):
        wrong = root.exists() and not root.is_dir()
        made = [path for path in (root, *root.parents) if not path.exists()]
    if wrong:
        raise StoreError(f"root {root} is not a folder; give one")
    tried = Tried(_explain_file)
    folder = root / f"{layout.HIDDEN_PREFIX}check-{uuid.uuid4().hex}"
    left: list[str] = []
    try:
        _try_folder(tried, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            left.append(f"{folder}: this user cannot remove it")
        # Only those that were made here, and only empty.
        for path in made:
            with suppress(OSError):
                path.rmdir()
    tried.skip_rest(_FOLDER_VERBS, "needs `write`")
    return StoreReport(
        root=str(root), facts=_disk_facts(root), verbs=tuple(tried.verbs), left=tuple(left)
    )


def _explain_file(verb: str, call: Callable[[], Any]) -> Any:
    with explained_file(verb, "there"):
        return call()


def _try_folder(tried: Tried, folder: Path) -> None:
    def try_(name: str, call: Callable[[], int | None], **how: str) -> bool:
        return tried.try_(name, _FOLDER_VERBS[name], call, **how)

    small, large = folder / "small", folder / "large"

    def write() -> None:
        folder.mkdir(parents=True)
        _write(small, SMALL)

    if not try_("write", write):
        return
    content = large_content()
    try_("write 64 MiB", lambda: _write(large, content), verb="write")
    try_("read 64 MiB", lambda: _read(large, content), after="write 64 MiB", verb="read")
    try_("rename", lambda: _rename(small))
    try_("create exclusively", lambda: _link(small), verb="make a hard link")
    try_("lock", lambda: _lock(small))
    try_("list", lambda: _list(folder, small))
    try_("copy in the kernel", lambda: _copy_range(small), otherwise=STREAMS)
    try_("delete", small.unlink)
    try_("free space", lambda: _space(folder))


def _write(path: Path, content: bytes) -> int:
    """Write a file so that it outlives a power cut."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path.parent)
    return len(content)


def _read(path: Path, content: bytes) -> int:
    if path.read_bytes() != content:
        raise Wrong("what comes back is not what was written; check the disk")
    return len(content)


def _rename(path: Path) -> None:
    target = path.with_name("renamed")
    target.write_bytes(b"what it replaces")
    path.rename(target)
    sync_folder(path.parent)
    if target.read_bytes() != SMALL:
        raise Wrong("a renamed file did not replace the other; check the disk")
    target.rename(path)


def _link(path: Path) -> None:
    os.link(path, path.with_name("linked"))
    try:
        os.link(path, path.with_name("linked"))
    except FileExistsError:
        return
    raise Wrong("a second exclusive create did not fail, so that two runs could publish at once")


def _lock(path: Path) -> None:
    with path.open("rb+") as one, path.open("rb+") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise Wrong("a lock does not exclude; mount the file system with locks")


def _list(folder: Path, path: Path) -> None:
    if path not in folder.iterdir():
        raise Wrong("a file that is there is not listed")


def _copy_range(path: Path) -> None:
    with path.open("rb") as source, path.with_name("copied").open("wb") as target:
        if not copy_in_kernel(source.fileno(), target.fileno()):
            raise Wrong("this file system, or kernel, does not copy by itself")


def _space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _LITTLE_BYTES:
        raise Wrong(f"only {free:,} bytes are free; free some, or set another `root`")


def _disk_facts(root: Path) -> dict[str, str]:
    there = next(path for path in (root, *root.parents) if path.exists())
    usage = shutil.disk_usage(there)
    return {"free": f"{usage.free / 1e9:,.1f} of {usage.total / 1e9:,.1f} GB"}
