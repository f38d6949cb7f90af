"""What goes wrong, and what a person then reads: one clear failure, at once or after retries."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import psutil
import pytest
from chain_home import MODEL, NO_WORKER, UP_TO_ARTIFACT, Home, oneshot, stand_in

from tensorize_assets import partitions
from tensorize_assets.assets import snapshots, target
from tensorize_assets.core import channel, compare, hub, layout, manifest, signing
from tensorize_assets.core.hub_access import HubAccess
from tensorize_assets.core.hub_files import RevisionListing
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub

SNAPSHOT = ["hf_snapshot"]


# What is asked of the chain


@pytest.mark.parametrize(
    ("model", "suffix", "said"),
    [
        (MODEL, "v2", "tiny/llama has no suffix v2 in the catalog"),
        ("tiny/llame", "v1", "tiny/llame (suffix v1) is not in the catalog"),
    ],
)
def test_a_pair_outside_the_catalog_fails_at_once(home: Home, model: str, suffix: str, said: str):
    """Dynamic partitions outlive catalog entries, and the UI offers every model by suffix."""
    run = home.run(model, suffix)
    assert {"hf_snapshot"} == set(run.failures)
    assert said in run.failures["hf_snapshot"]
    assert "use one of: " in run.failures["hf_snapshot"]
    assert [] == run.retried
    assert set() == run.materialized


def test_a_key_that_is_no_model_is_named(home: Home):
    """Somebody may add a partition by hand: an org never holds the two dashes of a key."""
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("tensorize_model", ["org--a--b"])
        instance.add_dynamic_partitions("tensorize_suffix", ["v1"])
        key = dg.MultiPartitionKey({"model": "org--a--b", "suffix": "v1"})
        for asset in ("hf_snapshot", "published"):
            run = home.run(key=key, instance=instance, selection=[asset])
            assert "'org/a--b' is not a Hub repo id" in run.failures[asset]
            assert [] == run.retried


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        ({}, "start them with `tensorize build`"),
        ({target.ONESHOT_TAG: "{}"}, "is not valid"),
        (oneshot("v1"), "has a profile 'v1' in the catalog"),
        (oneshot("../v1"), "holds a slash"),
    ],
)
def test_a_one_shot_needs_its_tag(home: Home, tags: dict[str, str], said: str):
    """The UI lists the partition `adhoc` too; a tag must not reach another profile's channel."""
    run = home.run(suffix="adhoc", tags=tags, selection=SNAPSHOT)
    assert said in run.failures["hf_snapshot"]
    assert [] == run.retried


def test_a_wrong_catalog_says_where(home: Home):
    """A typo must not look like trouble with Dagster."""
    path = home.folder / "models.yaml"
    path.write_text(path.read_text().replace("reload_device", "reload_devise"))
    event: Any = home.run().result.get_run_failure_event()
    said = event.job_failure_data.error.to_string()
    assert f"{path}:" in said
    assert "reload_devise" in said


# What the Hub says


class Trouble(NamedTuple):
    """What is wrong with the repo, and what must be said of it."""

    arrange: Callable[[LocalHub], object]
    said: str
    revision: str = "main"


def gate(hub: LocalHub) -> None:
    hub.add_repo("tiny/other", gated=True)
    hub.commit("tiny/other", {"config.json": b"{}", "model.safetensors": b"x"})


