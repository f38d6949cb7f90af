"""What happens to a worker's scratch folder while a real worker builds in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain import Place, started, told, wait_for
from chain_home import MODEL, flipped
from injection import Rule

from tensorize_assets.demo.hub_server import LocalHub, folder_files

ASSETS = ("hf_snapshot", "tensorized_shards")
_WRITTEN = "tensorize_assets.worker.write_shard:write_shard"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[Place]:
    """A home in which nothing was built."""
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        made = Place(
            str(tmp_path_factory.mktemp("scratch") / "home"), hub.endpoint, "artifacts", None
        )
        made.home.write_catalog({MODEL: {"v1": {}}})
        yield made


def _flip(shard: Path) -> None:
    shard.write_bytes(flipped(shard.read_bytes()))


def _remove(shard: Path) -> None:
    shutil.rmtree(shard.parent)


def _truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            _flip,
            "reads back differently",
            marks=pytest.mark.fault(
                "Bad disk",
                "tensorized_shards, a bit of the file flipped between writing and storing",
                "refused by the hash of the tensor; nothing is stored",
            ),
        ),
        pytest.param(
            _truncate,
            "reads back differently",
            marks=pytest.mark.fault(
                "Bad disk",
                "tensorized_shards, the file cut short between writing and storing",
                "refused; nothing is stored",
            ),
        ),
        pytest.param(
            _remove,
            "it or its folder is gone",
            marks=pytest.mark.fault(
                "Bad disk",
                "tensorized_shards, the scratch folder removed under the worker",
                "refused: which file is gone; nothing is stored",
            ),
        ),
    ],
)
def test_a_file_that_changed_in_scratch_is_not_stored(
    place: Place, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    """Between the moment when it was written and the one when it is read back and stored."""
    held = tmp_path / "held"
    with started(place, ASSETS, Rule(_WRITTEN, "after", "hold", str(held))) as running:
        wait_for(held, running)
        (shard,) = Path(place.folder).rglob("model.tensors")
        damage(shard)
        held.with_suffix(".go").touch()
        failure = told(running).failures["tensorized_shards"]
    assert said in failure
    assert shard.name in failure
    assert str(shard.parent) in failure
    assert not [key for key in place.home.store.list("vllm/") if key.endswith(".tensors")]


@pytest.mark.engine
@pytest.mark.fault("Bad disk", "after each of these", "the next run builds it")
def test_the_next_run_builds_it(place: Place) -> None:
    with started(place, ASSETS) as running:
        assert told(running).failures == {}
