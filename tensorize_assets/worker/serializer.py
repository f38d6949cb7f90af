"""tensorizer's own writer, over a file that outlives its threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
            for pool in writer._pools:
                pool.shutdown(wait=True, cancel_futures=True)