def rename(hub: LocalHub) -> None:
    hub.commit("tiny/other", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.rename("tiny/other", "tiny/newer")


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(gate, "is gated and no token was sent"),
        Trouble(lambda hub: None, "tiny/other does not exist on"),
        Trouble(rename, "was renamed to tiny/newer"),
        Trouble(
            lambda hub: hub.commit("tiny/other", {"model.safetensors": b"x"}),
            "has no revision 'v9'",
            revision="v9",
        ),
        Trouble(
            lambda hub: hub.commit("tiny/other", {"config.json": b"{}", "x.gguf": b"x"}),
            "has no weights to load",
        ),
        Trouble(
            lambda hub: hub.commit("tiny/other", {"model.safetensors": b"x"}),
            "has no config.json",
        ),
    ],
    ids=["gated", "missing", "renamed", "no-revision", "no-weights", "no-config"],
)
def test_a_repo_that_cannot_be_used_fails_once(
    home: Home, model_hub: LocalHub, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
):
    """Each with its own reason, not retried: only a person can change it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    trouble.arrange(model_hub)
    home.write_catalog({"tiny/other": {"v1": {"revision": trouble.revision}}})
    run = home.run("tiny/other", selection=SNAPSHOT)
    assert trouble.said in run.failures["hf_snapshot"]
    assert [] == run.retried


def test_a_full_disk_is_said_before_the_download(
    home: Home, model_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
):
    """A hundred gigabytes that cannot fit must not be fetched to find that out."""
    usage = shutil.disk_usage(home.folder)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    run = home.run(selection=SNAPSHOT)
    assert "does not fit on the disk" in run.failures["hf_snapshot"]
    assert [] == run.retried
    assert () == model_hub.requests_for("model.safetensors")


def test_ranks_that_do_not_divide_the_heads_are_refused_before_the_download(
    home: Home, model_hub: LocalHub
):
    """config.json is enough to know, and the weights may be a hundred gigabytes."""
    home.write_catalog({MODEL: {"v1": {"tensor_parallel_size": 3}}})
    run = home.run(selection=SNAPSHOT)
    assert (
        "tensor_parallel_size 3 does not divide the model's 8 attention heads"
        in (run.failures["hf_snapshot"])
    )
    assert [] == run.retried
    assert model_hub.requests_for("config.json")
    assert () == model_hub.requests_for("model.safetensors")


def test_a_hub_in_trouble_is_asked_again(home: Home, model_hub: LocalHub, no_waiting: None):
    """Maintenance of a few seconds is no reason to wake anybody."""
    model_hub.fail_next("/api/models/", status=503, times=2)
    run = home.run(selection=SNAPSHOT)
    assert run.success
    assert ["hf_snapshot", "hf_snapshot"] == run.retried


@pytest.mark.fault(
    "Bad Hub",
    "hf_snapshot: a Hub that stays in trouble",
    "one error, after some tries, with its answer",
)
def test_a_hub_that_stays_in_trouble_fails_with_its_answer(
    home: Home, model_hub: LocalHub, no_waiting: None
):
    """After three retries, each later than the one before, the message is the Hub's own."""
    model_hub.fail_next("/api/models/", status=503, times=1000)
    run = home.run(selection=SNAPSHOT)
    assert "answered 503" in run.failures["hf_snapshot"]
    assert ["hf_snapshot"] * 3 == run.retried
    waits = [event.step_retry_data for event in run.result.all_events if event.is_step_up_for_retry]
    assert [0.01, 0.02, 0.04] == [wait.seconds_to_wait for wait in waits]


def test_a_long_download_is_heard_of(
    home: Home, model_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
):
    """An hour without a line looks like a hang."""
    monkeypatch.setattr(snapshots, "_SAID_EVERY_S", 0.0)
    model_hub.bytes_per_s = 1_000_000
    run = home.run(selection=SNAPSHOT)
    assert run.success
    assert any(re.search(r"^tiny/llama: .+ MB of .+ MB downloaded$", line) for line in run.log)


# Workers


