"""The whole chain through Dagster with real engines, and what a run does that finds work done."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg
import pytest
from chain_home import MODEL, NO_WORKER, Home, flipped

from tensorize_assets import partitions
from tensorize_assets.core import compare, layout
from tensorize_assets.core.evidence import read_evidence
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub

pytestmark = pytest.mark.engine

CHAIN = {
    "hf_snapshot",
    "tensorized_shards",
    "lora_adapters",
    "encrypted_shards",
    "artifact",
    "reference_outputs",
    "reload_check",
    "published",
}


def passing() -> dict[str, bool]:
    return dict.fromkeys(compare.CHECKS, True)


def history(home: Home) -> list[tuple[int, str, str]]:
    return [(entry.number, entry.build_id, entry.reason) for entry in home.channel()]


def test_a_repo_becomes_a_published_artifact(first_build):
    """The product: every asset, every check with its partition, and a directory that verifies."""
    home, run = first_build
    assert run.failures == {}
    assert CHAIN == run.materialized
    assert passing() == run.checks
    assert {partitions.partition_key(MODEL, "v1")} == {
        evaluation.partition for evaluation in run.result.get_asset_check_evaluations()
    }
    directory = layout.artifact_dir(MODEL, "v1", run.build_id)
    report = verify_directory(home.store, directory, home.trusted)
    assert () == report.problems
    assert {"config.json", "tokenizer.json", "model.tensors", "manifest.json"} <= {
        path.name for path in home.artifact(run).iterdir()
    }
    (entry,) = home.channel()
    assert (1, run.build_id, directory) == (entry.number, entry.build_id, entry.directory)
    assert report.manifest_sha256 == entry.manifest_sha256


def test_evidence_says_how_the_reload_went(first_build):
    """Whoever serves the build later has nothing but this file to judge by."""
    home, run = first_build
    (entry,) = home.channel()
    evidence = read_evidence(
        home.store, entry.manifest_sha256, "cpu", entry.vllm_version, home.trusted
    )
    assert evidence is not None
    assert evidence.passed
    assert [*compare.CHECKS] == [check.name for check in evidence.checks]
    assert evidence.load is not None
    assert evidence.load.bytes > 100_000
    assert evidence.default_load_seconds
    said = run.metadata("reload_check")
    assert (evidence.device_name, evidence.load.bytes) == (said["device_name"], said["load_bytes"])
    assert 2 == len(said["loads"])


def test_the_run_names_its_build_and_the_commit(first_build):
    """A run is found by its build, and staleness is judged by the commit."""
    home, run = first_build
    (entry,) = home.channel()
    assert entry.commit == run.data_version("hf_snapshot")
    assert entry.build_id == run.tags["tensorize_assets/build_id"]
    assert run.metadata("hf_snapshot")["build_id"] == run.build_id
    assert f"{MODEL} v1: first build" in run.log


def test_records_are_json_in_the_store(first_build):
    """Nothing is pickled: each asset's record is a document at the path that layout spells."""
    home, _ = first_build
    for asset in CHAIN:
        stored = home.store.get_bytes(layout.record_key(asset, MODEL, "v1"))
        assert stored is not None
        assert stored.data.startswith(b"{")
    assert not [key for key in home.store.list("") if key.endswith((".pkl", ".pickle"))]
    assert () == home.store.list(".scratch")


def test_a_finished_chain_does_nothing_again(built_home: Home, first_build):
    """A schedule that runs daily must cost seconds, not engines."""
    before = set(built_home.store.list(""))
    start = time.monotonic()
    run = built_home.run(launcher=NO_WORKER)
    assert run.failures == {}
    assert time.monotonic() - start < 15
    assert (CHAIN, passing()) == (run.materialized, run.checks)
    assert first_build.run.build_id == run.build_id
    assert [(1, run.build_id, "publish")] == history(built_home)
    assert before == set(built_home.store.list(""))
    assert run.metadata("hf_snapshot")["already_complete"]
    assert any("stands: not loaded again" in line for line in run.log)


def test_a_finished_chain_downloads_nothing(built_home: Home, model_hub: LocalHub):
    """The cache may be cleaned: a complete build needs no weights, only the commit's name."""
    assert built_home.run(launcher=NO_WORKER).success
    assert 1 == len(model_hub.requests)
    assert () == model_hub.requests_for("resolve")


