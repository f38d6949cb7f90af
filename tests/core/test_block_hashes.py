"""A range of a file is told from another by the hashes of its blocks."""

from __future__ import annotations

import hashlib
import random

import pytest

from tensorize_assets.core.block_hashes import BLOCK_BYTES, hashes_of, require_blocks, widened
from tensorize_assets.core.errors import StoreError

_DATA = random.Random(0).randbytes(3 * BLOCK_BYTES + 100)


@pytest.mark.parametrize("chunk", [1000, BLOCK_BYTES - 1, BLOCK_BYTES, 5 * BLOCK_BYTES])
def test_chunks_of_any_size_give_the_same_list(chunk: int) -> None:
    """A SHA-256 of each block, and of the last, shorter one."""
    blocks = [_DATA[at : at + BLOCK_BYTES] for at in range(0, len(_DATA), BLOCK_BYTES)]
    expected = b"".join(hashlib.sha256(block).digest() for block in blocks)
    chunks = [_DATA[at : at + chunk] for at in range(0, len(_DATA), chunk)]
    assert expected == hashes_of(chunks)
    assert b"" == hashes_of([])


def test_a_range_is_widened_to_whole_blocks() -> None:
    """And never beyond the end of the file."""
    size = len(_DATA)
    assert (0, BLOCK_BYTES) == widened(5, 6, size)
    assert (BLOCK_BYTES, 3 * BLOCK_BYTES) == widened(BLOCK_BYTES, 2 * BLOCK_BYTES + 1, size)
    assert (3 * BLOCK_BYTES, size) == widened(size - 1, size, size)


def test_a_changed_byte_is_refused_with_its_block() -> None:
    """Wherever it is; what lies in other blocks is taken."""
    hashes = hashes_of([_DATA])
    require_blocks(memoryview(_DATA), 0, hashes, "s3://here")
    require_blocks(memoryview(_DATA)[2 * BLOCK_BYTES :], 2 * BLOCK_BYTES, hashes, "s3://here")
    changed = bytearray(_DATA)
    changed[2 * BLOCK_BYTES + 7] ^= 1
    require_blocks(memoryview(changed)[: 2 * BLOCK_BYTES], 0, hashes, "s3://here")
    with pytest.raises(StoreError, match=r"s3://here has other bytes in block 2 .* hf_snapshot"):
        require_blocks(memoryview(changed), 0, hashes, "s3://here")


def test_blocks_beyond_the_list_are_refused() -> None:
    """A file that grew, or a list that is cut."""
    hashes = hashes_of([_DATA])
    with pytest.raises(StoreError, match="block 3"):
        require_blocks(memoryview(_DATA), 0, hashes[:-32], "s3://here")