def test_a_killed_worker_is_started_again(home: Home, tmp_path: Path, no_waiting: None):
    """A neighbour's memory may have killed it; checks are then stated once, by the last attempt."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "reload-1").write_text("KILL")
    run = home.run(launcher=stand_in(deaths))
    assert run.failures == {}
    assert ["reload_check"] == run.retried
    evaluations = list(run.result.get_asset_check_evaluations())
    assert [*compare.CHECKS] == [evaluation.check_name for evaluation in evaluations]
    assert all(evaluation.passed for evaluation in evaluations)
    assert 1 == len(home.channel())


def test_a_worker_that_is_killed_each_time_fails_every_check(
    home: Home, tmp_path: Path, no_waiting: None
):
    """No check may stay without a result: Dagster would let downstream pass it."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for number in range(1, 5):
        (deaths / f"reload-{number}").write_text("KILL")
    run = home.run(launcher=stand_in(deaths))
    assert ["reload_check"] * 3 == run.retried
    assert "the worker was killed (SIGKILL)" in run.failures["reload_check"]
    assert dict.fromkeys(compare.CHECKS, False) == run.checks
    assert {run.failures["reload_check"]} == set(run.check_descriptions.values())
    assert () == home.channel()


def test_a_cancelled_step_is_not_retried(home: Home, tmp_path: Path):
    """Ctrl-C in `tensorize build` ends it: under a RetryPolicy Dagster starts the step anew."""
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "shard-1").write_text("INT")
    run = home.run(launcher=stand_in(deaths))
    assert "DagsterExecutionInterruptedError" in run.failures["tensorized_shards"]
    assert [] == run.retried
    assert "x" == (deaths / "shard.starts").read_text()
    assert [] == [
        child for child in psutil.Process().children() if "stand_in" in str(child.cmdline())
    ]


def test_an_error_nobody_foresaw_fails_every_check(home: Home, monkeypatch: pytest.MonkeyPatch):
    """A bug of ours in the comparison must not publish, and is not worth three retries."""

    def broken(*arguments: object) -> None:
        raise KeyError("lm_head")

    monkeypatch.setattr(compare, "outcomes", broken)
    run = home.run(launcher=stand_in())
    assert [] == run.retried
    assert dict.fromkeys(compare.CHECKS, False) == run.checks
    assert {"KeyError: 'lm_head'"} == set(run.check_descriptions.values())
    assert "published" not in run.materialized
    assert () == home.channel()


def test_a_worker_that_does_not_start_fails_each_check(home: Home):
    """The reload cannot even begin: a launcher with the wrong interpreter, say."""
    assert home.run(launcher=stand_in(), selection=[*UP_TO_ARTIFACT, "reference_outputs"]).success
    run = home.run(launcher=NO_WORKER)
    assert "No module named no_worker_may_start_here" in run.failures["reload_check"]
    assert dict.fromkeys(compare.CHECKS, False) == run.checks


# Records


def test_a_record_of_another_build_is_refused(
    stand_in_home: Home, model_hub: LocalHub, second_files: Any
):
    """Two runs of one partition, of two commits: the first one's later steps find the other's."""
    model_hub.commit(MODEL, second_files)
    other = stand_in_home.run(selection=SNAPSHOT)
    run = stand_in_home.run(selection=["artifact"], launcher=NO_WORKER)
    said = run.failures["artifact"]
    assert f"build {other.build_id}" in said
    assert "Materialize this partition from hf_snapshot on" in said
    assert [] == run.retried
    # The run's own tag decides, where it has one.
    tagged = stand_in_home.run(
        selection=["tensorized_shards"],
        launcher=NO_WORKER,
        tags={"tensorize_assets/build_id": "0" * 12},
    )
    assert "this run is of build 000000000000" in tagged.failures["tensorized_shards"]


def test_a_record_of_another_one_shot_is_refused(stand_in_home: Home):
    """One-shots share a partition: the same build under another name is still another folder."""
    yours = stand_in_home.run(suffix="adhoc", tags=oneshot("yours"), selection=["published"])
    assert "ArtifactRecord of tiny/llama mine" in yours.failures["published"]
    assert () == stand_in_home.channel(suffix="yours")


