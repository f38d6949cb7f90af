"""tensorizer's own writer, over a file that outlives its threads."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorizer import TensorSerializer

from tensorize_assets.core.store import explained


@contextmanager
def serializer(path: Path, **kwargs: Any) -> Iterator[TensorSerializer]:
    """Write `path` in the block; when that ends well, finish the file.

    Its threads write by the number of the file's descriptor, and tensorizer 2.10 does not wait for
    them when it raises: they would go on into whatever file gets that number next. So the file is
    closed after they ended. It is always a plain file: tensorizer's own S3 stream uploads a partial
    one when an exception closes it, or when it is merely collected.

    Raises StoreError, with the path and what to do, for an error of the disk.
    """
    with explained("write", str(path)), path.open("wb+") as file:
        writer = TensorSerializer(file, **kwargs)
        try:
            yield writer
            writer.close()
        finally:
            stop(writer._pools)


def stop(pools: Iterable[ThreadPoolExecutor]) -> None:
    """End pools whose tasks wait for one another's, and what they have not begun.

    Not by `shutdown(cancel_futures=True)`: whoever is in `concurrent.futures.wait` for a task that
    it cancels waits for ever.
    """
    stopping = tuple(pools)
    for pool in stopping:
        with suppress(queue.Empty):
            while (item := pool._work_queue.get_nowait()) is not None:
                if item.future.cancel():
                    item.future.set_running_or_notify_cancel()
    for pool in stopping:
        pool.shutdown(wait=True)
