"""Comparisons and figures, one table out: `make bench`, or `python -m bench [NAME…]`.

Everything that is compared runs in one go, in turns, as whole processes; figures are medians.
Needs the demo's snapshot, which it makes in `demo/` when it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.table import Table

from bench import adapters, encrypt, load, s3
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.models import MODEL, make_snapshot

Row = tuple[str, str, str]
_SCRIPTS = Path(__file__).parent
_GIB = 2**30


def tensorize(rounds: int, work: Path) -> list[Row]:
    """SmolLM2-135M, process start to files closed, ours against vLLM's own function."""
    snapshot = make_snapshot(Path("demo").absolute(), _say)
    rows: list[Row] = []
    with LocalHub() as hub:
        hub.add_repo(MODEL)
        hub.commit(MODEL, folder_files(snapshot))
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(work / "hf")}
        for size in (1, 3):
            rows.append(_compared(size, rounds, snapshot, work, environment))
    return rows


def _compared(
    size: int, rounds: int, snapshot: Path, work: Path, environment: dict[str, str]
) -> Row:
    ours: list[float] = []
    theirs: list[float] = []
    # One of each first, uncounted: page cache, the Hub's cache, and vLLM's of inspected models.
    for number in range(rounds + 1):
        for script, source, seconds in (
            ("ours.py", str(snapshot), ours),
            ("vllms.py", MODEL, theirs),
        ):
            with TemporaryDirectory(dir=work) as out:
                took = _timed([script, source, out, str(size)], environment)
            if number:
                seconds.append(took)
    our, their = statistics.median(ours), statistics.median(theirs)
    return (
        f"tensorize SmolLM2-135M at TP={size}: ours / vLLM's tensorize_vllm_model",
        f"{our:.1f} s / {their:.1f} s = {our / their:.2f}",
        "at most 0.3",
    )


def memory(_: int, work: Path) -> list[Row]:
    """Peak anonymous memory of a virtual TP=4 build of a random Llama."""
    model = work / "random-llama"
    subprocess.run(
        [sys.executable, str(_SCRIPTS / "random_llama.py"), str(model)],
        check=True,
        capture_output=True,
    )
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    with TemporaryDirectory(dir=work) as out:
        peak = _peak_anonymous(["ours.py", str(model), out, "4"])
        shard = max(file.stat().st_size for file in Path(out).rglob("*.tensors"))
    return [
        (
            f"peak RssAnon, TP=4 virtual build of a {size / _GIB:.2f} GiB Llama",
            f"{peak / _GIB:.2f} GiB (one shard is {shard / _GIB:.2f} GiB)",
            f"at most {shard / _GIB + 0.8:.2f} GiB (one shard + 0.8 GiB)",
        )
    ]


def rerun(rounds: int, _: Path) -> list[Row]:
    """A finished chain run again, process start to end."""
    command = [sys.executable, "-m", "tensorize_assets.cli", "demo", "--directory", "demo"]
    command.append("--no-serve")
    subprocess.run(command, check=True, capture_output=True)
    seconds = [_run(command) for _ in range(rounds)]
    return [("finished chain run again", f"{statistics.median(seconds):.1f} s", "under 15 s")]


def location(rounds: int, _: Path) -> list[Row]:
    """Import of what Dagster loads, in a fresh process."""
    command = [sys.executable, "-c", "import tensorize_assets.definitions"]
    _run(command)
    seconds = [_run(command) for _ in range(rounds)]
    return [("import of the code location", f"{statistics.median(seconds):.2f} s", "under 3 s")]


def demo(_: int, work: Path) -> list[Row]:
    """The demo from nothing but the virtual environment."""
    folder = work / "demo"
    command = [sys.executable, "-m", "tensorize_assets.cli", "demo", "--directory", str(folder)]
    return [("`make demo` after set-up", f"{_run(command):.0f} s", "under 180 s")]


BENCHES: dict[str, Callable[[int, Path], list[Row]]] = {
    "tensorize": tensorize,
    "memory": memory,
    "rerun": rerun,
    "location": location,
    "demo": demo,
    "transfer": s3.transfer,
    "tensorize_s3": s3.tensorize_s3,
    "load": load.load,
    "encrypt": encrypt.encrypt,
    "adapters": adapters.adapters,
}


def main() -> None:
    """Run what was named, or everything, and print one table."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - BENCHES.keys():
        parser.error(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    rows: list[Row] = []
    with TemporaryDirectory(prefix="bench-") as work:
        for name in arguments.names or BENCHES:
            _say(f"{name} …")
            rows += BENCHES[name](arguments.rounds, Path(work))
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    table = Table("what", "figure", "goal", title=f"{os.cpu_count()} cores, {platform.machine()}")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _timed(script: list[str], environment: dict[str, str]) -> float:
    return _run([sys.executable, str(_SCRIPTS / script[0]), *script[1:]], environment)


def _run(command: list[str], environment: dict[str, str] | None = None) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return seconds


def _peak_anonymous(script: list[str]) -> int:
    """Largest RssAnon of the process, in bytes, sampled 50 times a second."""
    process = psutil.Popen(
        [sys.executable, str(_SCRIPTS / script[0]), *script[1:]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _anonymous(process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{script} failed with exit code {process.returncode}")
    return peak


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