def test_half_a_one_shot_is_completed(stand_in_home: Home):
    """Its shards are known by their hashes too, though its record is kept under `adhoc`."""
    folder = stand_in_home.store.root / layout.oneshot_dir(MODEL, "mine")
    (folder / "manifest.json").unlink()
    run = stand_in_home.run(suffix="adhoc", tags=oneshot("mine"), launcher=NO_WORKER)
    assert run.failures == {}
    assert 1 == len(stand_in_home.channel(suffix="mine"))
    # The same build under another name has no shards yet.
    other = stand_in_home.run(suffix="adhoc", tags=oneshot("yours"), launcher=NO_WORKER)
    assert {"tensorized_shards"} == set(other.failures)


def test_a_one_shot_folder_is_written_once(
    stand_in_home: Home, model_hub: LocalHub, second_files: Any
):
    """Named by its user, it would otherwise be filled by two builds."""
    model_hub.commit(MODEL, second_files)
    run = stand_in_home.run(suffix="adhoc", tags=oneshot("mine"), launcher=stand_in())
    assert "choose another --suffix" in run.failures["hf_snapshot"]


def test_two_runs_of_one_build_end_in_one_artifact(home: Home):
    """A schedule and a person at once: both succeed, one manifest, one channel entry."""
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: home.run(launcher=stand_in()), range(2)))
    assert [{}, {}] == [run.failures for run in runs]
    (entry,) = home.channel()
    assert {entry.build_id} == {run.build_id for run in runs}
    assert verify_directory(home.store, entry.directory, home.trusted).ok


def test_a_pin_that_another_run_sets_meanwhile_decides(
    home: Home, model_hub: LocalHub, second_files: Any, monkeypatch: pytest.MonkeyPatch
):
    """Two first runs at once, the branch moving between them: both build the commit that stands."""
    home.write_catalog({MODEL: {"v1": {"track": "pin"}}})
    first = home.run(selection=SNAPSHOT).data_version("hf_snapshot")
    key = layout.pin_key(MODEL, "v1", "main")
    pin = home.store.get_bytes(key)
    assert pin is not None
    home.store.delete(key)
    second = model_hub.commit(MODEL, second_files)
    resolved: list[str] = []

    resolve = hub.resolve

    def slow_resolve(access: HubAccess, model: str, revision: str) -> RevisionListing:
        listing = resolve(access, model, revision)
        resolved.append(listing.commit)
        if len(resolved) == 1:
            home.store.put_bytes(key, pin.data)
        return listing

    monkeypatch.setattr(hub, "resolve", slow_resolve)
    run = home.run(selection=SNAPSHOT)
    assert [second, first] == resolved
    assert first == run.data_version("hf_snapshot")


