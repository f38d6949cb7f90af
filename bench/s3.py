"""Comparisons over S3: transfers against other clients, and tensorizing straight to a bucket."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tensorize_assets.demo.s3_server import LocalS3

Row = tuple[str, str, str]
Environment = dict[str, str]

_SCRIPTS = Path(__file__).parent
_CLIENTS = ("ours", "boto3 default", "boto3 tuned", "obstore", "awscrt", "s5cmd")
_STREAMS = ("ours", "boto3 default", "obstore")
_MB = 1_000_000
_SIZE = 1000 * _MB
# So slow that the server takes less than one of two cores.
_LINK_MB = 60


@contextmanager
def server(work: Path) -> Iterator[Environment]:
    with LocalS3(work / "s3") as server:
        server.create_bucket("bench")
        yield {
            "BUCKET": "bench",
            "S3_ENDPOINT_URL": server.endpoint,
            "S3_ACCESS_KEY_ID": server.access_key,
            "S3_SECRET_ACCESS_KEY": server.secret_key,
        }


def transfer(rounds: int, work: Path) -> list[Row]:
    """1 GB up and down, ours (hashed by SHA-256 on the way) against other clients, in turns."""
    source = work / "source"
    with source.open("wb") as file:
        for _ in range(_SIZE // _MB):
            file.write(os.urandom(_MB))
    rows: list[Row] = []
    with server(work) as environment:
        for verb, clients, goal in (
            ("put", _CLIENTS, 0.95),
            ("get", _CLIENTS, 0.9),
            ("stream", _STREAMS, 0.9),
        ):
            rows += _compared(verb, clients, goal, rounds, source, work, environment)
    source.unlink()
    return rows


def _compared(
    verb: str,
    clients: tuple[str, ...],
    goal: float,
    rounds: int,
    source: Path,
    work: Path,
    environment: Environment,
) -> list[Row]:
    rates: dict[str, list[float]] = {client: [] for client in clients}
    memory: dict[str, int] = dict.fromkeys(clients, 0)
    for number in range(rounds + 1):
        # Each starts a round once: the first of one finds other caches than the last.
        for client in clients[number % len(clients) :] + clients[: number % len(clients)]:
            with TemporaryDirectory(dir=work) as folder:
                path = source if verb == "put" else Path(folder) / "got"
                done = subprocess.run(
                    [sys.executable, str(_SCRIPTS / "s3_clients.py"), client, verb, str(path)],
                    env={**os.environ, **environment, **_others(client)},
                    check=True,
                    stdout=subprocess.PIPE,
                    timeout=600,
                )
            found = json.loads(done.stdout)
            if number:
                rates[client].append(_SIZE / _MB / found["seconds"])
                memory[client] = max(memory[client], found["memory"])
    medians = {client: statistics.median(found) for client, found in rates.items()}
    others = {client: rate for client, rate in medians.items() if client != "ours"}
    best = max(others, key=lambda client: others[client])
    names = {"put": "upload 1 GB", "get": "download 1 GB to a file", "stream": "read 1 GB"}
    every = ", ".join(f"{client} {rate:.0f}" for client, rate in sorted(medians.items()))
    return [
        (
            f"{names[verb]}: ours / best ({best}); MB/s: {every}",
            f"{medians['ours']:.0f} / {others[best]:.0f} = {medians['ours'] / others[best]:.2f}",
            f"at least {goal}",
        ),
        (
            f"{names[verb]}: memory of our client",
            f"{memory['ours'] / _MB:.0f} MB",
            "under 300 MiB",
        ),
    ]


def _others(client: str) -> Environment:
    """Where the other clients are, which `make bench` installs apart from our environment."""
    folder = os.environ.get("CLIENTS")
    return {"PYTHONPATH": folder} if folder and client != "ours" else {}


def tensorize_s3(rounds: int, work: Path) -> list[Row]:
    """A random Llama of 1.5 GB at TP=4: to a folder, its files to S3, and both at once.

    Once as fast as the server on this machine is, which then takes most of its cores, and once
    over a link of `_LINK_MB` to it, as to a server that has its own.
    """
    model = work / "random-llama"
    if not model.exists():
        subprocess.run(
            [sys.executable, str(_SCRIPTS / "random_llama.py"), str(model)],
            check=True,
            capture_output=True,
        )
    with server(work) as environment:
        with _slow_link(environment) as linked:
            rows, _ = _overlap(rounds, work, str(model), linked, f", {_LINK_MB} MB/s link")
        direct, last = _overlap(rounds, work, str(model), environment, "")
    return [
        *rows,
        *direct,
        (
            "stored bytes / tensor bytes",
            f"{last['stored'] / last['tensors']:.4f}",
            "at most 1.01",
        ),
        (
            "scratch bytes read / tensor bytes",
            f"{last['read'] / last['tensors']:.4f}",
            "at most 1.01",
        ),
    ]


def _overlap(
    rounds: int, work: Path, model: str, environment: Environment, where: str
) -> tuple[list[Row], dict[str, int]]:
    """The row of one way to the server, and what the last build there said."""
    seconds: dict[str, list[float]] = {"shard": [], "upload": [], "both": []}
    last: dict[str, int] = {}
    for number in range(rounds + 1):
        with TemporaryDirectory(dir=work) as folder:
            prefix = f"s3://bench/{Path(folder).name}"
            for what, root in (
                ("shard", folder),
                ("upload", f"{prefix}/upload"),
                ("both", f"{prefix}/both"),
            ):
                found = _measured(what, model, root, folder, environment)
                if number:
                    seconds[what].append(found["seconds"])
                if what == "both":
                    last = found
    shard, upload, both = (statistics.median(seconds[what]) for what in seconds)
    slower = max(shard, upload)
    row = (
        f"tensorize TP=4 to S3{where}: {both:.1f} s; to a folder {shard:.1f} s, its files' upload "
        f"{upload:.1f} s",
        f"{both:.1f} / {slower:.1f} = {both / slower:.2f}",
        "at most 1.25 of the slower",
    )
    return [row], last


@contextmanager
def _slow_link(environment: Environment) -> Iterator[Environment]:
    port = environment["S3_ENDPOINT_URL"].rpartition(":")[2]
    command = [sys.executable, str(_SCRIPTS / "slow_link.py"), port, str(_LINK_MB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{link.stdout.readline().strip()}"
            yield {**environment, "S3_ENDPOINT_URL": endpoint}
        finally:
            link.kill()


def _measured(
    what: str, model: str, root: str, folder: str, environment: Environment
) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(_SCRIPTS / "s3_tensorize.py"), what, model, root, folder],
        env={**os.environ, **environment},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=900,
    )
    return json.loads(done.stdout.splitlines()[-1])
