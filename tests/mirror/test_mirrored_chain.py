"""The chain with workers that see no folder of this machine: they read the mirror."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from chain_home import MODEL, NO_WORKER, Home, Run, stand_in, weights

from tensorize_assets.assets.target import ADAPTER_COMMITS_TAG
from tensorize_assets.core import layout, local_adapter, mirror, sealing
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.demo.hub_server import LocalHub
from tensorize_assets.demo.s3_server import REGION, LocalS3
from tensorize_assets.resources.launchers.local import SubprocessLauncher

POET = {"name": "poet", "repo": "org/poet", "revision": "main"}
UP_TO_ARTIFACT = ("tensorized_shards", "lora_adapters", "encrypted_shards", "artifact")


class Elsewhere(SubprocessLauncher):
    """Workers as of another machine: with a cache of their own, and no folder of this one."""

    shares_disks: ClassVar[bool] = False


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    here = stand_in()
    cache = str(tmp_path / "worker-cache")
    return Elsewhere(module=here.module, env={**here.env, "TENSORIZE_SNAPSHOT_CACHE": cache})


@pytest.fixture
def adapter_hub(model_hub: LocalHub) -> LocalHub:
    """A Hub that has an adapter too."""
    model_hub.commit(
        "org/poet",
        {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": weights(b"matrices")},
    )
    return model_hub


def home(folder: Path, model_hub: LocalHub, s3: LocalS3, root: str) -> Home:
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
    made = Home(folder, model_hub.endpoint, root, settings)
    made.write_catalog({MODEL: {"v1": {}}})
    return made


@pytest.fixture
def s3_home(
    tmp_path: Path,
    model_hub: LocalHub,
    s3: LocalS3,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Home:
    """A home in which nothing was built, with its root in S3."""
    monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
    return home(tmp_path / "home", model_hub, s3, s3_root)


def downloads(model_hub: LocalHub, repo: str = MODEL) -> Counter[str]:
    """How often each file's content was sent."""
    return Counter(request.path for request in model_hub.requests_for(f"/{repo}/resolve/", "GET"))


def passed(run: Run) -> None:
    assert {} == run.failures
    assert run.success


def test_a_chain_without_a_local_folder(
    s3_home: Home, adapter_hub: LocalHub, elsewhere: Elsewhere
) -> None:
    """After hf_snapshot the host has nothing of the repo, and nothing is asked of the Hub."""
    s3_home.write_catalog({MODEL: {"v1": {"adapters": [POET]}}})
    first = s3_home.run(launcher=elsewhere, selection=["hf_snapshot"])
    passed(first)
    said = first.metadata("hf_snapshot")
    assert said["mirrored"]
    assert 0 == said["mirror_bytes_kept"]
    mirrored = s3_home.store.listing(layout.SNAPSHOTS_FOLDER)
    files = [one for one in mirrored if "/files/" in one.key and not one.key.endswith(".blocks")]
    sent = sum(found.size for found in files)
    assert sent == said["mirror_bytes_sent"] > 500_000
    assert 40 == len(first.tags[ADAPTER_COMMITS_TAG])
    shutil.rmtree(s3_home.folder / "hub")
    before = adapter_hub.requests

    rest = s3_home.run(
        launcher=elsewhere,
        selection=[*UP_TO_ARTIFACT, "reference_outputs", "reload_check", "published"],
    )

    passed(rest)
    assert before == adapter_hub.requests
    assert not (s3_home.folder / "hub").exists()
    (entry,) = s3_home.channel()
    config = s3_home.store.get_bytes(layout.file_key(entry.directory, "config.json"))
    assert b"num_attention_heads" in config.data
    # The tasks of one machine bring each file to it once.
    said_by_workers = [line for line in rest.log if "came from the mirror" in line]
    assert 2 == len(said_by_workers), said_by_workers