@pytest.mark.parametrize(
    ("asset", "content", "said"),
    [
        ("artifact", b'{"model": "tiny', "is not a valid JSON document"),
        ("artifact", b"{}", "is not a valid ArtifactRecord: model: Field required"),
        ("reload_check", None, "materialize the asset reload_check for this partition first"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(
    stand_in_home: Home, asset: str, content: bytes | None, said: str
):
    """Damage shows as such, at once, and nothing of it is taken for a pickle."""
    path = stand_in_home.store.root / layout.record_key(asset, MODEL, "v1")
    path.unlink() if content is None else path.write_bytes(content)
    run = stand_in_home.run(selection=["published"])
    assert str(path) in run.failures["published"]
    assert said in run.failures["published"]
    assert [] == run.retried


def test_what_json_does_not_hold_is_refused(home: Home):
    """An asset that returns anything else would otherwise be pickled by habit."""

    @dg.asset(partitions_def=partitions.model_suffix)
    def loose() -> set[int]:
        return {1}

    @dg.asset
    def unpartitioned() -> float:
        return float("nan")

    with dg.DagsterInstance.ephemeral() as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        said: list[str] = []
        for asset, key in ((loose, partitions.partition_key(MODEL, "v1")), (unpartitioned, None)):
            result = dg.materialize(
                [asset],
                partition_key=key,
                instance=instance,
                resources={"io_manager": home.resources()["tensorize_io_manager"]},
                raise_on_error=False,
            )
            (event,) = result.get_step_failure_events()
            data: Any = event.event_specific_data
            said.append(data.user_failure_data.description)
    assert all("keeps JSON, and" in message and "is none" in message for message in said)
    assert () == home.store.list("records") + home.store.list("values")


def test_what_stood_at_an_unpartitioned_path_stays(home: Home):
    """Dagster's own manager deletes it when an asset becomes partitioned."""
    old = home.store.root / "hf_snapshot"
    older = home.store.root / "records" / "hf_snapshot" / "tiny"
    for path in (old, older):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody's")
    run = home.run(selection=SNAPSHOT)
    assert "a file has the name of one of its folders" in run.failures["hf_snapshot"]
    assert ["somebody's"] * 2 == [path.read_text() for path in (old, older)]


def test_records_go_where_the_layout_says(home: Home, model_hub: LocalHub, first_files: Any):
    """Only layout spells a path: an org is a folder again, however the partition key writes it."""
    models = {"tiny/llama": "tiny/llama/v1-tp2", "gpt2": "gpt2/v1-tp2"}
    model_hub.commit("gpt2", first_files)
    home.write_catalog({model: {"v1-tp2": {}} for model in models})
    for model in models:
        assert home.run(model, "v1-tp2", selection=SNAPSHOT).success
    expected = sorted(f"records/hf_snapshot/{path}.json" for path in models.values())
    assert expected == list(home.store.list("records"))


# Signatures


def test_a_channel_by_another_key_is_not_moved(stand_in_home: Home):
    """Whoever can write to the store cannot publish for that."""
    (entry,) = stand_in_home.channel()
    stranger = signing.generate_signing_key()
    stand_in_home.store.delete(layout.channel_key(MODEL, "v1"))
    fields = entry.model_dump(exclude={"number", "reason", "when", "evidence_key"})
    channel.append(stand_in_home.store, stranger, MODEL, "v1", **fields, trusted=None)
    again = stand_in_home.run(launcher=NO_WORKER)
    assert "not trusted" in again.failures["hf_snapshot"]
    assert [] == again.retried


def test_a_manifest_by_another_key_is_not_believed(stand_in_home: Home):
    """A directory that somebody else sealed is not taken for a finished build."""
    (entry,) = stand_in_home.channel()
    directory = entry.directory
    stored = manifest.read_manifest(stand_in_home.store, directory, None)
    assert stored is not None
    forged = manifest.encode(stored.manifest, signing.generate_signing_key())
    stand_in_home.store.put_bytes(layout.manifest_key(directory), forged)
    again = stand_in_home.run(launcher=NO_WORKER)
    assert "not trusted" in again.failures["hf_snapshot"]


# A device that is not there


@pytest.mark.engine
def test_a_missing_gpu_is_said_and_fails_every_check(built_home: Home, first_build: Any):
    """`reload_device: cuda` asks for a proof that this host cannot give; none is invented.

    First the source cannot be asked; then, with its answers brought from a GPU host, the artifact
    cannot be reloaded.
    """
    if psutil.LINUX and Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a GPU")
    built_home.write_catalog({MODEL: {"v1": {"reload_device": "cuda"}}})
    run = built_home.run()
    said = "reload_device is cuda with tensor_parallel_size=1, and this host has 0 CUDA devices"
    assert said in run.failures["reference_outputs"]
    assert [] == run.retried
    assert "published" not in run.materialized
    for path in built_home.store.root.glob("references/*/*-cpu-*.json"):
        shutil.copy(path, path.with_name(path.name.replace("-cpu-", "-cuda-")))
    run = built_home.run()
    assert said in run.failures["reload_check"]
    assert [] == run.retried
    assert dict.fromkeys(compare.CHECKS, False) == run.checks
    assert all(said in description for description in run.check_descriptions.values())
    assert "published" not in run.materialized
    alone = built_home.run(selection=["published"])
    assert "no evidence of a reload on cuda" in alone.failures["published"]
    (entry,) = built_home.channel()
    assert (first_build.run.build_id, "cpu") == (entry.build_id, entry.device)
