"""Ticks of the sensors, as Dagster's daemon has them: what they return is done, with a clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg
from chain_home import Home, stand_in, weights

from tensorize_assets.automation.partitions import catalog_partitions
from tensorize_assets.automation.revisions import hf_revision_sensor
from tensorize_assets.definitions import ASSETS, CHECKS, build
from tensorize_assets.resources.launchers.local import SubprocessLauncher

RUN_KEY_TAG = "dagster/run_key"
FILES = {"config.json": b"{}", "model.safetensors": weights(b"small"), "README.md": b"A model."}


class Clock:
    """Stands in for the module `time` in a sensor: `now` moves when a test says so."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        return self.now


@dataclass(frozen=True)
class Tick:
    """What a tick returned."""

    data: Any
    log: tuple[str, ...]

    @property
    def pairs(self) -> list[str]:
        return [request.tags["dagster/partition"] for request in self.data.run_requests]

    @property
    def commits(self) -> list[str | None]:
        return [request.tags.get("tensorize_assets/commit") for request in self.data.run_requests]

    @property
    def keys(self) -> list[str]:
        return [request.run_key for request in self.data.run_requests]

    @property
    def nothing(self) -> bool:
        """Whether it emitted nothing at all."""
        data = self.data
        return not (
            data.run_requests or data.asset_events or data.dynamic_partitions_requests or self.log
        )

    @property
    def checks(self) -> list[Any]:
        return [one for one in self.data.asset_events if isinstance(one, dg.AssetCheckEvaluation)]


@dataclass
class Ticker:
    """A sensor's ticks on one instance; runs that it requests are written, and not executed."""

    home: Home
    instance: dg.DagsterInstance
    sensor: dg.SensorDefinition
    cursor: str | None = None
    launcher: SubprocessLauncher | None = None

    def __post_init__(self) -> None:
        self.resources = self.home.resources(self.launcher or stand_in())
        self.definitions = dg.Definitions(
            assets=ASSETS,
            asset_checks=CHECKS,
            jobs=[build],
            sensors=[hf_revision_sensor, catalog_partitions],
            resources=self.resources,
        )

    def tick(self, *, start: bool = True) -> Tick:
        """Evaluate once and do what it says; without `start` no run is made of its requests."""
        log = Log()
        with dg.build_sensor_context(
            instance=self.instance,
            instance_ref=self.instance.get_ref(),
            definitions=self.definitions,
            # Only those that it asks for: not all can be made outside a run.
            resources={key: self.resources[key] for key in self.sensor.required_resource_keys},
            cursor=self.cursor,
        ) as context:
            context._logger = log  # pyright: ignore[reportAttributeAccessIssue]
            data: Any = self.sensor.evaluate_tick(context)
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        for request in data.dynamic_partitions_requests or ():
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(
                    request.partitions_def_name, list(request.partition_keys)
                )
            else:
                for key in request.partition_keys:
                    self.instance.delete_dynamic_partition(request.partitions_def_name, key)
        for request in data.run_requests if start else ():
            self.add_run(request.run_key, request.tags)
        self.cursor = data.cursor
        return Tick(data, tuple(log.lines))

    def add_run(
        self,
        run_key: str,
        tags: Mapping[str, str] | None = None,
        status: dg.DagsterRunStatus = dg.DagsterRunStatus.STARTED,
    ) -> None:
        """Write a run, the newest of its key, that stands so."""
        tags = {**(tags or {}), RUN_KEY_TAG: run_key}
        self.instance.add_run(
            dg.DagsterRun(job_name="build", run_id=str(uuid.uuid4()), tags=tags, status=status)
        )

    def end(self, tick: Tick, status: dg.DagsterRunStatus = dg.DagsterRunStatus.SUCCESS) -> None:
        """Let the runs that a tick requested have ended so."""
        for run in self.instance.get_runs(dg.RunsFilter(tags={RUN_KEY_TAG: tick.keys})):
            self.instance.delete_run(run.run_id)
            self.instance.add_run(run.with_status(status))


class Log:
    """What a tick says, without the file that Dagster would write it to."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str) -> None:
        self.lines.append(line)

    warning = info

    def has_captured_logs(self) -> bool:
        return False
