"""ManifestIOManager in somebody else's project: any asset, JSON, on a disk and in S3."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, Home
from pydantic import BaseModel

from tensorize_assets import partitions
from tensorize_assets.assets.target import BUILD_TAG
from tensorize_assets.core import layout
from tensorize_assets.core.records import PublishedRecord
from tensorize_assets.definitions import ASSETS
from tensorize_assets.io_managers import ManifestIOManager

days = dg.StaticPartitionsDefinition(["2026-11-29", "a/b", "..", "c"])


class Size(BaseModel):
    """What an asset of theirs may return."""

    count: int


@dg.asset
def plain() -> dict[str, Any]:
    return {"a": [1, 2.5, None, "ü"]}


@dg.asset
def model() -> Size:
    return Size(count=3)


@dg.asset(partitions_def=days, key_prefix=["their", "own"])
def daily(context: dg.AssetExecutionContext) -> str:
    return context.partition_key


def materialize(home: Home, *assets: Any, **arguments: Any) -> dg.ExecuteInProcessResult:
    resources = home.resources()
    resources["io_manager"] = resources["tensorize_io_manager"]
    return dg.materialize(assets, resources=resources, **arguments)


def failure(result: dg.ExecuteInProcessResult) -> str:
    (event,) = result.get_step_failure_events()
    data: Any = event.event_specific_data
    return str(data.user_failure_data.description)


@pytest.fixture(params=["disk", "s3"])
def any_home(request: pytest.FixtureRequest, home: Home) -> Home:
    """A home whose root is a folder, and one whose root is in S3."""
    if request.param == "disk":
        return home
    return request.getfixturevalue("s3_home")


def test_values_of_other_assets_go_and_come_as_json(any_home: Home) -> None:
    """Their partitions may hold slashes; each value has a key of its own under the root."""
    with dg.DagsterInstance.ephemeral() as instance:
        for asset in (plain, model):
            assert materialize(any_home, asset, instance=instance).success
        for day in ("2026-11-29", "a/b", "c"):
            assert materialize(any_home, daily, instance=instance, partition_key=day).success
        two = dg.AssetIn(
            key=["their", "own", "daily"],
            partition_mapping=dg.SpecificPartitionsPartitionMapping(["2026-11-29", "a/b"]),
        )

        @dg.asset(ins={"daily": two})
        def reads(plain: dict[str, Any], model: Size, daily: dict[str, str]) -> list[Any]:
            return [plain["a"][3], model.count, sorted(daily.values())]

        result = dg.materialize(
            [plain, model, daily, reads],
            selection=[reads],
            instance=instance,
            resources={"io_manager": any_home.resources()["tensorize_io_manager"]},
        )
        assert ["ü", 3, ["2026-11-29", "a/b"]] == result.output_for_node("reads")
    expected = (
        "values/model.json",
        "values/plain.json",
        "values/reads.json",
        "values/their/own/daily/@/2026-11-29.json",
        "values/their/own/daily/@/a%2Fb.json",
        "values/their/own/daily/@/c.json",
    )
    assert expected == any_home.store.list("values")


def test_a_partition_that_would_escape_is_refused(any_home: Home) -> None:
    """A partition's name comes from anywhere."""
    result = materialize(any_home, daily, partition_key="..", raise_on_error=False)
    assert "step to another folder" in failure(result)
    assert () == any_home.store.list("")


def test_a_value_of_another_shape_is_named(any_home: Home) -> None:
    """The asset changed its type and was not materialized since."""
    any_home.store.put_bytes("values/model.json", b'{"count": "many"}')

    @dg.asset
    def reads(model: Size) -> int:
        return model.count

    result = dg.materialize(
        [model, reads],
        selection=[reads],
        resources={"io_manager": any_home.resources()["tensorize_io_manager"]},
        raise_on_error=False,
    )
    assert f"{any_home.store.uri('values/model.json')} is not what is read of it" in failure(result)


def test_a_run_of_one_build_reads_no_record_of_another(stand_in_home: Home) -> None:
    """Their asset after ours is held to the same rule, without a line of theirs."""

    @dg.asset(partitions_def=partitions.model_suffix)
    def rollout(published: PublishedRecord) -> str:
        return published.build_id

    (entry,) = stand_in_home.channel()
    said: list[bool | str] = []
    for build in (entry.build_id, "0" * 12):
        with dg.DagsterInstance.ephemeral() as instance:
            partitions.add_pairs(instance, [MODEL], ["v1"])
            result = dg.materialize(
                [*ASSETS, rollout],
                selection=[rollout],
                partition_key=partitions.partition_key(MODEL, "v1"),
                instance=instance,
                tags={BUILD_TAG: build},
                resources=stand_in_home.resources(),
                raise_on_error=False,
            )
        said.append(result.success or failure(result))
    assert said[0] is True
    where = stand_in_home.store.uri(layout.record_key("published", MODEL, "v1"))
    assert f"{where} is of build {entry.build_id} of tiny/llama v1" in str(said[1])
    assert "Materialize this partition from hf_snapshot on" in str(said[1])


