"""What Dagster's UI has to show: of each asset, of each run, and over time."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, NO_WORKER, Home, Run, flipped, stand_in

from tensorize_assets.assets.fleet_status import fleet_status
from tensorize_assets.assets.reload_check import reload_check
from tensorize_assets.assets.target import BUILD_TAG, COMMIT_TAG, MODEL_TAG, SUFFIX_TAG
from tensorize_assets.core import compare
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.definitions import ASSETS
from tensorize_assets.demo.hub_server import LocalHub


@pytest.fixture(scope="module")
def run(stand_in_build: Any) -> Run:
    """The whole chain, by workers that take no vLLM."""
    return stand_in_build.run


def entries(run: Run, asset: str) -> dict[str, dg.MetadataValue]:
    """The metadata of an asset, typed as the UI has it."""
    for event in run.result.get_asset_materialization_events():
        if event.asset_key == dg.AssetKey(asset):
            return dict(event.step_materialization_data.materialization.metadata)
    raise KeyError(asset)


def checks(run: Run) -> dict[str, dict[str, dg.MetadataValue]]:
    return {one.check_name: dict(one.metadata) for one in run.result.get_asset_check_evaluations()}


def reloaded(home: Home, *, again: bool) -> dg.ExecuteInProcessResult:
    """A run of reload_check alone, with its run config."""
    return dg.materialize(
        ASSETS,
        selection=["reload_check"],
        partition_key=dg.MultiPartitionKey({"model": MODEL.replace("/", "--"), "suffix": "v1"}),
        instance=_instance(),
        resources=home.resources(stand_in()),
        run_config={"ops": {"reload_check": {"config": {"again": again}}}},
        raise_on_error=False,
    )


def _instance() -> dg.DagsterInstance:
    instance = dg.DagsterInstance.ephemeral()
    instance.add_dynamic_partitions("tensorize_model", [MODEL.replace("/", "--")])
    instance.add_dynamic_partitions("tensorize_suffix", ["v1"])
    return instance


@pytest.mark.parametrize("asset", [*ASSETS, fleet_status], ids=lambda one: one.key.path[-1])
def test_an_asset_says_what_it_is(asset: dg.AssetsDefinition):
    """The first thing that somebody sees who did not build this."""
    (spec,) = asset.specs
    expected = "fleet" if asset is fleet_status else "tensorized_models"
    assert expected == spec.group_name
    assert spec.kinds
    assert spec.description
    assert len(spec.description.splitlines()) > 1
    assert spec.automation_condition is not None or asset is ASSETS[0]


def test_owners_of_the_catalog_are_owners_of_dagster():
    """What the catalog takes, Dagster must: else the code location would not load."""
    owners = ("team:ml-platform", "anna@example.com", "a.b+c@mail.example.org")
    catalog = Catalog.model_validate({"root": "artifacts", "models": {}, "owners": owners})
    assert list(owners) == list(dg.AssetSpec("x", owners=catalog.owners).owners)


@pytest.mark.parametrize("owner", ["anna", "team:", "team:a b", "@example.com", ".a@b.co", ""])
def test_what_is_no_owner_is_refused_with_the_catalog(owner: str):
    """With its line, and not as an error of Dagster at load."""
    with pytest.raises(ValueError, match="is not an owner: an email address, or team:NAME"):
        Catalog.model_validate({"root": "artifacts", "models": {}, "owners": [owner]})


@pytest.mark.parametrize("asset", [asset.key.path[-1] for asset in ASSETS])
def test_numbers_are_numbers(run: Run, asset: str):
    """Dagster plots ints and floats over time, and no text."""
    said = entries(run, asset)
    for name, value in said.items():
        kind = type(value)
        if any(word in name for word in ("bytes", "memory", "files", "tensors", "ranks")):
            assert kind is dg.IntMetadataValue or name.endswith("per_second"), name
        if "seconds" in name or name.endswith(("per_second", "perplexity")):
            assert kind in (dg.FloatMetadataValue, dg.IntMetadataValue), name
        if name.endswith("_at"):
            assert kind is dg.TimestampMetadataValue, name
        if "directory" in name or name == "channel":
            assert kind is dg.PathMetadataValue, name


def test_a_person_gets_to_the_commit_and_to_the_artifact(run: Run):
    """One click from the asset to what it was made of, and one to where it lies."""
    commit = run.data_version("hf_snapshot")
    for asset, name in (("hf_snapshot", "commit"), ("published", "hub")):
        link = entries(run, asset)[name]
        assert isinstance(link, dg.UrlMetadataValue)
        assert link.url is not None
        assert link.url.endswith(f"/{MODEL}/tree/{commit}")
    place = entries(run, "published")["directory"]
    assert isinstance(place, dg.PathMetadataValue)
    assert str(place.path).endswith(f"v1-{run.build_id}")


def test_checks_show_tables(run: Run):
    """Rows that are alike are read across, not as JSON."""
    answers = checks(run)["token_ids_equal"]["answers"]
    assert isinstance(answers, dg.TableMetadataValue)
    assert [{"prompt", "answer"}] * 4 == [set(record.data) for record in answers.records]
    overview = entries(run, "reload_check")["checks"]
    assert isinstance(overview, dg.TableMetadataValue)
    assert [*compare.CHECKS] == [record.data["check"] for record in overview.records]
    assert all(record.data["passed"] for record in overview.records)


def test_the_reload_is_told_as_a_report(run: Run):
    """One page for whoever has to believe it, with a picture."""
    report = entries(run, "reload_check")["report"]
    assert isinstance(report, dg.MarkdownMetadataValue)
    text = str(report.md_str)
    assert "the artifact is its source" in text
    assert all(f"` {name} `" in text for name in compare.CHECKS)
    assert "](data:image/svg+xml;base64," in text
    assert f"/{MODEL}/tree/{run.data_version('hf_snapshot')}" in text


def test_a_refused_reload_has_a_report_too(stand_in_home: Home, run: Run):
    """Then it is read for certain: which answer, which tensor."""
    shard = stand_in_home.artifact(run) / "model.tensors"
    shard.write_bytes(flipped(shard.read_bytes()))
    (entry,) = stand_in_home.channel()
    stand_in_home.store.delete(entry.evidence_key)
    refused = stand_in_home.run(selection=["reload_check"], launcher=stand_in())
    assert not refused.success
    text = str(refused.metadata("reload_check")["report"])
    assert "the artifact was refused" in text
    assert "| FAILED | ` tensor_hashes_equal `" in text


def test_a_reload_is_done_again_when_it_is_asked_for(stand_in_home: Home):
    """`reverify`: passing evidence is of the day it was made, and hosts change."""
    for again, started in ((False, False), (True, True)):
        result = reloaded(stand_in_home, again=again)
        assert result.success
        (event,) = result.get_asset_materialization_events()
        said = event.step_materialization_data.materialization.metadata
        assert started == ("worker_seconds" in said)
        assert "report" in said


def test_a_run_is_found_by_what_it_is_of(run: Run):
    """Tags, in the list of runs: model, suffix, commit and build."""
    assert {
        MODEL_TAG: MODEL,
        SUFFIX_TAG: "v1",
        COMMIT_TAG: run.data_version("hf_snapshot"),
        BUILD_TAG: run.build_id,
    }.items() <= run.tags.items()


def test_so_is_a_run_without_a_snapshot(stand_in_home: Home, run: Run):
    """Those that the conditions start begin further down."""
    later = stand_in_home.run(selection=["published"], launcher=NO_WORKER)
    assert later.success
    assert {MODEL_TAG: MODEL, SUFFIX_TAG: "v1", BUILD_TAG: run.build_id}.items() <= (
        later.tags.items()
    )


def test_the_same_channel_is_the_same_data_version(
    stand_in_home: Home, run: Run, model_hub: LocalHub, second_files: Any
):
    """What is after `published`, in whatever project, is stale when the channel has moved."""
    again = stand_in_home.run(launcher=NO_WORKER)
    assert run.data_version("published") == again.data_version("published")
    model_hub.commit(MODEL, second_files)
    moved = stand_in_home.run(launcher=stand_in())
    assert moved.success
    assert run.data_version("published") != moved.data_version("published")


def test_every_check_blocks():
    """A check that does not would let a refused build reach the channel's step."""
    assert {*compare.CHECKS} == {spec.name for spec in reload_check.check_specs if spec.blocking}


def test_only_the_fleets_table_has_a_freshness():
    """A model that nobody changes on the Hub is not stale, however old its build is."""
    fresh = [
        asset.key.path[-1]
        for asset in (*ASSETS, fleet_status)
        for spec in asset.specs
        if spec.freshness_policy is not None
    ]
    assert ["fleet_status"] == fresh