def test_a_commit_in_the_mirror_is_downloaded_by_nobody(
    s3_home: Home,
    model_hub: LocalHub,
    elsewhere: Elsewhere,
    s3: LocalS3,
    s3_root: str,
    tmp_path: Path,
) -> None:
    """Another suffix, another home: both read what the first one sent."""
    passed(s3_home.run(launcher=elsewhere, selection=["hf_snapshot"]))
    before = downloads(model_hub)
    assert {1} == set(before.values())
    other = home(tmp_path / "other", model_hub, s3, s3_root)
    other.write_catalog({MODEL: {"v2": {"dtype": "float16"}}})
    shutil.copytree(s3_home.folder / "keys", other.folder / "keys")

    run = other.run(suffix="v2", launcher=elsewhere)

    passed(run)
    assert before == downloads(model_hub)
    assert not (other.folder / "hub").exists()
    said = run.metadata("hf_snapshot")
    assert (True, 0) == (said["mirrored"], said["mirror_bytes_sent"])
    assert said["mirror_bytes_kept"] == said["bytes"]
    assert "download_seconds" not in said


def test_two_suffixes_of_one_commit_at_once_are_one_download(
    s3_home: Home,
    model_hub: LocalHub,
    elsewhere: Elsewhere,
    s3: LocalS3,
    s3_root: str,
    tmp_path: Path,
) -> None:
    """On two machines that share the root alone."""
    model_hub.bytes_per_s = 2_000_000
    other = home(tmp_path / "other", model_hub, s3, s3_root)
    for one in (s3_home, other):
        one.write_catalog({MODEL: {"v1": {}, "v2": {"dtype": "float16"}}})
    asked = [(s3_home, "v1"), (other, "v2")]

    with ThreadPoolExecutor(2) as pool:
        runs = list(
            pool.map(
                lambda one: one[0].run(
                    suffix=one[1], launcher=elsewhere, selection=["hf_snapshot"]
                ),
                asked,
            )
        )

    for run in runs:
        passed(run)
    assert runs[0].build_id != runs[1].build_id
    assert {1} == set(downloads(model_hub).values())
    sent = sorted(run.metadata("hf_snapshot")["mirror_bytes_sent"] for run in runs)
    assert 0 == sent[0] < sent[1]


def test_what_left_the_mirror_comes_again(
    s3_home: Home, model_hub: LocalHub, elsewhere: Elsewhere
) -> None:
    """Days after hf_snapshot, retention may have found that no build is of the commit."""
    passed(s3_home.run(launcher=elsewhere, selection=["hf_snapshot"]))
    for key in s3_home.store.list(layout.SNAPSHOTS_FOLDER):
        s3_home.store.delete(key)
    passed(s3_home.run(launcher=elsewhere, selection=["tensorized_shards"]))
    # The host's own cache had it.
    assert {1} == set(downloads(model_hub).values())
    assert s3_home.store.list(layout.SNAPSHOTS_FOLDER)


def test_where_disks_are_shared_nothing_is_mirrored_unless_the_catalog_says_so(
    s3_home: Home, model_hub: LocalHub
) -> None:
    """Workers read the Hub's cache; once it is gone, the mirror is asked before the Hub."""
    run = s3_home.run(launcher=stand_in(), selection=["hf_snapshot"])
    assert run.metadata("hf_snapshot")["mirrored"] is False
    assert () == s3_home.store.list(layout.SNAPSHOTS_FOLDER)
    s3_home.write_catalog({MODEL: {"v1": {}}}, snapshots={"mirror": "always"})
    run = s3_home.run(launcher=stand_in(), selection=["hf_snapshot", "tensorized_shards"])
    passed(run)
    assert run.metadata("hf_snapshot")["mirrored"] is True
    assert [] == [line for line in run.log if "came from the mirror" in line]
    shutil.rmtree(s3_home.folder / "hub")
    before = model_hub.requests
    run = s3_home.run(launcher=stand_in(), selection=["artifact", "reference_outputs"])
    assert {"artifact"} == run.failures.keys()
    passed(
        s3_home.run(
            launcher=stand_in(),
            selection=["lora_adapters", "encrypted_shards", "artifact", "reference_outputs"],
        )
    )
    assert before == model_hub.requests


ONLY = {"encryption": "only"}


def encrypted(made: Home, models: Mapping[str, Any], **fields: Any) -> None:
    own = made.folder / "keys" / "private.key"
    key = sealing.load_private_key(own) if own.exists() else sealing.generate_private_key(own)
    made.write_catalog(models, recipients={"home": key.public_key}, **fields)


