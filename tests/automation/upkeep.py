"""A home with a published build for the tests of schedules and of what they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from chain_home import MODEL, Home, stand_in

from tensorize_assets.demo.hub_server import LocalHub, folder_files


@contextmanager
def published_home(folder: Path, tiny_models: Path) -> Iterator[tuple[Home, LocalHub]]:
    """A home in which stand-in workers have built and published one suffix, and its Hub."""
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        home = Home(folder / "home", hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}})
        run = home.run(launcher=stand_in())
        assert {} == run.failures
        yield home, hub


def next_commit(hub: LocalHub, tiny_models: Path, name: str) -> str:
    """A commit of the model that differs in a file which is served."""
    files = {**folder_files(tiny_models / "llama"), "generation_config.json": f'{{"n": "{name}"}}'}
    return hub.commit(
        MODEL,
        {path: data.encode() if isinstance(data, str) else data for path, data in files.items()},
    )


class Materialized:
    """What one unpartitioned asset left: its metadata, its checks, and its log."""

    def __init__(
        self,
        asset: dg.AssetsDefinition,
        home: Home,
        instance: dg.DagsterInstance,
        config: dict[str, object] | None = None,
    ) -> None:
        name = asset.key.to_user_string()
        self.result = dg.materialize(
            [asset],
            instance=instance,
            resources=home.resources(stand_in()),
            run_config={"ops": {name: {"config": config}}} if config else None,
            raise_on_error=False,
        )
        self.metadata: dict[str, Any] = {}
        for event in self.result.get_asset_materialization_events():
            data = event.step_materialization_data.materialization
            self.metadata = {name: value.value for name, value in data.metadata.items()}
        self.checks = {one.check_name: one for one in self.result.get_asset_check_evaluations()}
        self.log = [
            str(entry.user_message)
            for entry in instance.all_logs(self.result.run_id)
            if entry.dagster_event is None
        ]

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [dict(record.data) for record in self.metadata[table].records]


def other_jobs_run(instance: dg.DagsterInstance, tags: dict[str, str]) -> None:
    """A run that is under way."""
    instance.add_run(dg.DagsterRun(job_name="build", tags=tags, status=dg.DagsterRunStatus.STARTED))
