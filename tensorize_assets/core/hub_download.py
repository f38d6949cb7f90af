"""Bringing files of a commit into the cache, whose layout is huggingface_hub's.

Its file locks let concurrent runs share one download.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Self

# Its parameter user_agent is typed as a plain dict.
from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]
from huggingface_hub.utils import WeakFileLock

from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub_access import (
    LIBRARY,
    HubAccess,
    cache_dir_of,
    endpoint_of,
    hub_errors,
    repo_dir_of,
    snapshot_dir,
    token_of,
)
from tensorize_assets.core.hub_files import HubFile, RevisionListing

Progress = Callable[[int, int], None]
"""Called with the bytes of the snapshot that are on the disk, and how many there are in all."""

_PROGRESS_S = 1.0
_DOWNLOADS_AT_ONCE = 8
# A lock that nobody holds says that a partial file is left over from a killed run; the age is for
# file systems on which locks are not kept.
_ABANDONED_S = 60.0


def check_disk(access: HubAccess, listing: RevisionListing, missing: Sequence[HubFile]) -> None:
    """See that the `missing` files fit on the cache's disk, with what other runs download.

    Raises:
        HubError: they do not.
    """
    blobs = repo_dir_of(access, listing.model) / "blobs"
    # Keyed by content: files that are the same take their space once.
    needed = {file.blob: file.size for file in missing if not (blobs / file.blob).exists()}
    for blob, there in _bytes_of_other_runs(access, listing.model).items():
        if blob in needed:
            needed[blob] = max(0, needed[blob] - there)
    folder = cache_dir_of(access)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    total = sum(needed.values())
    if total > free:
        raise HubError(
            f"{listing.model}@{listing.revision} does not fit on the disk: {_bytes(total)} needed, "
            f"{_bytes(free)} free in {folder}; free some space or use another cache folder"
        )


def fetch_files(
    access: HubAccess,
    listing: RevisionListing,
    missing: Sequence[HubFile],
    progress: Progress | None,
) -> None:
    """Download the `missing` files, several at once; see `hub.download` for `progress`.

    Raises:
        HubError, HubUnavailableError: the first that a file failed with; the others are given up.
    """
    # Not snapshot_download: it lists the tree once more, without a time limit, and would leave
    # out what that listing lacks.
    interrupted = threading.Event()

    def fetch(file: HubFile) -> None:
        what = f"{file.path} of {listing.model}@{listing.commit}"
        try:
            with hub_errors(access, listing.model, listing.revision, gone=what):
                hf_hub_download(
                    listing.model,
                    file.path,
                    revision=listing.commit,
                    cache_dir=cache_dir_of(access),
                    endpoint=access.endpoint,
                    token=token_of(access),
                    library_name=LIBRARY,
                    tqdm_class=_quiet_bar(interrupted, file.size),
                )
        except _TooLongError:
            raise HubError(
                f"{what}: {endpoint_of(access)} sends more than the {_bytes(file.size)} that it "
                "declares, and was not read on; run again, and if it stays so choose another "
                "endpoint or revision"
            ) from None

    with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as pool:
        pending: set[Future[None]] = {pool.submit(fetch, file) for file in missing}
        failure: BaseException | None = None
        try:
            while pending:
                done, pending = wait(pending, timeout=_PROGRESS_S, return_when=FIRST_COMPLETED)
                for future in done:
                    if failure is None and not future.cancelled():
                        failure = future.exception()
                if failure is not None:
                    # What runs may end: a file that is complete is not downloaded again.
                    for future in pending:
                        future.cancel()
                if progress is not None:
                    progress(_bytes_on_disk(access, listing), listing.size)
        finally:
            interrupted.set()
            for future in pending:
                future.cancel()
    if failure is not None:
        raise failure


def _bytes_of_other_runs(access: HubAccess, model: str) -> dict[str, int]:
    """Return the bytes that running downloads have of each content; sweep what killed ones left."""
    found: dict[str, int] = {}
    locks = cache_dir_of(access) / ".locks" / repo_dir_of(access, model).name
    for partial in (repo_dir_of(access, model) / "blobs").glob("*.incomplete"):
        blob = partial.name.partition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            stat = partial.stat()
            try:
                locks.mkdir(parents=True, exist_ok=True)
                with WeakFileLock(locks / f"{blob}.lock", timeout=0.1):
                    if time.time() - stat.st_mtime > _ABANDONED_S:
                        partial.unlink()
            except TimeoutError:
                found[blob] = max(found.get(blob, 0), stat.st_size)
    return found


def _bytes_on_disk(access: HubAccess, listing: RevisionListing) -> int:
    folder = snapshot_dir(access, listing.model, listing.commit)
    sizes: dict[str, int] = {}
    for path in (repo_dir_of(access, listing.model) / "blobs").glob("*"):
        blob = path.name.partition(".")[0]
        with contextlib.suppress(OSError):
            sizes[blob] = max(sizes.get(blob, 0), path.stat().st_size)
    return sum(
        file.size if (folder / file.path).exists() else min(sizes.get(file.blob, 0), file.size)
        for file in listing.files
    )


class _InterruptedError(Exception):
    """Ends the download threads of a call that was interrupted."""


class _TooLongError(Exception):
    """Ends a download that goes on behind the file's end, before the disk is full."""


def _quiet_bar(interrupted: threading.Event, size: int) -> Any:
    """Return what huggingface_hub takes for a progress bar class: it shows nothing.

    Its update is the one place where a running download can be stopped: when it is interrupted, and
    when more than `size` bytes came by HTTP. They are told before they are written. Xet, which
    holds a file's length itself, tells what moved on the network, which may be more.
    """

    class QuietBar:
        def __init__(self, *args: object, **kwargs: object) -> None:
            # What a download begins at stands in a bar of HTTP's alone.
            self._left = float(size) if "initial" in kwargs else math.inf

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            if interrupted.is_set():
                raise _InterruptedError
            self._left -= n or 0
            if self._left < 0:
                raise _TooLongError

        def set_postfix_str(self, *args: object, **kwargs: object) -> None:
            pass

    return QuietBar


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({count / 1e9:.1f} GB)"
