"""From a commit on the local Hub to the channel's move: `python -m bench.commit [--rounds N]`.

A tiny Llama and real vLLM, under `dagster dev` as `make ui` starts it. The sensor looks every 5 s;
what it waits for is told apart: its part ends where it has requested the run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tensorize_assets.demo.hub_server import folder_files

# The fleet of the tests that open a browser on one.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "live"))

from live_fleet import Fleet, bump, changed, running_fleet, waited_for

_MODEL = "tiny/llama"
_SCRIPT = Path(__file__).parents[1] / "tests" / "worker" / "scripts" / "tiny_models.py"
_LONGEST_S = 600.0


class Took(NamedTuple):
    """Seconds from the push to the run's request, from there to its start, and to its end."""

    seen: float
    queued: float
    built: float


def measure(rounds: int, work: Path) -> list[Took]:
    """Commits one after another, each pushed when the one before is published."""
    subprocess.run([sys.executable, str(_SCRIPT), str(work / "models")], check=True, timeout=300)
    snapshot = work / "models" / "llama"
    found: list[Took] = []
    with running_fleet(
        work / "fleet", _MODEL, folder_files(snapshot), sensor=True, max_perplexity=100_000.0
    ) as fleet:
        waited_for(lambda: fleet.channel() or None, _LONGEST_S, "the first build")
        for number in range(rounds):
            folder = changed(
                snapshot / "model.safetensors",
                partial(bump, name="model.norm.weight", bits=0x3F81 + number),
                work / f"push-{number}",
            )
            found.append(_pushed(fleet, folder))
    return found


def _pushed(fleet: Fleet, folder: Path) -> Took:
    commit = fleet.push(folder)
    began = time.time()

    def moved() -> float | None:
        entries = fleet.channel()
        return entries[-1].when.timestamp() if entries[-1].commit == commit else None

    ended = waited_for(moved, _LONGEST_S, f"the channel's move to {commit}")
    run = waited_for(lambda: fleet.run_of(commit), 60, "the run's end")
    requested = run["creationTime"]
    return Took(requested - began, run["startTime"] - requested, ended - run["startTime"])


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with TemporaryDirectory() as work:
        found = measure(asked.rounds, Path(work))
    table = Table("from a commit to the channel's move", "median s", "goal")
    after = statistics.median(one.queued + one.built for one in found)
    table.add_row("the sensor's part (its interval is 5 s)", _median(found, "seen"), "")
    table.add_row("from the request to the run's start", _median(found, "queued"), "under 5")
    table.add_row("from the run's start to the channel's move", _median(found, "built"), "")
    table.add_row("all but the sensor's part", f"{after:.1f}", "under 90")
    Console().print(table)


def _median(found: list[Took], part: str) -> str:
    return f"{statistics.median(getattr(one, part) for one in found):.1f}"


if __name__ == "__main__":
    main()
