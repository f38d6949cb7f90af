"""One catalog, three launchers: what is built does not depend on where its workers ran."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tensorize_assets
from tensorize_assets.core.catalog import load_catalog
from tensorize_assets.core.handover import WORKER_KEY_VARIABLE
from tensorize_assets.core.manifest import Manifest, read_manifest
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.sealing import generate_private_key
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.resources.launchers.chosen import chosen

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "assets")]

from chain_home import MODEL, UP_TO_ARTIFACT, Home  # noqa: E402
from fake_k8s import FakeKubernetes  # noqa: E402
from ray_cluster import RayCluster  # noqa: E402

pytestmark = pytest.mark.engine

KINDS = ("subprocess", "ray", "k8s")
IMAGE = "registry.example/worker:1"
PYTHONPATH = str(Path(tensorize_assets.__file__).parents[1])


class Built(NamedTuple):
    """What came of a launcher's builds: manifests, by suffix, and how each run's steps went."""

    manifests: dict[str, Manifest]
    published: bool
    mirrored: tuple[str, ...]


@pytest.fixture(scope="module")
def built(
    tiny_models: Path, s3: LocalS3, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Built]:
    """The same catalog, built by each launcher into a bucket of its own.

    Each rank of two is a task of its own where the launcher is a cluster. A model of one rank goes
    on from there to its channel, with real reloads.
    """
    work = tmp_path_factory.mktemp("same")
    worker_key = work / "worker.key"
    public_key = generate_private_key(worker_key).public_key
    image = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": PYTHONPATH,
    }
    found: dict[str, Built] = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalHub() as hub,
        RayCluster({**image, WORKER_KEY_VARIABLE: str(worker_key)}) as ray,
        FakeKubernetes(images={IMAGE}, env=image) as kubernetes,
    ):
        patch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
        patch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        ray.add(cpus=2)
        ray.wait_for(2)
        kubernetes.secrets["worker-key"] = {"private-key": worker_key.read_bytes()}
        settings: dict[str, Any] = {
            "ray": {
                "address": ray.address,
                "python": sys.executable,
                "worker_public_key": public_key,
                "scratch": str(work / "ray-scratch"),
            },
            "k8s": {
                "image": IMAGE,
                "kubeconfig": str(kubernetes.kubeconfig),
                "scratch_dir": str(kubernetes.folder / "scratch"),
                "poll_interval_s": 0.2,
                "worker_public_key": public_key,
                "worker_key_secret": "worker-key",
            },
        }
        for kind in KINDS:
            with _bucket(s3) as root:
                home = Home(
                    work / kind,
                    hub.endpoint,
                    root,
                    S3Settings(endpoint_url=s3.endpoint, region=REGION),
                )
                # Of one key, so that what is signed can be equal.
                (home.folder / "keys").mkdir(parents=True)
                key = work / KINDS[0] / "keys" / "signing.key"
                if kind == KINDS[0]:
                    assert home.key
                else:
                    (home.folder / "keys" / "signing.key").write_bytes(key.read_bytes())
                    (home.folder / "keys" / "signing.key").chmod(0o600)
                home.write_catalog(
                    {MODEL: {"v1": {}, "v1-tp2": {"tensor_parallel_size": 2}}},
                    launcher=kind,
                    launchers=settings,
                    snapshots={"mirror": "always"},
                )
                found[kind] = _build(home, kind)
        assert [] == list(kubernetes.pods)
    return found


@contextmanager
def _bucket(s3: LocalS3) -> Iterator[str]:
    bucket = f"same-{uuid.uuid4().hex}"
    s3.create_bucket(bucket)
    yield f"s3://{bucket}/fleet"
    s3.client().delete_bucket(Bucket=bucket)


def _build(home: Home, kind: str) -> Built:
    launcher: Any = chosen(load_catalog(home.folder / "models.yaml"))
    manifests: dict[str, Manifest] = {}
    # A cluster's engines are this machine's too: one is enough to see that they work there.
    for suffix, selection in (
        ("v1-tp2", UP_TO_ARTIFACT),
        ("v1", UP_TO_ARTIFACT if kind == "subprocess" else None),
    ):
        run = home.run(suffix=suffix, launcher=launcher, selection=selection)
        assert ({}, True) == (run.failures, run.success), "\n".join(run.log[-40:])
        directory = f"vllm/{MODEL}/{suffix}-{run.build_id}"
        stored = read_manifest(home.store, directory, home.trusted)
        assert stored is not None
        manifests[suffix] = stored.manifest
    return Built(
        manifests=manifests,
        published=bool(home.channel()),
        mirrored=tuple(sorted(home.store.list("snapshots/"))),
    )


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("suffix", ["v1", "v1-tp2"])
def test_the_manifest_is_the_same_wherever_its_workers_ran(
    built: dict[str, Built], kind: str, suffix: str
) -> None:
    """Every byte of every rank, and all that is said of them."""
    assert built["subprocess"].manifests[suffix] == built[kind].manifests[suffix]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_cluster_takes_a_build_to_its_channel(built: dict[str, Built], kind: str) -> None:
    """Reference, reload and comparison ran there, on what was read from the store."""
    assert built[kind].published


def test_the_mirror_has_each_file_once(built: dict[str, Built]) -> None:
    """Two suffixes of one commit, and one copy of its files, the same for every launcher."""
    lists = {built[kind].mirrored for kind in KINDS}
    assert 1 == len(lists)
    [names] = lists
    assert 1 == sum(name.endswith("/snapshot.json") for name in names)
