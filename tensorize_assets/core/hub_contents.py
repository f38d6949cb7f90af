"""Whether a snapshot's files are what their names say, looked at before anything reads them.

A hash only says that they are the Hub's. Nothing is unpickled, and of weights a header is
all that is read.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.safetensors_header import read_header

_POINTER = b"version https://git-lfs.github.com/spec/"
_ZIP = b"PK\x03\x04"
# What a pickle of protocol 2 or later begins with; none of the texts that vLLM reads does.
_PICKLES = tuple(bytes([0x80, protocol]) for protocol in range(2, 8))
# zipfile reads an archive's directory at once; of 100,000 tensors it has 10 MB.
_MAX_READ_BYTES = 16 * 1024 * 1024


def problem_of(path: Path) -> str | None:
    """Say why the file cannot be what its name says; None where nothing speaks against it."""
    with path.open("rb", buffering=0) as file:
        first = file.read(len(_POINTER))
        if first == _POINTER:
            return "is a Git LFS pointer and not the file: it was pushed without Git LFS"
        if path.suffix == ".safetensors":

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            try:
                read_header(read, path.stat().st_size, path.name)
            except PreflightError as error:
                return str(error).removeprefix(f"{path.name} ")
            return None
    if path.suffix == ".bin":
        # Those of torch before 1.6 are no archives; its own reader tells what they are.
        return _packed(path) if first.startswith(_ZIP) else None
    if first.startswith((_ZIP, *_PICKLES)):
        return "is a pickle or an archive, where a text belongs: read as one it could run code"
    return None


def _packed(path: Path) -> str | None:
    """torch unpacks what it never packs itself: a megabyte of file fills gigabytes of memory."""
    try:
        with _Sparing(path) as file, zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            packed = [one for one in entries if one.compress_type or one.file_size > file.size]
            whole = sum(one.file_size for one in entries)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        return f"is no file of torch's, or damaged: {error}"
    if not packed and whole > file.size:
        return f"holds files of {whole:,} bytes in fewer: they lie over one another"
    if not packed:
        return None
    return (
        f"holds {packed[0].filename!r} packed, {packed[0].file_size:,} bytes of memory in a file "
        "of fewer: torch packs nothing"
    )


class _Sparing(io.FileIO):
    """A file of which nobody reads much at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        rest = self.size - self.tell()
        if (rest if size is None or size < 0 else size) > _MAX_READ_BYTES:
            raise zipfile.BadZipFile("its directory is too large")
        return super().read(size)
