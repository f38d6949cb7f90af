"""Hundreds of builds by one process, on every launcher, with workers killed at random.

Nothing grows with their number: memory, open files, threads, temporary files, what a run writes to
Dagster's event log, what a build leaves in the store.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
from chain import Place
from chain_home import MODEL, stand_in
from soak import MARK, Reading, Settings

from tensorize_assets.core.handover import WORKER_KEY_VARIABLE
from tensorize_assets.core.sealing import generate_private_key
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parent / "launchers"))

from fake_k8s import FakeKubernetes  # noqa: E402
from ray_cluster import RayCluster  # noqa: E402

_IMAGE = "registry.example/worker:1"
# Until caches are full: of botocore, of Dagster, of the allocator.
_WARM = 0.2


def _soak(
    tmp_path: Path, tiny_models: Path, s3: LocalS3, builds: int, limit_s: int
) -> list[Reading]:
    bucket = f"test-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    worker_key = tmp_path / "worker.key"
    public_key = generate_private_key(worker_key).public_key
    path = stand_in().env["PYTHONPATH"]
    mark = {MARK: uuid.uuid4().hex}
    image = mark | {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": path,
        WORKER_KEY_VARIABLE: str(worker_key),
    }
    keys = {"S3_ACCESS_KEY_ID": s3.access_key, "S3_SECRET_ACCESS_KEY": s3.secret_key}
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with (
        LocalHub() as hub,
        # The stand-in does the ranks' work in the job's own process, which gets no secrets for it.
        RayCluster({**image, **keys}) as ray,
        FakeKubernetes(images={_IMAGE}, env=image) as kubernetes,
    ):
        ray.add(cpus=1)
        ray.wait_for(2)
        kubernetes.secrets["worker-key"] = {"private-key": worker_key.read_bytes()}
        files = folder_files(tiny_models / "llama")
        for build in range(builds):
            files["generation_config.json"] = json.dumps({"top_k": build + 1}).encode()
            hub.commit(MODEL, files, f"revision-{build}")
        s3_settings = {"endpoint_url": s3.endpoint, "region": REGION}
        place = Place(str(tmp_path / "home"), hub.endpoint, f"s3://{bucket}/fleet", s3_settings)
        settings = Settings(
            place=asdict(place),
            ray={
                "address": ray.address,
                "python": sys.executable,
                "worker_public_key": public_key,
                "scratch": str(tmp_path / "ray-scratch"),
                "shared_disks": True,
            },
            k8s={
                "image": _IMAGE,
                "command": ("python", "-m", "stand_in.worker"),
                "kubeconfig": str(kubernetes.kubeconfig),
                "scratch_dir": str(kubernetes.folder / "scratch"),
                "poll_interval_s": 0.2,
                "worker_public_key": public_key,
                "worker_key_secret": "worker-key",
            },
            builds=builds,
        )
        log = tmp_path / "soak.log"
        with log.open("w") as stderr:
            done = subprocess.run(
                [sys.executable, "-m", "soak", json.dumps(asdict(settings))],
                env={
                    **os.environ,
                    **keys,
                    **mark,
                    "PYTHONPATH": os.pathsep.join([str(_HERE), path]),
                    "TMPDIR": str(temporary),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=limit_s,
            )
        assert done.returncode == 0, log.read_text()[-3000:]
        assert [] == list(kubernetes.pods)
        left = s3.client().list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        assert [] == left
    s3.client().delete_bucket(Bucket=bucket)
    return [Reading(**json.loads(line)) for line in done.stdout.splitlines()]


def _require_flat(readings: Sequence[Reading], *, memory: int) -> None:
    """Between the builds after the first ones and the last ones."""
    warm = readings[int(len(readings) * _WARM) :]
    tail = max(3, len(warm) // 4)
    early, late = warm[:tail], warm[-tail:]

    def grown(name: str) -> float:
        before, after = (
            statistics.median(getattr(reading, name) for reading in part) for part in (early, late)
        )
        return after - before

    # One of each build would be as many as there are builds between the two.
    between = len(warm) - tail
    assert grown("memory") < memory
    assert grown("descriptors") < between / 2
    assert grown("threads") < between / 2
    assert all(reading.published for reading in readings)
    # Of what a killed worker left the next one takes away.
    assert readings[-1].files <= min(reading.files for reading in early) + 2
    quiet = [r for r in warm if not r.killed and r.launcher == "subprocess"]
    assert max(r.events for r in quiet) - min(r.events for r in quiet) <= 2
    # Pods share no disk with Dagster: a build has its snapshot in the store too, for its mirror.
    for mirrored in (False, True):
        left = {
            after.objects - before.objects
            for before, after in itertools.pairwise(warm)
            if (after.launcher == "k8s") == mirrored
        }
        assert len(left) <= 1, left


@pytest.mark.fault("Kill", "20 builds, workers killed at random", "all published; nothing grows")
def test_twenty_builds_on_every_launcher(tmp_path: Path, tiny_models: Path, s3: LocalS3) -> None:
    readings = _soak(tmp_path, tiny_models, s3, 20, 500)
    assert {"subprocess", "ray", "k8s"} == {reading.launcher for reading in readings}
    assert any(reading.killed for reading in readings)
    _require_flat(readings, memory=48 << 20)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.fault("Kill", "300 builds, workers killed at random", "all published; nothing grows")
def test_three_hundred_builds_on_every_launcher(
    tmp_path: Path, tiny_models: Path, s3: LocalS3
) -> None:
    _require_flat(_soak(tmp_path, tiny_models, s3, 300, 3500), memory=64 << 20)
