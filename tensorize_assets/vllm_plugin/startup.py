"""What the server says once its model is loaded: a line of JSON, and metrics beside vLLM's own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import vllm
from prometheus_client import Gauge
from vllm.logger import init_logger

from tensorize_assets.core.serving import Serving, manifest_of
from tensorize_assets.core.tasks import RankLoad
from tensorize_assets.vllm_plugin import report

# Below vLLM's own, which has the handler.
logger = init_logger(f"vllm.{__name__}")

_LOOK_EVERY_S = 0.2

# By name, behind `tensorize_assets_`: the field of the summary, and what it says.
_GAUGES = {
    "load_seconds": ("seconds", "How long the slowest rank read its weights."),
    "load_bytes": ("bytes", "The size of all ranks' weights."),
    "load_bytes_per_second": ("bytes_per_second", "All ranks' bytes by the slowest rank's time."),
    "load_retries": ("retries", "Requests that had to be made again, and files begun anew."),
    "start_seconds": ("seconds_since_start", "From `tensorize serve` to the loaded model."),
}
_LABELS = ("model", "suffix", "build_id", "commit", "source")


def watch(served: Serving) -> None:
    """Say, in a thread, how `served` was loaded, as soon as the last of its ranks has reported."""
    ranks = manifest_of(served).tensor_parallel_size
    Thread(target=_watch, args=(served, ranks), name="start-up-report", daemon=True).start()


def _watch(served: Serving, ranks: int) -> None:
    folder = Path(served.reports)
    while not (failures := report.failures(folder)):
        loads = report.loads(folder)
        if len(loads) == ranks:
            _say(_summary(served, loads))
            return
        time.sleep(_LOOK_EVERY_S)
    for failure in failures:
        logger.error("%s %s was not loaded: %s", served.model, served.suffix, failure)


def _summary(served: Serving, loads: Sequence[RankLoad]) -> dict[str, Any]:
    size = sum(load.bytes for load in loads)
    # The server waits for the last.
    seconds = max(load.seconds for load in loads)
    return {
        "event": "model_loaded",
        "model": served.model,
        "suffix": served.suffix,
        "build_id": served.build_id,
        "commit": served.commit,
        "ranks": len(loads),
        "bytes": size,
        "seconds": round(seconds, 3),
        "bytes_per_second": round(size / seconds),
        "source": loads[0].source,
        "retries": sum(load.part_retries + load.restarts for load in loads),
        "device": loads[0].device,
        "device_name": loads[0].device_name,
        "vllm_version": vllm.__version__.partition("+")[0],
        "evidence_device": served.evidence_device,
        "seconds_since_start": round(time.time() - served.began, 3),
    }


def _say(summary: dict[str, Any]) -> None:
    for name, (field, says) in _GAUGES.items():
        _gauge(name, says).set(summary[field])
    info = {field: str(summary[field]) for field in _LABELS}
    _gauge("build_info", "The build that is served.", _LABELS).labels(**info).set(1)
    # At once: vLLM's processes log to the same stream.
    os.write(1, json.dumps(summary).encode() + b"\n")


def _gauge(name: str, says: str, labels: Sequence[str] = ()) -> Gauge:
    # Of several servers that share PROMETHEUS_MULTIPROC_DIR, one speaks.
    return Gauge(f"tensorize_assets_{name}", says, labels, multiprocess_mode="mostrecent")
