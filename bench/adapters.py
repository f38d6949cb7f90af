"""The asset lora_adapters: a rank-16 adapter of the demo's model, from its repo to the store."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import numpy
from safetensors import safe_open
from safetensors.numpy import save_file

from tensorize_assets import partitions
from tensorize_assets.definitions import ASSETS, resources
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.models import MODEL, make_snapshot
from tensorize_assets.resources.hub import HubResource

Row = tuple[str, str, str]

_RANK = 16
_REPO = "bench/rank-16"
_PROFILE = {"reload_device": "cpu", "adapters": [{"name": "bench", "repo": _REPO}]}


def adapters(rounds: int, work: Path) -> list[Row]:
    """Once the snapshot is there: the worker, process start to exit, and the step around it."""
    snapshot = make_snapshot(Path("demo").absolute(), lambda line: print(line, file=sys.stderr))
    count, size = _make_adapter(snapshot / "model.safetensors", work / "rank-16")
    home = work / "adapters-home"
    home.mkdir()
    profiles = {"models": {MODEL: {"profiles": {"v1": _PROFILE}}}}
    (home / "models.yaml").write_text(json.dumps({"root": "artifacts", **profiles}))
    workers: list[float] = []
    steps: list[float] = []
    with LocalHub() as hub, dg.DagsterInstance.ephemeral() as instance:
        hub.commit(MODEL, folder_files(snapshot))
        hub.commit(_REPO, folder_files(work / "rank-16"))
        _run(home, hub, instance, "hf_snapshot")
        # One of them first, uncounted: page cache.
        for number in range(rounds + 1):
            worker, step = _run(home, hub, instance, "lora_adapters")
            shutil.rmtree(home / "artifacts" / "records" / "lora_adapters")
            if number:
                workers.append(worker)
                steps.append(step)
    what = f"lora_adapters after the snapshot: rank {_RANK}, {count} tensors, {size / 1e6:.0f} MB"
    seconds = f"{statistics.median(workers):.1f} s; the asset's whole step "
    return [
        (
            f"{what}; the worker, process start to exit, without vLLM",
            f"{seconds}{statistics.median(steps):.1f} s",
            "under 3 s",
        )
    ]


def _make_adapter(weights: Path, folder: Path) -> tuple[int, int]:
    """Write an adapter of every linear layer; return its tensors and bytes."""
    random = numpy.random.default_rng(0)
    tensors: dict[str, Any] = {}
    with safe_open(weights, "np") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            if not name.endswith("_proj.weight"):
                continue
            rows, columns = file.get_slice(name).get_shape()
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            shapes = {"A": (_RANK, columns), "B": (rows, _RANK)}
            for half, shape in shapes.items():
                values = random.standard_normal(shape, numpy.float32)
                tensors[f"{stem}.lora_{half}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "base_model_name_or_path": MODEL, "target_modules": targets}
    config |= {"r": _RANK, "lora_alpha": 2 * _RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def _run(
    home: Path, hub: LocalHub, instance: dg.DagsterInstance, asset: str
) -> tuple[float, float]:
    """Materialize one asset; return seconds of its worker, 0 without one, and of its step."""
    partitions.add_pairs(instance, [MODEL], ["v1"])
    result = dg.materialize(
        ASSETS,
        selection=[asset],
        partition_key=partitions.partition_key(MODEL, "v1"),
        instance=instance,
        resources={
            **resources(home),
            "tensorize_hub": HubResource(endpoint=hub.endpoint, cache_dir=str(home / "hub")),
        },
    )
    (event,) = result.get_asset_materialization_events()
    metadata = event.step_materialization_data.materialization.metadata
    worker: Any = metadata["worker_seconds"].value if "worker_seconds" in metadata else 0.0
    (success,) = result.get_step_success_events()
    return worker, success.step_success_data.duration_ms / 1000
