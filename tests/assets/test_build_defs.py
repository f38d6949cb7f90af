"""What other Dagster projects get: all of ours beside their own, and theirs as it was."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from chain_home import MODEL, PROFILE, Home, stand_in

from tensorize_assets import build_defs, partitions
from tensorize_assets.core import layout
from tensorize_assets.core.catalog import Catalog
from tensorize_assets.core.catalog_automation import Automation
from tensorize_assets.core.catalog_launchers import LAUNCHER_VARIABLE
from tensorize_assets.core.errors import CatalogError
from tensorize_assets.core.records import PublishedRecord
from tensorize_assets.definitions import ASSETS, schedules_of
from tensorize_assets.resources.catalog import CatalogResource
from tensorize_assets.resources.hub import HubResource
from tensorize_assets.resources.store import StoreResource

KEY = partitions.partition_key(MODEL, "v1")


class TheirCatalog(dg.ConfigurableResource[Any]):
    """Of dresses, perhaps."""

    season: str


class TheirFiles(dg.ConfigurableIOManager):
    """Writes each value's text into one folder."""

    folder: str

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        name = context.asset_key.path[-1]
        Path(self.folder, name).write_text(json.dumps(obj))

    def load_input(self, context: dg.InputContext) -> object:
        raise NotImplementedError


@dg.asset(group_name="sales")
def orders(catalog: TheirCatalog, launcher: dg.ResourceParam[str]) -> list[str]:
    """An asset of theirs that has nothing to do with ours, but for its resources' names."""
    return [catalog.season, launcher]


@dg.asset(group_name="sales", partitions_def=partitions.model_suffix)
def rollout(published: PublishedRecord) -> str:
    """An asset of theirs after one of ours."""
    return published.build_id


def theirs(folder: Path) -> dg.Definitions:
    """A project's own definitions, with resources that have common names."""
    folder.mkdir(exist_ok=True)
    return dg.Definitions(
        assets=[orders, rollout],
        resources={
            "catalog": TheirCatalog(season="spring"),
            "launcher": "a string",
            "io_manager": TheirFiles(folder=str(folder)),
        },
    )


def ours(home: Home, catalog: Path | Catalog) -> dg.Definitions:
    """Our definitions, with workers that need no vLLM."""
    hub = HubResource(endpoint=home.endpoint, cache_dir=str(home.folder / "hub"))
    return build_defs(catalog, home.folder, hub=hub, launcher=stand_in())


def build(defs: dg.Definitions, instance: dg.DagsterInstance) -> dg.ExecuteInProcessResult:
    partitions.add_pairs(instance, [MODEL], ["v1"])
    job = defs.resolve_job_def("build")
    return job.execute_in_process(instance=instance, partition_key=KEY)


def test_a_project_keeps_its_own_resources_of_the_same_names(home: Home, tmp_path: Path) -> None:
    """Everybody has an `io_manager`: ours must neither write their values nor lose its own."""
    folder = tmp_path / "theirs"
    defs = dg.Definitions.merge(ours(home, home.folder / "models.yaml"), theirs(folder))
    dg.Definitions.validate_loadable(defs)

    with dg.DagsterInstance.ephemeral() as instance:
        assert build(defs, instance).success
        everything = defs.resolve_implicit_global_asset_job_def()
        for asset, key in ((orders, None), (rollout, KEY)):
            assert everything.execute_in_process(
                instance=instance, asset_selection=[asset.key], partition_key=key
            ).success

    (entry,) = home.channel()
    written = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert {"orders": ["spring", "a string"], "rollout": entry.build_id} == written
    assert home.store.stat(layout.record_key("published", MODEL, "v1"))
    assert () == home.store.list("values/")


def test_a_catalog_made_in_python_needs_no_file(home: Home) -> None:
    """Its relative root is a folder of the home."""
    (home.folder / "models.yaml").unlink()
    catalog = Catalog.model_validate(
        {"root": home.root, "models": {MODEL: {"profiles": {"v1": PROFILE}}}}
    )
    with dg.DagsterInstance.ephemeral() as instance:
        assert build(ours(home, catalog), instance).success
    assert 1 == len(home.channel())


def test_what_its_catalog_says_comes_back_the_same(tmp_path: Path) -> None:
    """As JSON in a resource: nothing may be lost, or be made relative to elsewhere."""
    content = {
        "root": "s3://bucket/prefix",
        "s3": {"ca_bundle": "certs/ca.pem"},
        "automation": {"retensorize": "5 5 * * 1"},
        "models": {MODEL: {"profiles": {"v1": {**PROFILE, "prompts": ["ü"], "track": "pin"}}}},
    }
    defs = build_defs(Catalog.model_validate(content), tmp_path)
    resource: Any = next(
        one for one in (defs.resources or {}).values() if isinstance(one, CatalogResource)
    )
    content["s3"] = {"ca_bundle": str(tmp_path / "certs" / "ca.pem")}
    assert Catalog.model_validate(content) == resource.catalog()
    assert "s3://bucket/prefix" == resource.root()