def test_the_example_project_loads_our_assets_beside_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the README tells people to copy."""
    import runpy

    path = Path(__file__).parents[2] / "examples" / "your_project" / "definitions.py"
    monkeypatch.delenv("TENSORIZE_CATALOG", raising=False)
    defs: dg.Definitions = runpy.run_path(str(path))["defs"]
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert {"hf_snapshot", "published", "rollout_request", "served_models"} <= keys
    assert isinstance((defs.resources or {})["tensorize_io_manager"], ManifestIOManager)
    dg.Definitions.validate_loadable(defs)


def test_the_example_projects_asset_reads_our_record(stand_in_home: Home) -> None:
    """From a finished chain to a value in the same store."""
    import runpy

    path = Path(__file__).parents[2] / "examples" / "your_project" / "definitions.py"
    rollout = runpy.run_path(str(path))["rollout_request"]
    with dg.DagsterInstance.ephemeral() as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        result = materialize(
            stand_in_home,
            *ASSETS,
            rollout,
            selection=[rollout],
            instance=instance,
            partition_key=partitions.partition_key(MODEL, "v1"),
        )
    expected = {"model": MODEL, "channel": layout.channel_key(MODEL, "v1"), "entry": 1}
    assert expected == result.output_for_node("rollout_request")
    assert ("values/rollout_request/@/tiny--llama/v1.json",) == stand_in_home.store.list("values/")


def test_an_asset_of_theirs_does_not_take_the_place_of_our_record(stand_in_home: Home) -> None:
    """The same name under a prefix would otherwise end the next run of the chain."""

    @dg.asset(key_prefix="mine", partitions_def=partitions.model_suffix)
    def artifact() -> dict[str, str]:
        return {}

    key = layout.record_key("artifact", MODEL, "v1")
    before = stand_in_home.store.get_bytes(key)
    with dg.DagsterInstance.ephemeral() as instance:
        partitions.add_pairs(instance, [MODEL], ["v1"])
        result = materialize(
            stand_in_home,
            artifact,
            instance=instance,
            partition_key=partitions.partition_key(MODEL, "v1"),
            raise_on_error=False,
        )
    assert "keeps a ArtifactRecord of tensorize_assets, not dict" in failure(result)
    assert before == stand_in_home.store.get_bytes(key)


@pytest.mark.parametrize(
    ("value", "said"),
    [({1: "a"}, "read back"), ((1, 2), "read back"), ("x" * (65 << 20), "file of its own")],
)
def test_what_would_come_back_otherwise_is_refused(home: Home, value: Any, said: str) -> None:
    """At the write, where it can still be mended; not at some later read."""

    @dg.asset
    def odd() -> Any:
        return value

    assert said in failure(materialize(home, odd, raise_on_error=False))
    assert () == home.store.list("values/")


def test_an_assets_partition_is_not_another_assets_value(home: Home) -> None:
    """["sales", "eu"], and ["sales"] at partition "eu"."""
    regions = dg.StaticPartitionsDefinition(["eu"])

    @dg.asset(key=["sales", "eu"])
    def one() -> int:
        return 1

    @dg.asset(key=["sales"], partitions_def=regions)
    def other() -> int:
        return 2

    assert materialize(home, one).success
    assert materialize(home, other, partition_key="eu").success
    assert ("values/sales/@/eu.json", "values/sales/eu.json") == home.store.list("values/")


def test_missing_partitions_may_be_allowed(home: Home) -> None:
    """As with Dagster's other path managers."""
    every = dg.AssetIn(
        key=["their", "own", "daily"],
        metadata={"allow_missing_partitions": True},
        partition_mapping=dg.SpecificPartitionsPartitionMapping(["c", "2026-11-29"]),
    )

    @dg.asset(ins={"daily": every})
    def reads(daily: dict[str, str]) -> int:
        return len(daily)

    with dg.DagsterInstance.ephemeral() as instance:
        assert materialize(home, daily, instance=instance, partition_key="c").success
        result = materialize(home, daily, reads, selection=[reads], instance=instance)
        assert 1 == result.output_for_node("reads")
