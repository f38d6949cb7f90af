"""A large fleet on Postgres: what a person waits for. `python -m bench.fleet [--models N]`.

1,000 models by 8 suffixes with 5 builds each in the event log, written through Dagster's own
storage; then, in seconds, the query of an asset's partitions as its page asks it of a webserver,
the table of fleet_status, and `tensorize fleet` and `tensorize show` as whole processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData, StepMaterializationData
from rich.console import Console
from rich.table import Table

from tensorize_assets import partitions
from tensorize_assets.assets.fleet_status import read_fleet
from tensorize_assets.core import channel, evidence, fleet, layout, manifest, signing
from tensorize_assets.core.build import build_id
from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.core.evidence import Evidence
from tensorize_assets.core.fleet import Publication
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.demo.ports import free_port
from tests.postgres import postgres

_GOLDEN = Path(__file__).parents[1] / "tests" / "core" / "golden" / "manifest.json"
_CHAIN = ("hf_snapshot", "reload_check", "published")
_BATCH = 2000
_ROUNDS = 5
_HEALTH = """
query PartitionHealthQuery($assetKey: AssetKeyInput!) {
  assetNodeOrError(assetKey: $assetKey) {
    ... on AssetNode {
      id
      partitionKeysByDimension { name type partitionKeys }
      assetPartitionStatuses {
        ... on DefaultPartitionStatuses {
          materializedPartitions materializingPartitions failedPartitions
        }
        ... on MultiPartitionStatuses {
          primaryDimensionName
          ranges {
            primaryDimStartKey primaryDimEndKey
            secondaryDim {
              ... on DefaultPartitionStatuses {
                materializedPartitions materializingPartitions failedPartitions
              }
            }
          }
        }
      }
    }
  }
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--suffixes", type=int, default=8)
    parser.add_argument("--builds", type=int, default=5)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        table = Table("what", "median of 5", "first", "target")
        for row in measure(Path(folder), asked.models, asked.suffixes, asked.builds):
            table.add_row(*row)
        Console(width=120).print(table)


def measure(
    folder: Path, models: int, suffixes: int, builds: int
) -> Iterator[tuple[str, str, str, str]]:
    """Fill an instance and time what is asked of it: name, median, first time, and target."""
    home = folder / "home"
    pairs = _write_catalog(home, models, suffixes)
    with postgres(folder / "postgres") as server:
        (home / "dagster.yaml").write_text(
            f"telemetry: {{enabled: false}}\n"
            f"storage: {{postgres: {{postgres_url: {json.dumps(server.url)}}}}}\n"
        )
        os.environ["DAGSTER_HOME"] = str(home)
        with dg.DagsterInstance.from_config(str(home)) as instance:
            began = time.perf_counter()
            _fill(instance, pairs, builds)
            _say(f"{len(pairs)} pairs by {builds} builds in {time.perf_counter() - began:.0f} s")
            # First: Dagster keeps what it found of an asset's partitions, whoever asked.
            with _webserver(home, (models, suffixes)) as ask:
                for asset in ("published", "hf_snapshot"):
                    yield _row(f"asset page, partitions of {asset}", lambda key=asset: ask(key))
            yield _row("fleet_status: catalog, rows and table", lambda: _table(home, instance))
            yield _row("daemon's tick over all conditions", _ticks(home, instance), "none")
        _publish(home, pairs[0][0], suffixes, builds)
        show = ["show", pairs[0][0]]
        yield _row("tensorize show (process)", lambda: _run(show))
        # Most of it is the import of Dagster.
        yield _row("tensorize fleet (process)", lambda: _run(["fleet", "--json"]), "none")


def _write_catalog(home: Path, models: int, suffixes: int) -> list[tuple[str, str]]:
    home.mkdir()
    lines = ["root: artifacts", "models:"]
    for number in range(models):
        lines.append(f"  org-{number % 50}/model-{number:04d}:")
        lines.append(f"    profiles: {'*all' if number else '&all'}")
        if not number:
            lines += [f"      v{label}: {{reload_device: cuda}}" for label in range(suffixes)]
    (home / "models.yaml").write_text("\n".join(lines) + "\n")
    return list(load_catalog(home / "models.yaml").pairs())


def _fill(instance: dg.DagsterInstance, pairs: list[tuple[str, str]], builds: int) -> None:
    """Materializations of each build, oldest first; the last of `published` after their plans.

    Of one pair in 50 a newer commit was found and refused by its reload.
    """
    partitions.add_pairs(
        instance,
        list(dict.fromkeys(model for model, _ in pairs)),
        list(dict.fromkeys(suffix for _, suffix in pairs)),
    )
    for build in range(builds):
        for asset in _CHAIN:
            # One by one, as Dagster stores plans; of more assets and builds it takes an hour.
            if (build, asset) == (builds - 1, "published"):
                _store(instance, (_planned(asset, *pair) for pair in pairs))
            _store(instance, (_made(asset, *pair, build) for pair in pairs))
        _say(f"build {build + 1} of {builds} is in the event log")
    for asset in _CHAIN[:2]:
        _store(instance, (_made(asset, *pair, builds, passed=False) for pair in pairs[::50]))


def _store(instance: dg.DagsterInstance, events: Iterator[dg.EventLogEntry]) -> None:
    batch: list[dg.EventLogEntry] = []
    for event in events:
        batch.append(event)
        if len(batch) == _BATCH:
            instance.event_log_storage.store_event_batch(batch)
            batch = []
    if batch:
        instance.event_log_storage.store_event_batch(batch)


def _planned(asset: str, model: str, suffix: str) -> dg.EventLogEntry:
    partition = str(partitions.partition_key(model, suffix))
    data = AssetMaterializationPlannedData(dg.AssetKey(asset), partition=partition)
    return _entry(asset, "ASSET_MATERIALIZATION_PLANNED", data)


def _made(
    asset: str, model: str, suffix: str, build: int, *, passed: bool = True
) -> dg.EventLogEntry:
    """A materialization of about the size that the assets' own have."""
    commit = f"{build:040x}"
    when = datetime.now(UTC) - timedelta(days=10 - build)
    texts = dict.fromkeys("abcdef", "some text of a usual length")
    metadata: dict[str, Any] = {**texts, "bytes": 10**10, "seconds": 12.5, "build_id": "0" * 12}
    version = commit
    if asset == "reload_check":
        metadata |= {
            "device": "cuda",
            "passed": passed,
            "reloaded_at": dg.MetadataValue.timestamp(when),
            "report": dg.MetadataValue.md("| report |\n" * 600),
        }
        version = f"{model} {suffix} {build}"
    if asset == "published":
        version = fleet.line(
            Publication(
                entry=build + 1,
                build=f"{build:012x}",
                commit=commit,
                published=when,
                reloaded=when,
                device="cuda",
                bytes=10**10,
                encryption="none",
                signed_by="0123456789abcdef",
            )
        )
    key = partitions.partition_key(model, suffix)
    made = dg.AssetMaterialization(
        asset,
        partition=key,
        metadata=metadata,
        tags={
            "dagster/data_version": version,
            "dagster/code_version": "1",
            **{f"dagster/partition/{name}": value for name, value in key.keys_by_dimension.items()},
        },
    )
    return _entry(asset, "ASSET_MATERIALIZATION", StepMaterializationData(made, []))


def _entry(asset: str, kind: str, data: Any) -> dg.EventLogEntry:
    event = dg.DagsterEvent(kind, job_name="build", step_key=asset, event_specific_data=data)
    return dg.EventLogEntry(
        error_info=None,
        level="debug",
        user_message="",
        run_id=str(uuid.uuid4()),
        timestamp=time.time(),
        step_key=asset,
        job_name="build",
        dagster_event=event,
    )


def _table(home: Path, instance: dg.DagsterInstance) -> None:
    """All that the asset fleet_status does but for Dagster's writing of the event."""
    now = datetime.now(UTC)
    rows = fleet.ordered(read_fleet(instance, load_catalog(home / "models.yaml")))
    assert {"failed", "behind", "current"} & {row.state for row in rows}
    records = [dg.TableRecord(fleet.cells(row, now)) for row in rows]
    dg.TableMetadataValue(records, dg.TableSchema(columns=[]))
    fleet.totals(rows, now)


def _ticks(home: Path, instance: dg.DagsterInstance) -> Callable[[], None]:
    """What the conditions of all assets cost the daemon where nothing is to be done."""
    from tensorize_assets.definitions import definitions

    cursor: Any = None
    defs = definitions(home)

    def tick() -> None:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        cursor = result.cursor

    return tick


@contextmanager
def _webserver(home: Path, expected: tuple[int, int]) -> Iterator[Callable[[str], None]]:
    """A webserver over the home; what it gives asks it for the partitions of an asset.

    `expected` are the numbers of models and suffixes, more models than suffixes.
    """
    port = free_port()
    command = f"-m dagster_webserver -h 127.0.0.1 -p {port} -m tensorize_assets.definitions"
    started = subprocess.Popen(
        [sys.executable, *command.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/server_info", started)

        def ask(asset: str) -> None:
            body = json.dumps(
                {"query": _HEALTH, "variables": {"assetKey": {"path": [asset]}}}
            ).encode()
            request = urllib.request.Request(
                f"{url}/graphql", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                found = json.load(response)["data"]["assetNodeOrError"]
            # All models have all suffixes: one range, from the first to the last.
            (whole,) = found["assetPartitionStatuses"]["ranges"]
            models, suffixes = sorted(
                len(one["partitionKeys"]) for one in found["partitionKeysByDimension"]
            )[::-1]
            assert (models, suffixes) == expected
            assert suffixes == len(whole["secondaryDim"]["materializedPartitions"])

        yield ask
    finally:
        started.terminate()
        started.wait(30)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"no answer from {url}")


def _publish(home: Path, model: str, suffixes: int, builds: int) -> None:
    """Channels of one model in the store, with the manifests and the evidence they lead to."""
    key = signing.load_or_create_signing_key(home / "keys" / "signing.key")
    store = LocalStore(home / "artifacts")
    golden = manifest.decode(_GOLDEN.read_bytes(), None)
    for label in range(suffixes):
        for build in range(builds):
            commit = f"{build:040x}"
            inputs = golden.inputs.model_copy(update={"model": model, "commit": commit})
            made = Manifest.model_validate(
                {
                    **golden.model_dump(),
                    "model": model,
                    "suffix": f"v{label}",
                    "inputs": inputs.model_dump(),
                    "build_id": build_id(inputs),
                    "snapshot": {**golden.snapshot.model_dump(), "commit": commit},
                }
            )
            directory = layout.artifact_dir(model, f"v{label}", made.build_id)
            encoded = manifest.encode(made, key)
            store.put_bytes(layout.manifest_key(directory), encoded)
            sha256 = manifest.manifest_sha256(encoded)
            evidence.write_evidence(store, key, _evidence(made, sha256))
            channel.append(
                store,
                key,
                model,
                f"v{label}",
                build_id=made.build_id,
                directory=directory,
                manifest_sha256=sha256,
                commit=commit,
                vllm_version=inputs.vllm,
                device="cuda",
                trusted=None,
            )


def _evidence(made: Manifest, sha256: str) -> Evidence:
    return Evidence.model_validate(
        {
            "model": made.model,
            "suffix": made.suffix,
            "build_id": made.build_id,
            "manifest_sha256": sha256,
            "device": "cuda",
            "device_name": "a GPU",
            "vllm_version": made.inputs.vllm,
            "tensor_parallel_size": made.tensor_parallel_size,
            "dtype": made.dtype,
            "passed": True,
            "checks": ({"name": "artifact_loads", "passed": True, "description": "it does"},),
            "perplexity": 12.5,
            "load": {
                "bytes": 1,
                "seconds": 1.0,
                "bytes_per_second": 1.0,
                "host_memory_before": 1,
                "host_memory_after": 1,
            },
            "default_load_seconds": 1.0,
            "prompts_digest": "ff00",
            "when": datetime.now(UTC),
        }
    )


def _run(words: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", *words],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _row(
    what: str, done: Callable[[], object], target: str = "under 2 s"
) -> tuple[str, str, str, str]:
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        done()
        seconds.append(time.perf_counter() - began)
    _say(f"{what}: {', '.join(f'{one:.2f}' for one in seconds)} s")
    return what, f"{statistics.median(seconds):.2f} s", f"{seconds[0]:.2f} s", target


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