def test_a_new_commit_is_a_new_build(second_build, first_build):
    """The log and the metadata say why there is a second build, and the channel has both."""
    _, first = first_build
    run = second_build.run
    assert run.failures == {}
    assert passing() == run.checks
    assert first.build_id != run.build_id
    assert second_build.commit == run.data_version("hf_snapshot")
    before = first.data_version("hf_snapshot")
    difference = f"commit: {before} → {second_build.commit}"
    assert difference == run.metadata("hf_snapshot")["differs_from_published"]
    assert f"differs from published build {first.build_id}: {difference}" in run.log
    assert [(1, first.build_id, "publish"), (2, run.build_id, "publish")] == history(
        second_build.home
    )


def test_a_damaged_artifact_is_not_published(second_build, first_build):
    """One bit of a sealed shard, at the same size: the load must fail on its hash, and show it."""
    damaged = second_build.damaged
    assert set(compare.CHECKS) == set(damaged.checks)
    assert not damaged.checks["artifact_loads"]
    assert "vLLM did not load it" in damaged.check_descriptions["artifact_loads"]
    assert not damaged.checks["tensor_hashes_equal"]
    assert "published" not in damaged.materialized
    assert not damaged.success
    assert [first_build.run.build_id] == [entry.build_id for entry in second_build.while_damaged]


def test_published_alone_refuses_a_damaged_artifact(second_build):
    """Dagster would run it: it forgets a failed check as soon as the asset is asked for alone."""
    assert not second_build.alone.materialized
    said = second_build.alone.failures["published"]
    assert "its last reload on cpu failed: artifact_loads" in said
    assert "materialize reload_check again" in said


def test_a_reload_that_failed_is_tried_again(second_build):
    """Its evidence is replaced once the file is whole, without another build."""
    assert second_build.run.metadata("tensorized_shards").keys().isdisjoint({"worker_seconds"})
    assert any("reloaded on" in line for line in second_build.run.log)


def test_a_revision_that_goes_back_moves_the_channel(
    twice_built_home: Home, model_hub: LocalHub, first_build
):
    """A known commit is not built again, nor loaded: the channel gets a third entry."""
    home, first = twice_built_home, first_build.run
    second = history(home)[-1][1]
    model_hub.move(MODEL, "main", first.data_version("hf_snapshot"))
    run = home.run(launcher=NO_WORKER)
    assert run.failures == {}
    assert [
        (1, first.build_id, "publish"),
        (2, second, "publish"),
        (3, first.build_id, "publish"),
    ] == history(home)
    assert "commit: " in run.metadata("hf_snapshot")["differs_from_published"]


def test_a_rollback_holds_until_a_person_says_otherwise(twice_built_home: Home, first_build):
    """The schedule's next run must not undo what somebody did at night for a reason."""
    home, first = twice_built_home, first_build.run.build_id
    second = history(home)[-1][1]
    roll_back(home.store, home.key, home.trusted, model=MODEL, suffix="v1")
    rolled_back = [(1, first, "publish"), (2, second, "publish"), (3, first, "rollback")]
    assert rolled_back == history(home)
    run = home.run(launcher=NO_WORKER)
    assert run.failures == {}
    assert rolled_back == history(home)
    said = run.metadata("published")
    assert (True, 3, first) == (said["held_by_rollback"], said["entry"], said["build_id"])
    assert any("a rollback took build" in line for line in run.log)
    again = home.run(launcher=NO_WORKER, republish=True)
    assert [*rolled_back, (4, second, "publish")] == history(home)
    assert not again.metadata("published")["held_by_rollback"]


def test_a_lost_manifest_is_written_again(built_home: Home, first_build):
    """Killed between the shards and the seal: the shards are known by their hashes, and kept."""
    manifest = built_home.artifact(first_build.run) / "manifest.json"
    before = manifest.read_bytes()
    manifest.unlink()
    run = built_home.run(launcher=NO_WORKER)
    assert run.failures == {}
    assert before == manifest.read_bytes()
    assert any("earlier, interrupted run are whole" in line for line in run.log)
    assert [(1, run.build_id, "publish")] == history(built_home)


