"""The chain with its root in S3: stand-in workers, everything else is real."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, NO_WORKER, Home, stand_in
from dagster_aws.s3 import S3Resource

from tensorize_assets import partitions
from tensorize_assets.assets.target import ONESHOT_TAG, Oneshot
from tensorize_assets.core import layout
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.definitions import ASSETS
from tensorize_assets.demo.s3_server import LocalS3
from tensorize_assets.io_managers import ManifestIOManager
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.s3 import S3StoreResource

DEAD = "http://127.0.0.1:9"


def test_a_build_is_published_in_s3_and_kept_by_the_next_run(s3_home: Home, s3: LocalS3) -> None:
    """Nothing but `root` and `s3` in the catalog differs from a chain on a disk."""
    run = s3_home.run(launcher=stand_in())
    assert {} == run.failures
    (entry,) = s3_home.channel()
    assert verify_directory(s3_home.store, entry.directory, s3_home.trusted).ok
    assert run.metadata("published")["directory"] == s3_home.store.uri(entry.directory)
    before = s3_home.store.list("")
    again = s3_home.run(launcher=NO_WORKER)
    assert again.success
    assert before == s3_home.store.list("")
    assert 1 == len(s3_home.channel())
    # The disk holds nothing of it but the snapshot.
    assert not (s3_home.folder / "artifacts").exists()
    assert [] == list((s3_home.folder / "scratch").iterdir())
    everything = json.dumps([run.log, [str(e) for e in run.result.all_events]])
    assert s3.secret_key not in everything
    assert s3.secret_key not in (s3_home.folder / "models.yaml").read_text()


def test_two_runs_of_one_build_at_once_publish_it_once(s3_home: Home) -> None:
    """A schedule and a person; whichever is second finds the manifest and the channel there."""
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: s3_home.run(launcher=stand_in()), range(2)))
    assert [{}, {}] == [run.failures for run in runs]
    (entry,) = s3_home.channel()
    assert verify_directory(s3_home.store, entry.directory, s3_home.trusted).ok


@pytest.mark.fault(
    "Bad network",
    "the chain: nobody listens at the endpoint",
    "three retries, then one error that names it",
)
@pytest.mark.usefixtures("no_waiting")
def test_a_dead_endpoint_is_retried_and_then_named(s3_home: Home) -> None:
    """What a person paged at night reads first: which server, and that it was tried again."""
    dead = Home(
        s3_home.folder,
        s3_home.endpoint,
        s3_home.root,
        S3Settings(endpoint_url=DEAD, max_attempts=1),
    )
    dead.write_catalog({MODEL: {"v1": {}}})
    run = dead.run(launcher=NO_WORKER)
    assert ["hf_snapshot"] * 3 == run.retried, run.failures
    assert DEAD in run.failures["hf_snapshot"]


@pytest.mark.parametrize(
    ("root", "said"),
    [("s3://no-such-bucket-here/x", "NoSuchBucket"), ("s3://no-such-bucket-here", "NoSuchBucket")],
)
def test_a_missing_bucket_fails_at_once(s3_home: Home, root: str, said: str) -> None:
    """No retry makes a bucket."""
    home = Home(s3_home.folder, s3_home.endpoint, root, s3_home.settings)
    home.write_catalog({MODEL: {"v1": {}}})
    run = home.run(launcher=NO_WORKER)
    assert said in run.failures["hf_snapshot"]
    assert root in run.failures["hf_snapshot"]
    assert [] == run.retried


@pytest.mark.fault(
    "Secrets", "the chain with wrong keys of the store", "fails at once; they are not shown"
)
def test_wrong_keys_fail_at_once_and_are_not_shown(
    s3_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key's name may be shown, its secret never."""
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", "not-the-secret-at-all")
    run = s3_home.run(launcher=NO_WORKER)
    assert "SignatureDoesNotMatch" in run.failures["hf_snapshot"]
    assert "not-the-secret-at-all" not in run.failures["hf_snapshot"]
    assert [] == run.retried


def test_a_one_shot_goes_to_a_root_of_its_own_in_s3(s3_home: Home, home: Home) -> None:
    """`--serialized-directory s3://…` beside a catalog whose root is a folder."""
    at_home = Home(home.folder, home.endpoint, home.root, None)
    at_home.write_catalog({MODEL: {"v1": {}}})
    text = (at_home.folder / "models.yaml").read_text()
    assert s3_home.settings is not None
    settings = json.dumps(s3_home.settings.model_dump(exclude_none=True))
    (at_home.folder / "models.yaml").write_text(f"{text}\ns3: {settings}\n")
    asked = Oneshot(
        suffix="mine",
        profile=Profile(reload_device="cpu", max_perplexity=100_000.0),
        root=s3_home.root,
    )
    with dg.DagsterInstance.ephemeral() as instance:
        partitions.add_oneshot(instance, MODEL)
        run = at_home.run(
            key=partitions.partition_key(MODEL, layout.ONESHOT_PARTITION),
            instance=instance,
            launcher=stand_in(),
            tags={ONESHOT_TAG: asked.model_dump_json()},
        )
    assert {} == run.failures
    assert s3_home.store.stat(layout.manifest_key(layout.oneshot_dir(MODEL, "mine")))
    assert not (at_home.folder / "artifacts" / "vllm").exists()


def test_dagster_aws_s3_resource_serves(
    s3_home: Home, s3: LocalS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A project that has an S3Resource already writes its settings nowhere else."""
    monkeypatch.delenv("S3_ACCESS_KEY_ID")
    monkeypatch.delenv("S3_SECRET_ACCESS_KEY")
    plain = Home(tmp_path / "theirs", s3_home.endpoint, s3_home.root, S3Settings())
    plain.write_catalog({MODEL: {"v1": {}}})
    store = S3StoreResource(
        catalog=CatalogResource(path=str(plain.folder / "models.yaml")),
        scratch=str(tmp_path / "scratch"),
        s3=S3Resource(
            endpoint_url=s3.endpoint,
            region_name="us-east-1",
            aws_access_key_id=s3.access_key,
            aws_secret_access_key=s3.secret_key,
        ),
    )
    with dg.DagsterInstance.ephemeral() as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        result = dg.materialize(
            ASSETS,
            partition_key=partitions.partition_key(MODEL, "v1"),
            instance=instance,
            resources={
                **plain.resources(stand_in()),
                "tensorize_store": store,
                "tensorize_io_manager": ManifestIOManager(store=store),
            },
        )
    assert result.success
    monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
    assert s3_home.store.stat(layout.channel_key(MODEL, "v1"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_unsigned_session": True}, "give it credentials"),
        ({"verify": False}, "unverified connections are not used"),
        ({"use_ssl": False}, "http://"),
        ({"max_attempts": 50}, "max_attempts"),
        ({"endpoint_url": "http://user:password@host"}, "endpoint_url"),
        ({"aws_access_key_id": "AK"}, "only one of"),
    ],
)
def test_an_s3_resource_without_an_equal_here_is_refused(
    s3_home: Home, fields: dict[str, Any], said: str
) -> None:
    """Its settings are taken as they are, or not at all."""
    store = S3StoreResource(
        catalog=CatalogResource(path=str(s3_home.folder / "models.yaml")),
        scratch="x",
        s3=S3Resource(**fields),
    )
    with pytest.raises(StoreError, match=said):
        store.access()
