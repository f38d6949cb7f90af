"""Ranks that are built apart give what one worker would have answered."""

from __future__ import annotations

from typing import Any

import pytest

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.shard_parts import cast_reasons, merge, split
from tensorize_assets.core.tasks import ShardRequest, ShardResult

_REQUEST = ShardRequest(
    model="org/model",
    suffix="v1",
    snapshot="/snapshot",  # pyright: ignore[reportArgumentType]
    root="s3://bucket",
    directory="vllm/org/model/v1-0123456789ab",
    scratch_dir="/scratch",
    dtype="auto",
    tensor_parallel_size=3,
)


def _result(ranks: tuple[int, ...], **changes: Any) -> ShardResult:
    """Each rank has a bfloat16 matrix and, but the first, a float32 scale that stock vLLM cuts."""
    scaled = [rank for rank in ranks if rank]
    casts = [
        {"name": "s", "from_dtype": "float32", "to_dtype": "bfloat16", "lossy": True, "rank": rank}
        for rank in scaled
    ]
    types = {"bfloat16": {"tensors": len(ranks), "bytes": 8 * len(ranks)}}
    if scaled:
        types["float32"] = {"tensors": len(scaled), "bytes": 4 * len(scaled)}
    census = {"by_dtype": types, "model_dtype": "bfloat16", "cast_by_stock": casts}
    reasons = [f"stock vLLM casts {len(scaled)} tensors to bfloat16 and loses values, first s "]
    reasons = [f"{reasons[0]}(float32)"] if scaled else []
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "architecture": "LlamaForCausalLM",
        "files": [_file(rank) for rank in ranks],
        "shards": [
            {"rank": rank, "file": f"model-rank-{rank:03d}.tensors", "tensors": []}
            for rank in ranks
        ],
        "census": census,
        "tied": [{"names": ["a", "b"], "stored_once": False}],
        "stock_vllm": {"loadable": False, "reasons": ["needs the post-load step", *reasons]},
        "versions": {"vllm": "0.31.0"},
        "seconds": {"load": 1.5 * len(ranks)},
    }
    return ShardResult.model_validate(fields | changes)


def _file(rank: int) -> dict[str, Any]:
    return {"path": f"model-rank-{rank:03d}.tensors", "size": 8, "sha256": f"{rank}" * 64}


def test_each_rank_is_asked_for_alone() -> None:
    """All of them, or those that were asked for; nothing else changes."""
    parts = split(_REQUEST)
    assert [(0,), (1,), (2,)] == [part.ranks for part in parts]
    assert all(part.model_copy(update={"ranks": None}) == _REQUEST for part in parts)
    some = _REQUEST.model_copy(update={"ranks": (2, 0)})
    assert [(2,), (0,)] == [part.ranks for part in split(some)]


def test_parts_in_any_order_give_one_workers_answer() -> None:
    """Files and casts in the order of ranks, counts added up, reasons over all of them."""
    parts = [_result((2,)), _result((0,)), _result((1,))]
    assert _result((0, 1, 2)) == merge(parts)
    assert _result((1,)) == merge([_result((1,))])


def test_the_reason_is_of_the_whole_census() -> None:
    """A part without a cast that loses values says nothing of the others'."""
    assert () == cast_reasons(_result((0,)).census)
    assert ("needs the post-load step",) == merge([_result((0,))]).stock_vllm.reasons


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("versions", {"vllm": "0.32.0"}),
        ("dtype", "float16"),
        ("architecture", "GPT2LMHeadModel"),
    ],
)
def test_parts_of_different_workers_are_refused(field: str, value: Any) -> None:
    """Nodes with other images would make a build that no version describes."""
    with pytest.raises(WorkerError, match=rf"rank 1 was built with {field} .* the same image"):
        merge([_result((0,)), _result((1,), **{field: value})])
