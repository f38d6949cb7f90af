"""Virtual ranks as tasks of their own: one request for each, and one result of all."""

from __future__ import annotations

from collections.abc import Sequence

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.manifest import DtypeCensus, DtypeCount, StockVllm
from tensorize_assets.core.tasks import ShardRequest, ShardResult


def split(request: ShardRequest) -> tuple[ShardRequest, ...]:
    """A request for each rank that `request` asks for; ranks need nothing of one another."""
    ranks = request.ranks or range(request.tensor_parallel_size)
    return tuple(request.model_copy(update={"ranks": (rank,)}) for rank in ranks)


def merge(parts: Sequence[ShardResult]) -> ShardResult:
    """What one worker would have answered that had written every part; in seconds, their sums.

    Raises:
        WorkerError: the parts are not of one build: their workers differ in what they have
            installed.
    """
    first = parts[0]
    for part in parts[1:]:
        for field in ("dtype", "architecture", "versions", "tensor_format"):
            one, other = getattr(first, field), getattr(part, field)
            if one != other:
                raise WorkerError(
                    f"rank {part.shards[0].rank} was built with {field} {other} and rank "
                    f"{first.shards[0].rank} with {one}: give every node the same image"
                )
    pairs = sorted(
        (
            (shard, file)
            for part in parts
            for shard, file in zip(part.shards, part.files, strict=True)
        ),
        key=lambda pair: pair[0].rank,
    )
    census = _merged([part.census for part in parts])
    others = {
        reason: None
        for part in parts
        for reason in part.stock_vllm.reasons
        if reason not in cast_reasons(part.census)
    }
    tied = {group.names: group for part in parts for group in part.tied}
    reasons = (*others, *cast_reasons(census))
    return first.model_copy(
        update={
            "files": tuple(file for _, file in pairs),
            "shards": tuple(shard for shard, _ in pairs),
            "census": census,
            "tied": tuple(tied[names] for names in sorted(tied)),
            "stock_vllm": StockVllm(loadable=not reasons, reasons=reasons),
            "source_bytes": sum(part.source_bytes or 0 for part in parts) or None,
            "seconds": {
                stage: round(sum(part.seconds.get(stage, 0) for part in parts), 3)
                for stage in first.seconds
            },
        }
    )


def cast_reasons(census: DtypeCensus) -> tuple[str, ...]:
    """Why stock vLLM, which casts every tensor to the model's type, cannot load these."""
    lossy = [cast for cast in census.cast_by_stock if cast.lossy]
    if not lossy:
        return ()
    return (
        f"stock vLLM casts {len(lossy)} tensors to {census.model_dtype} and loses values, "
        f"first {lossy[0].name} ({lossy[0].from_dtype})",
    )


def _merged(parts: Sequence[DtypeCensus]) -> DtypeCensus:
    names = sorted({name for part in parts for name in part.by_dtype})
    none = DtypeCount(tensors=0, bytes=0)
    counts = {name: [part.by_dtype.get(name, none) for part in parts] for name in names}
    casts = [cast for part in parts for cast in part.cast_by_stock]
    return DtypeCensus(
        by_dtype={
            name: DtypeCount(
                tensors=sum(one.tensors for one in found), bytes=sum(one.bytes for one in found)
            )
            for name, found in counts.items()
        },
        model_dtype=parts[0].model_dtype,
        # Of one rank they are in the order of its tensors already.
        cast_by_stock=tuple(sorted(casts, key=lambda cast: cast.rank)),
    )