BROKEN = {
    "absent": None,
    "broken": b"automation: {retensorize: never}\nmodels: [",
    "not text": b"\xff\xfeautomation:\n",
    "a mistake": b"automation: {retensorize: never}\nroot: a\nmodels: {}\n",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_they_load_while_the_catalog_is_wrong(tmp_path: Path, content: bytes | None) -> None:
    """Else an edit that went wrong would take the UI along that could say so."""
    path = tmp_path / "models.yaml"
    if content is not None:
        path.write_bytes(content)
    defs = build_defs(path, tmp_path)
    dg.Definitions.validate_loadable(defs)
    assert times(schedules_of(Automation())) == times(defs.schedules)


@pytest.mark.parametrize("named", ["", "k8s"])
def test_no_launcher_stands_in_for_that_of_a_broken_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Workers would run beside Dagster; once it is mended, its own launcher is used."""
    monkeypatch.setenv(LAUNCHER_VARIABLE, named)
    path = tmp_path / "models.yaml"
    settings = "launchers: {ray: {address: http://x:1}, k8s: {image: x}}"
    broken = f"root: a\nlauncher: ray\n{settings}\nmodels: [\n"
    path.write_text(broken)
    defs = build_defs(path, tmp_path)
    dg.Definitions.validate_loadable(defs)
    launcher: Any = (defs.resources or {})["tensorize_launcher"]
    for use in (
        launcher.versions,
        lambda: launcher.run(None, None, None),
        lambda: launcher.shares_disks,
    ):
        with pytest.raises(CatalogError, match=r"models\.yaml:\d"):
            use()
    path.write_text(broken.replace("models: [", "models: {}"))
    assert launcher.shares_disks is False


def times(schedules: Any) -> dict[str, str]:
    return {schedule.name: schedule.cron_schedule for schedule in schedules}


def test_schedules_are_at_the_catalogs_times(tmp_path: Path) -> None:
    """Those of the file as it is when the code location is loaded."""
    content = {"retensorize": "1 1 * * 1", "audit": {"cron": "2 2 * * *"}}
    path = tmp_path / "models.yaml"
    path.write_text(json.dumps({"root": "artifacts", "automation": content, "models": {}}))
    expected = times(schedules_of(Automation.model_validate(content)))
    assert expected == times(build_defs(path, tmp_path).schedules)


def test_owners_and_group_are_set_on_every_asset(tmp_path: Path) -> None:
    """A project has names of its own for who answers, and for where assets stand in its UI."""
    path = tmp_path / "models.yaml"
    path.write_text("root: artifacts\nowners: [team:ml]\nmodels: {}\n")
    defs = build_defs(path, tmp_path, group_name="models")
    specs = defs.resolve_all_asset_specs()
    assert {("models", ("team:ml",))} == {(s.group_name, tuple(s.owners)) for s in specs}
    (left,) = {asset.group_names_by_key[key] for asset in ASSETS[:1] for key in asset.keys}
    assert "tensorized_models" == left


def test_without_sensors_and_schedules_nothing_starts_by_itself(tmp_path: Path) -> None:
    """Also not by the sensor that Dagster itself adds for conditions."""
    quiet = build_defs(tmp_path / "models.yaml", tmp_path, sensors=False, schedules=False)
    repository = quiet.get_repository_def()
    assert [] == [*repository.sensor_defs, *repository.schedule_defs]
    assert "build" in repository.job_names


def test_a_store_of_ones_own_holds_records_too(tmp_path: Path) -> None:
    """Artifacts in one place and Dagster's records of them in another would not find together."""
    catalog = CatalogResource(path=str(tmp_path / "models.yaml"))
    store = StoreResource(catalog=catalog, scratch=str(tmp_path / "elsewhere"))
    resources: Any = build_defs(tmp_path / "models.yaml", tmp_path, artifact_store=store).resources
    assert resources["tensorize_store"] is store
    assert resources["tensorize_io_manager"].store is store


def test_importing_the_package_imports_no_dagster() -> None:
    """The worker and vLLM's own processes import it; Dagster would take a second of each."""
    program = (
        "import sys, tensorize_assets\n"
        "assert {'build_defs', 'TensorizedModels'} <= set(dir(tensorize_assets))\n"
        "print([name for name in sys.modules if name.startswith(('dagster', 'pydantic'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "[]" == done.stdout.strip()


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    """As with any module, for tools that ask with hasattr."""
    import tensorize_assets

    assert not hasattr(tensorize_assets, "build_def")
