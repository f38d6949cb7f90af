"""The revision sensor over 1,000 models: seconds of its ticks, requests to the Hub, memory.

`python -m bench.sensor [MODELS] [SUFFIXES]`. The Hub runs in a process of its own and waits 20 ms
before each answer; runs that the sensor requests are written as ended well, and not executed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import dagster as dg
from rich.console import Console
from rich.table import Table

from tensorize_assets import definitions
from tensorize_assets.automation import revisions
from tensorize_assets.automation.partitions import catalog_partitions
from tensorize_assets.automation.revisions import hf_revision_sensor
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.resources.hub import HubResource

Row = tuple[str, str, str]

_LATENCY_S = 0.02
_EVERY_S = 300
_FILES = {
    "README.md": b"A model.",
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": b"weights",
    "special_tokens_map.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
}


class _Clock:
    """Stands in for `time` in the sensor, so that intervals pass at once."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now


def rows(models: int, suffixes: int, work: Path) -> list[Row]:
    """The figures of a fleet of `models`, each with `suffixes`."""
    clock = _Clock()
    setattr(revisions, "time", clock)  # noqa: B010 - a module has no such attribute to a checker
    instance_folder = work / "instance"
    instance_folder.mkdir()
    with _hub(models) as hub, dg.DagsterInstance.local_temp(str(instance_folder)) as instance:
        _write_catalog(work / "models.yaml", models, suffixes)
        ticker = _Ticker(instance, work, hub.endpoint)
        seconds, first = ticker.tick(hf_revision_sensor)
        requests = hub.asked()
        longest, wanted = seconds, len(first.run_requests)
        while wanted < models * suffixes:
            clock.now += 5
            took, data = ticker.tick(hf_revision_sensor)
            longest, wanted = max(longest, took), wanted + len(data.run_requests)
        clock.now += 5
        ticker.tick(hf_revision_sensor)
        clock.now += 5
        idle, nothing = ticker.tick(hf_revision_sensor)
        before = hub.asked()
        clock.now += _EVERY_S
        steady, unchanged = ticker.tick(hf_revision_sensor)
        again = hub.asked() - before
        ticker.tick(catalog_partitions)
        partitions, _ = ticker.tick(catalog_partitions)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    emitted = [*nothing.run_requests, *nothing.asset_events, *unchanged.run_requests]
    emitted += [*unchanged.asset_events, *nothing.dynamic_partitions_requests]
    what = f"{models:,} models of {suffixes} suffixes"
    return [
        (f"{what}: first tick, every revision asked, 100 builds requested", _s(seconds), "5 s"),
        (f"{what}: longest of the ticks until all builds are requested", _s(longest), "5 s"),
        (f"{what}: tick in which every revision is asked, and none has moved", _s(steady), "5 s"),
        (f"{what}: tick in which nothing is due", _s(idle), ""),
        (f"{what}: tick of catalog_partitions without news", _s(partitions), ""),
        ("requests of the first tick, and of a later one", f"{requests:,}, {again:,}", "1,000"),
        ("events and requests of ticks without news", str(len(emitted)), "0"),
        ("peak memory of the process", f"{peak / 2**20:.0f} MiB", "500 MiB"),
    ]


class _Ticker:
    def __init__(self, instance: dg.DagsterInstance, work: Path, endpoint: str) -> None:
        self._instance = instance
        hub = HubResource(endpoint=endpoint, cache_dir=str(work / "hub"))
        self._resources = definitions.resources(work, hub=hub)
        self._defs = dg.Definitions(
            assets=definitions.ASSETS, jobs=[definitions.build], resources=self._resources
        )
        self._cursors: dict[str, str | None] = {}

    def tick(self, sensor: dg.SensorDefinition) -> tuple[float, Any]:
        """Evaluate a sensor as Dagster does; do what it says, untimed."""
        start = time.monotonic()
        with dg.build_sensor_context(
            instance=self._instance,
            instance_ref=self._instance.get_ref(),
            definitions=self._defs,
            cursor=self._cursors.get(sensor.name),
            resources={key: self._resources[key] for key in sensor.required_resource_keys},
        ) as context:
            data: Any = sensor.evaluate_tick(context)
        seconds = time.monotonic() - start
        self._cursors[sensor.name] = data.cursor
        for request in data.dynamic_partitions_requests or ():
            self._instance.add_dynamic_partitions(
                request.partitions_def_name, list(request.partition_keys)
            )
        for event in data.asset_events:
            self._instance.report_runless_asset_event(event)
        for request in data.run_requests:
            self._instance.add_run(
                dg.DagsterRun(
                    job_name="build",
                    run_id=str(uuid.uuid4()),
                    tags={**request.tags, "dagster/run_key": request.run_key},
                    status=dg.DagsterRunStatus.SUCCESS,
                )
            )
        return seconds, data


def _write_catalog(path: Path, models: int, suffixes: int) -> None:
    names = [f"v{number}" for number in range(1, suffixes + 1)]
    entries = [
        f"  org/model-{number}: {{profiles: {{{', '.join(f'{name}: *p' for name in names)}}}}}"
        for number in range(1, models)
    ]
    first = ", ".join([f"{names[0]}: &p {{reload_device: cpu}}", *(f"{n}: *p" for n in names[1:])])
    lines = ["root: artifacts", "models:", f"  org/model-0: {{profiles: {{{first}}}}}", *entries]
    path.write_text("\n".join(lines) + "\n")


class _Hub(NamedTuple):
    endpoint: str
    asked: Callable[[], int]


@contextmanager
def _hub(models: int) -> Generator[_Hub]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.sensor", "hub", str(models)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    asking, answers = process.stdin, process.stdout
    assert asking
    assert answers

    def asked() -> int:
        print(file=asking, flush=True)
        return int(answers.readline())

    try:
        yield _Hub(answers.readline().strip(), asked)
    finally:
        asking.close()
        process.wait(10)


def _serve(models: int) -> None:
    """A Hub that lives until its standard input ends, and answers each line with its requests."""
    hub = LocalHub()
    for number in range(models):
        files = {**_FILES, "model.safetensors": b"weights of %d" % number}
        hub.commit(f"org/model-{number}", files)
    hub.latency_s = _LATENCY_S
    with hub:
        print(hub.endpoint, flush=True)
        for _ in sys.stdin:
            print(len(hub.requests), flush=True)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def main(models: int = 1000, suffixes: int = 1) -> None:
    """Print the table."""
    with TemporaryDirectory() as work:
        found = rows(models, suffixes, Path(work))
    table = Table("figure", "found", "bound")
    for row in found:
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["hub"]:
        _serve(int(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:]))
