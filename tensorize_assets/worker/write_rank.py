"""One rank built, loaded and written, by the same steps in this process and in vLLM's own ranks."""

from __future__ import annotations

import gc
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from tensorize_assets.core.errors import PreflightError, WorkerError
from tensorize_assets.core.jsonio import Record
from tensorize_assets.core.manifest import CastEntry, TensorEntry
from tensorize_assets.core.tasks import Sharding
from tensorize_assets.worker import census, model_builder, preflight
from tensorize_assets.worker.module_tensors import module_tensors, tied_names
from tensorize_assets.worker.secretbox import Bytes
from tensorize_assets.worker.write_shard import write_encrypted_shard, write_shard

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class WrittenRank(Record):
    """What one rank's file is to hold, and how its tensors are made up.

    `encrypted`: the tensors of an encrypted file, with the hashes that they had in memory.
    `seconds` by stage: load, census, write.
    """

    rank: int
    names: tuple[str, ...]
    tensors: dict[str, int]
    bytes: dict[str, int]
    casts: tuple[CastEntry, ...]
    tied: tuple[tuple[str, ...], ...]
    encrypted: tuple[TensorEntry, ...] | None
    seconds: dict[str, float]

    @property
    def census(self) -> tuple[Counter[str], Counter[str], list[CastEntry]]:
        """As `census.rank_census` gave it."""
        return Counter(self.tensors), Counter(self.bytes), list(self.casts)


class Say(Protocol):
    """Takes how far a rank is, and may raise to stop it."""

    def __call__(
        self,
        stage: str,
        *,
        tensors_done: int | None = None,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
    ) -> None: ...


class Stopwatch:
    """Adds up seconds by stage."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time what the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


def write_rank(
    config: VllmConfig,
    rank: int,
    path: Path,
    *,
    sharding: Sharding,
    device: torch.device,
    require_room: Callable[[int], None],
    say: Say,
    key: Bytes | None,
    serialization_kwargs: Mapping[str, Any],
    where: str,
    keep: Callable[[torch.nn.Module], None] = lambda _: None,
) -> WrittenRank:
    """Build the rank that this process is, load it, and write it to `path` before post-processing.

    `require_room` is told the bytes of the rank's tensors before they are read. `keep` gets the
    model when it is written; else its memory is free when this returns.

    Raises:
        PreflightError: vLLM, the format or the disk does not allow it.
        WorkerError: this host's memory does not hold the rank, or a tensor has no values.
    """
    clock = Stopwatch()
    say("loading")
    with clock("load"):
        with refusals(f"{where}: the installed vLLM cannot construct this model here", sharding):
            model = model_builder.construct(config, device)
        if sharding == "virtual":
            preflight.check_types(model, where)
        size = preflight.check_tensors(model, where)
        require_room(size)

        def loaded(tensors: int, done: int) -> None:
            say("loading", tensors_done=tensors, bytes_done=done)

        with refusals(f"{where}: vLLM's own weight loader refuses this snapshot", sharding):
            model_builder.load_weights(config, model, loaded, where, device)
    with clock("census"):
        tensors, sizes, casts = census.rank_census(model, rank, config.model_config.dtype)
        tied = tied_names(model)
        names = tuple(sorted({name for name, _, _ in module_tensors(model)}))

    def written(done: int) -> None:
        say("writing", bytes_done=done, bytes_total=size)

    encrypted = None
    with clock("write"):
        if key is None:
            write_shard(model, path, dict(serialization_kwargs), written)
        else:
            encrypted = write_encrypted_shard(model, path, key, written)
    keep(model)
    del model
    gc.collect()
    return WrittenRank(
        rank=rank,
        names=names,
        tensors=dict(tensors),
        bytes=dict(sizes),
        casts=tuple(casts),
        tied=tied,
        encrypted=encrypted,
        seconds=dict(clock.seconds),
    )


@contextmanager
def refusals(what: str, sharding: Sharding) -> Iterator[None]:
    """Report what vLLM refuses as such: retrying, or another host, does not help."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise PreflightError(
            f"{what}: a weights file asks to run code or holds other objects than tensors, and is "
            f"not read ({_one_line(error)}). Use a repo, or a revision, with safetensors"
        ) from error
    except (
        ValueError,
        RuntimeError,
        NotImplementedError,
        AssertionError,
        KeyError,
        TypeError,
        AttributeError,
        ImportError,
        SafetensorError,
    ) as error:
        if _out_of_memory(error):
            raise WorkerError(
                f"{what}: the memory of this host or device does not hold one rank "
                f"({_one_line(error)}). Run the worker on a larger one, or use a larger "
                "tensor_parallel_size"
            ) from error
        raise PreflightError(
            f"{what} ({type(error).__name__}: {_one_line(error)}). {_ADVICE[sharding]}"
        ) from error


_ADVICE: Mapping[Sharding, str] = {
    "virtual": "If it refuses this tensor_parallel_size, real ranks fail alike: choose another. If "
    "vLLM has no kernel for the model on a CPU, the model needs executor mode: set sharding: "
    "executor and reload_device: cuda in its profile, and run the worker on a GPU host",
    "executor": "These are vLLM's own ranks, on their devices: it would not serve the model from "
    "its source either. Choose another tensor_parallel_size, or a device that vLLM supports it on",
}


def _out_of_memory(error: BaseException) -> bool:
    # torch.OutOfMemoryError is a RuntimeError that speaks of CUDA.
    said = str(error).lower()
    return "allocate memory" in said or type(error).__name__ == "OutOfMemoryError"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