def test_half_a_build_is_completed(built_home: Home, first_build):
    """A missing shard, and one that only has the right size, are built again to the same bytes."""
    folder = built_home.artifact(first_build.run)
    shard, manifest = folder / "model.tensors", (folder / "manifest.json").read_bytes()
    whole = shard.read_bytes()
    (folder / "manifest.json").unlink()
    shard.unlink()
    assert "tensorized_shards" in built_home.run(launcher=NO_WORKER).failures
    shard.write_bytes(flipped(whole))
    run = built_home.run()
    assert run.failures == {}
    assert "worker_seconds" in run.metadata("tensorized_shards")
    assert whole == shard.read_bytes()
    assert manifest == (folder / "manifest.json").read_bytes()
    # The same manifest: its evidence stands.
    assert any("stands: not loaded again" in line for line in run.log)
    assert [(1, run.build_id, "publish")] == history(built_home)


def test_a_broken_model_leaves_its_neighbour_alone(
    built_home: Home, model_hub: LocalHub, broken_files, tmp_path: Path
):
    """Two partitions, one NaN: each check has a result of its own for each of the two.

    A model that is broken at its source equals its own broken copy in every comparison.
    """
    model_hub.commit("tiny/broken", broken_files)
    built_home.write_catalog({MODEL: {"v1": {}}, "tiny/broken": {"v1": {}}})
    good_key = partitions.partition_key(MODEL, "v1")
    broken_key = partitions.partition_key("tiny/broken", "v1")
    (tmp_path / "instance").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "instance")) as instance:
        broken = built_home.run("tiny/broken", instance=instance)
        good = built_home.run(instance=instance, launcher=NO_WORKER)
        stated = {
            (info.check_key.name, info.partition_key): info.latest_execution_status.value
            for info in instance.event_log_storage.get_asset_check_partition_info(
                [dg.AssetCheckKey(dg.AssetKey("reload_check"), name) for name in compare.CHECKS]
            )
        }
    failing = {"values_finite", "perplexity_sane"}
    assert {name: name not in failing for name in compare.CHECKS} == broken.checks
    assert "model.layers.1.mlp" in broken.check_descriptions["values_finite"]
    assert CHAIN - {"published"} == broken.materialized
    assert "blocking asset checks failed" in broken.failures["reload_check"]
    assert (CHAIN, passing()) == (good.materialized, good.checks)
    assert {
        **{(name, good_key): "SUCCEEDED" for name in compare.CHECKS},
        **{
            (name, broken_key): "FAILED" if name in failing else "SUCCEEDED"
            for name in compare.CHECKS
        },
    } == stated
    assert () == built_home.channel("tiny/broken")
    assert [(1, good.build_id, "publish")] == history(built_home)
    alone = built_home.run("tiny/broken", selection=["published"], launcher=NO_WORKER)
    assert "its last reload on cpu failed: values_finite" in alone.failures["published"]
    assert () == built_home.channel("tiny/broken")


def test_a_pinned_profile_stays_at_its_first_commit(home: Home, model_hub: LocalHub, second_files):
    """Pinned is what the revision was then, however the branch moves on."""
    home.write_catalog({MODEL: {"v1": {"track": "pin"}, "free": {}}})
    first = home.run(selection=["hf_snapshot"])
    moved = model_hub.commit(MODEL, second_files)
    pinned = home.run(selection=["hf_snapshot"])
    assert first.data_version("hf_snapshot") == pinned.data_version("hf_snapshot")
    assert first.build_id == pinned.build_id
    free = home.run(suffix="free", selection=["hf_snapshot"])
    assert moved == free.data_version("hf_snapshot")
    record = layout.record_key("hf_snapshot", MODEL, "v1")
    stored = home.store.get_bytes(record)
    assert stored is not None
    # What was asked for, so that a later run writes the same manifest.
    assert b'"revision":"main"' in stored.data


def test_a_changed_setting_of_a_pinned_profile_is_a_new_build(built_home: Home, first_build):
    """The commit stays, and what differs is said."""
    built_home.write_catalog({MODEL: {"v1": {"track": "pin", "dtype": "float32"}}})
    run = built_home.run(selection=["hf_snapshot"])
    assert first_build.run.build_id != run.build_id
    assert first_build.run.data_version("hf_snapshot") == run.data_version("hf_snapshot")
    assert "dtype: auto → float32" == run.metadata("hf_snapshot")["differs_from_published"]