@pytest.mark.parametrize("which", ["itself", "another suffix", "an adapter's", "one-shot adapter"])
def test_an_encrypted_only_model_is_not_mirrored_unless_allowed(
    s3_home: Home, adapter_hub: LocalHub, elsewhere: Elsewhere, which: str
) -> None:
    """It is refused before a byte is downloaded, with both ways out."""
    models: dict[str, Any] = {
        "itself": {MODEL: {"v1": ONLY}},
        "another suffix": {MODEL: {"v1": {}, "v2": ONLY}},
        "an adapter's": {
            MODEL: {"v1": {"adapters": [POET]}},
            "other/model": {"v1": {"adapters": [POET], **ONLY}},
        },
        "one-shot adapter": {MODEL: {"v1": {"adapters": [POET], **ONLY}}},
    }[which]
    encrypted(s3_home, models)

    run = s3_home.run(launcher=elsewhere)

    said = run.failures["hf_snapshot"]
    assert "snapshots: {encrypted_only: true}" in said
    assert "launcher: subprocess" in said
    assert [] == run.retried
    assert Counter() == downloads(adapter_hub) + downloads(adapter_hub, "org/poet")
    assert () == s3_home.store.list(layout.SNAPSHOTS_FOLDER)
    encrypted(s3_home, models, snapshots={"encrypted_only": True})
    passed(s3_home.run(launcher=elsewhere, selection=["hf_snapshot"]))
    assert s3_home.store.list(layout.snapshots_of(MODEL))


def test_an_encrypted_only_model_is_read_from_the_hubs_cache_where_that_is_seen(
    s3_home: Home, model_hub: LocalHub
) -> None:
    """`always` is no permission."""
    encrypted(s3_home, {MODEL: {"v1": ONLY}}, snapshots={"mirror": "always"})
    run = s3_home.run(launcher=stand_in(), selection=["hf_snapshot", "tensorized_shards"])
    passed(run)
    assert run.metadata("hf_snapshot")["mirrored"] is False
    assert () == s3_home.store.list(layout.SNAPSHOTS_FOLDER)


def test_without_a_mirror_workers_elsewhere_have_nothing_to_read(
    s3_home: Home, model_hub: LocalHub, elsewhere: Elsewhere
) -> None:
    """A catalog that turns it off says so at once."""
    s3_home.write_catalog({MODEL: {"v1": {}}}, snapshots={"mirror": "never"})
    run = s3_home.run(launcher=elsewhere)
    assert "snapshots: {mirror: auto}" in run.failures["hf_snapshot"]
    assert Counter() == downloads(model_hub)


def test_a_local_adapter_is_mirrored_too(
    s3_home: Home, model_hub: LocalHub, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """A folder on the machine of whoever ran `tensorize build --lora-path`."""
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights(b"matrices"))
    access = HubAccess(endpoint=s3_home.endpoint, cache_dir=s3_home.folder / "hub")
    repo, commit = local_adapter.take(access, folder)
    s3_home.write_catalog(
        {MODEL: {"v1": {"adapters": [{"name": "poet", "repo": repo, "revision": commit}]}}}
    )
    passed(s3_home.run(launcher=elsewhere, selection=["hf_snapshot"]))
    assert mirror.read_list(s3_home.store, repo, commit)
    shutil.rmtree(s3_home.folder / "hub")
    # Resolved as well: a run of another host, or of another day.
    passed(s3_home.run(launcher=elsewhere, selection=["hf_snapshot", *UP_TO_ARTIFACT]))


def test_a_complete_build_asks_for_no_snapshot(
    s3_home: Home, model_hub: LocalHub, elsewhere: Elsewhere
) -> None:
    """Nothing of it is needed again, in the mirror or elsewhere."""
    passed(s3_home.run(launcher=elsewhere))
    for key in s3_home.store.list(layout.SNAPSHOTS_FOLDER):
        s3_home.store.delete(key)
    nobody = Elsewhere(module=NO_WORKER.module)
    run = s3_home.run(launcher=nobody)
    passed(run)
    assert "mirrored" not in run.metadata("hf_snapshot")
    assert () == s3_home.store.list(layout.SNAPSHOTS_FOLDER)


def test_no_secret_is_in_what_workers_are_asked(
    s3_home: Home, s3: LocalS3, elsewhere: Elsewhere
) -> None:
    """The reference reads the root too now, and is handed its keys apart."""
    run = s3_home.run(launcher=elsewhere, selection=["hf_snapshot", "reference_outputs"])
    passed(run)
    everything = json.dumps([run.log, [str(event) for event in run.result.all_events]])
    assert s3.secret_key not in everything
