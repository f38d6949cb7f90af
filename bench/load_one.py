"""Load MODEL in one WAY, as vLLM's worker does.

    python load_one.py WAY MODEL SOURCE SCRATCH [--check] [--cold]

MODEL is a folder with config and safetensors; SOURCE what is read: the same folder or one in S3,
for `ours` and `stock tensorizer` a tensorizer file; SCRATCH an empty folder for downloads. Prints
seconds and bytes of `load_model`, without imports and configuration, both of which all ways share.
With `--check` also a digest of all parameters as they are before the post-load step, which distorts
the figures. With `--cold` the files on disk have left the page cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import (
    base_loader,
    default_loader,
    get_model_loader,
    utils,
)
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

from tensorize_assets.core import s3
from tensorize_assets.vllm_plugin import loader as our_loader
from tensorize_assets.worker.virtual_ranks import virtual_rank

FORMATS = {
    "ours": "tensorizer",
    "vLLM default": "auto",
    "Run:ai streamer": "runai_streamer",
    "fastsafetensors": "fastsafetensors",
    "stock tensorizer": "tensorizer",
}
DOWNLOADED = ("vLLM default", "fastsafetensors")


class StockTensorizer(BaseModelLoader):
    """What `deserialize_tensorizer_model` of vLLM 0.31 does, on the CPU, where it refuses to run.

    With the post-load step, which vLLM's own loader leaves out and a CPU's kernels need.
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing to do before."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        from tensorizer import TensorDeserializer
        from tensorizer.stream_io import open_stream

        config = TensorizerConfig(**self.load_config.model_loader_extra_config["tensorizer_config"])
        arguments = config._construct_tensorizer_args()
        given = {**arguments.stream_kwargs, **_stream_settings()}
        with (
            open_stream(str(config.tensorizer_uri), mode="rb", **given) as stream,
            TensorDeserializer(
                stream, dtype=model_config.dtype, device="cpu", **arguments.deserialization_kwargs
            ) as deserializer,
        ):
            deserializer.load_into_module(model)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.requires_grad_(False)
        del model.vllm_tensorized_marker


def _stream_settings() -> dict[str, Any]:
    if "S3_ENDPOINT_URL" not in os.environ:
        return {}
    return {
        "s3_access_key_id": os.environ["S3_ACCESS_KEY_ID"],
        "s3_secret_access_key": os.environ["S3_SECRET_ACCESS_KEY"],
        "s3_endpoint": os.environ["S3_ENDPOINT_URL"].removeprefix("http://"),
        "force_http": True,
    }


def _fastsafetensors_on_cpu(files: list[str], _: bool) -> Iterator[tuple[str, Any]]:
    """vLLM's iterator but for the device, which is `cuda:N` there, so that it fails on a CPU."""
    from fastsafetensors.common import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    parallel = ParallelLoader(
        pg=SingleGroup(),
        hf_weights_files=sorted(files),
        use_tqdm_on_load=False,
        device="cpu",
        nogds=True,
    )
    try:
        yield from parallel.iterate_weights()
    finally:
        parallel.close()


def _download(source: str, folder: Path) -> None:
    """What is not read from S3 itself is fetched to disk before, as from the Hub."""
    bucket, prefix = s3.split_uri(source)
    client = s3.from_environment().client_for(bucket)
    for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        name = found["Key"].rpartition("/")[2]
        if name.endswith(".safetensors"):
            client.download_file(bucket, found["Key"], str(folder / name))


class Clock:
    """Seconds spent in parts of a load."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                took = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + took

        return run


class Memory:
    """The largest RssAnon and RSS of this process, in bytes above what it has at the start."""

    def __enter__(self) -> Memory:
        self._ended = threading.Event()
        self._before = _status()
        self.peak = dict.fromkeys(self._before, 0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            self._look()

    def _look(self) -> None:
        for name, value in _status().items():
            self.peak[name] = max(self.peak[name], value - self._before[name])


def _status() -> dict[str, int]:
    wanted = {"RssAnon": "anonymous", "VmRSS": "resident"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[field].split()[0]) * 1024 for field, name in wanted.items()}


def _digest(model: torch.nn.Module) -> str:
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters(remove_duplicate=False)):
        sha256.update(name.encode())
        # Stock tensorizer casts every tensor to the model's type.
        same = tensor.detach().to(torch.bfloat16).contiguous()
        sha256.update(same.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _configure(way: str, model: str, source: str) -> VllmConfig:
    extra: dict[str, Any] = {}
    if FORMATS[way] == "tensorizer":
        extra = {"tensorizer_uri": source}
    elif way == "Run:ai streamer":
        # A path in S3 is read there: vLLM fetches the rest of the folder.
        model = source
    return EngineArgs(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        distributed_executor_backend="uni",
        load_format=FORMATS[way],
        model_loader_extra_config=extra,
    ).create_engine_config()


def _drop(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else [folder]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _timed_parts(clock: Clock, found: dict[str, Any] | None) -> Iterator[None]:
    """Time what every loader calls; what is left of `load_model` is the loading of weights."""
    post = clock.timed("post", utils.process_weights_after_loading)

    def process(model: torch.nn.Module, *arguments: Any) -> None:
        if found is not None:
            found["digest"] = _digest(model)
        post(model, *arguments)

    with ExitStack() as patches:
        for module in (base_loader, our_loader):
            for name, function in (
                ("initialize_model", clock.timed("construct", utils.initialize_model)),
                ("process_weights_after_loading", process),
            ):
                patches.enter_context(patch.object(module, name, function))
        iterator = "fastsafetensors_weights_iterator"
        patches.enter_context(patch.object(default_loader, iterator, _fastsafetensors_on_cpu))
        yield


def main(way: str, model: str, source: str, scratch: str, *flags: str) -> None:
    downloaded = way in DOWNLOADED and source.startswith("s3://")
    if downloaded:
        # All but the weights is there already.
        without = shutil.ignore_patterns("*.safetensors")
        model = shutil.copytree(model, f"{scratch}/model", ignore=without)
    config = _configure(way, model, source)
    clock, found = Clock(), {}
    with virtual_rank(0, 1), set_current_vllm_config(config):
        make: Any = StockTensorizer if way == "stock tensorizer" else get_model_loader
        loader = make(config.load_config)
        if "--cold" in flags:
            _drop(Path(source))
        with _timed_parts(clock, found if "--check" in flags else None), Memory() as memory:
            start, spent = time.perf_counter(), time.process_time()
            if downloaded:
                _download(source, Path(model))
            loader.load_model(vllm_config=config, model_config=config.model_config)
            seconds, spent = time.perf_counter() - start, time.process_time() - spent
    weights = seconds - sum(clock.seconds.values())
    figures = {"load": seconds, "weights": weights, "cpu": spent, **clock.seconds, **memory.peak}
    print(json.dumps({**figures, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
