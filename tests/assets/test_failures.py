"""Which errors a step is tried again for: each class that there is, through Dagster."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import dagster as dg
import pytest
from chain_home import Home, stand_in

import tensorize_assets
from tensorize_assets import io_managers
from tensorize_assets.assets import target
from tensorize_assets.core.errors import (
    HubUnavailableError,
    StoreUnavailableError,
    TensorizeAssetsError,
)
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.store import StoredObject
from tensorize_assets.resources.launchers.local import SubprocessLauncher

# What passes by itself: the network, servers that are down or busy, a neighbour, a killed worker.
PASSES = {
    "ClusterUnavailableError",
    "HubUnavailableError",
    "StoreUnavailableError",
    "WorkerBusyError",
    "WorkerKilledError",
}
# What somebody has to mend: the same run again would only say it again, later.
STAYS = {
    "AbsentError",
    "BuildMismatchError",
    "CatalogError",
    "ConflictError",
    "EvidenceError",
    "HistoryError",
    "HubError",
    "ManifestError",
    "MissingValueError",
    "PreflightError",
    "SealingError",
    "SignatureError",
    "StoreError",
    "TensorizeAssetsError",
    "WorkerError",
}


def kinds(base: type[TensorizeAssetsError]) -> Iterator[type[TensorizeAssetsError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def every_error() -> dict[str, type[TensorizeAssetsError]]:
    """Each class of ours that leaves its module."""
    for package in ("core", "assets", "resources", "automation"):
        folder = Path(tensorize_assets.__file__).parent / package
        for module in pkgutil.iter_modules([str(folder)]):
            importlib.import_module(f"tensorize_assets.{package}.{module.name}")
    assert io_managers.MissingValueError
    return {
        kind.__name__: kind
        for kind in kinds(TensorizeAssetsError)
        if kind.__module__.startswith("tensorize_assets") and not kind.__name__.startswith("_")
    }


ERRORS: Mapping[str, type[TensorizeAssetsError]] = every_error()


def attempts(error: TensorizeAssetsError) -> tuple[int, str]:
    """How often a step that always meets `error` is begun, and what is said at last."""
    begun: list[int] = []

    @dg.asset
    def meets_it(context: dg.AssetExecutionContext) -> None:
        begun.append(context.retry_number)
        with target.failures(context):
            raise error

    result = dg.materialize([meets_it], raise_on_error=False)
    (failed,) = result.get_step_failure_events()
    data = failed.step_failure_data
    assert data.user_failure_data is not None
    assert list(range(len(begun))) == begun
    return len(begun), str(data.user_failure_data.description)


def test_each_error_is_in_the_table():
    """A new class is a decision: can it pass by itself?"""
    assert PASSES | STAYS == ERRORS.keys()
    assert set() == PASSES & STAYS
    assert {name for name, kind in ERRORS.items() if kind.retryable} == PASSES


@pytest.mark.parametrize("name", sorted(PASSES))
def test_what_passes_by_itself_is_tried_again(no_waiting: None, name: str):
    """Three more times, and then its message is what a person reads."""
    assert (4, "it is so") == attempts(ERRORS[name]("it is so"))


@pytest.mark.parametrize("name", sorted(STAYS))
def test_what_somebody_has_to_mend_fails_at_once(no_waiting: None, name: str):
    """A retry would delay the message by the time of all attempts."""
    assert (1, "it is so") == attempts(ERRORS[name]("it is so"))


def test_an_error_that_nobody_foresaw_fails_at_once(no_waiting: None):
    """It is a mistake of ours: to do it again is not to be hoped for."""
    begun: list[int] = []

    @dg.asset
    def breaks(context: dg.AssetExecutionContext) -> None:
        begun.append(context.retry_number)
        with target.failures(context):
            raise ZeroDivisionError

    assert not dg.materialize([breaks], raise_on_error=False).success
    assert [0] == begun


def test_the_hub_is_left_alone_as_long_as_it_asks():
    """429 with Retry-After: to ask sooner costs the next answer too."""
    waits = {
        after: target.retry_or_failure(HubUnavailableError("busy", after), 0)
        for after in (None, 1.0, 60.0, 100_000.0)
    }
    assert {None: 5.0, 1.0: 5.0, 60.0: 60.0, 100_000.0: 300.0} == {
        after: retry.seconds_to_wait
        for after, retry in waits.items()
        if isinstance(retry, dg.RetryRequested)
    }


def test_a_record_is_read_again_when_the_store_was_down(
    stand_in_home: Home, no_waiting: None, monkeypatch: pytest.MonkeyPatch
):
    """Inputs are loaded outside of an asset's own code: a 503 there must not end the run."""
    read = LocalStore.get_bytes
    down = [True, True]

    def get_bytes(store: LocalStore, key: str) -> StoredObject | None:
        if key.startswith("records/hf_snapshot/") and down and down.pop():
            raise StoreUnavailableError("the store answers 503")
        return read(store, key)

    monkeypatch.setattr(LocalStore, "get_bytes", get_bytes)
    run = stand_in_home.run(selection=["reference_outputs"])
    assert run.failures == {}
    assert ["reference_outputs"] * 2 == run.retried


class Mistaken(SubprocessLauncher):
    """Says of its workers what is not so, as settings do after the image was changed."""

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "vllm": "0.32.0"}


def test_what_other_versions_built_than_was_said_is_refused(home: Home):
    """It would be found under the id of a build that it is not."""
    here = stand_in()
    run = home.run(launcher=Mistaken(module=here.module, env=here.env))
    assert (
        "the worker has vllm 0.31.0, and this build is of 0.32.0"
        in (run.failures["tensorized_shards"])
    )
    assert () == home.channel()
