"""Finished chains to start from: each is run once a session, and every test gets a copy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tensorize_assets.assets import target
from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.demo.s3_server import REGION, LocalS3

# The helpers of these tests; pytest does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from chain_home import (
    MODEL,
    NO_WORKER,
    UP_TO_ARTIFACT,
    Home,
    Run,
    flipped,
    oneshot,
    stand_in,
    with_value,
)

Files = dict[str, bytes | Path]


class Finished(NamedTuple):
    """A home whose chain ran to its end, and that run."""

    home: Home
    run: Run


class SecondBuild(NamedTuple):
    """A home that went on to another commit, and what happened while its artifact was damaged."""

    home: Home
    commit: str
    damaged: Run
    while_damaged: tuple[ChannelEntry, ...]
    alone: Run
    run: Run


@pytest.fixture(scope="session")
def first_files(tiny_models: Path) -> Files:
    """The files of the model's first commit."""
    return folder_files(tiny_models / "llama")


@pytest.fixture(scope="session")
def second_files(first_files: Files) -> Files:
    """Those of its second: one weight differs."""
    weights = first_files["model.safetensors"]
    assert isinstance(weights, Path)
    changed = with_value(weights.read_bytes(), "model.norm.weight", 0x4000)
    return {**first_files, "model.safetensors": changed}


@pytest.fixture(scope="session")
def broken_files(first_files: Files) -> Files:
    """A model that loads and answers, with one weight that is not a number."""
    weights = first_files["model.safetensors"]
    assert isinstance(weights, Path)
    name = "model.layers.1.mlp.up_proj.weight"
    return {**first_files, "model.safetensors": with_value(weights.read_bytes(), name, 0x7FC0)}


@pytest.fixture
def model_hub(hub: LocalHub, first_files: Files) -> LocalHub:
    """A Hub that holds the model at its first commit."""
    hub.commit(MODEL, first_files)
    return hub


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries follow nearly at once."""
    monkeypatch.setattr(target, "_FIRST_WAIT_S", 0.01)


@pytest.fixture
def home(tmp_path: Path, model_hub: LocalHub) -> Home:
    """A home in which nothing was built."""
    fresh = Home(tmp_path / "home", model_hub.endpoint)
    fresh.write_catalog({MODEL: {"v1": {}}})
    return fresh


@pytest.fixture
def s3_home(
    tmp_path: Path,
    model_hub: LocalHub,
    s3: LocalS3,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Home:
    """A home in which nothing was built, with its root in S3 and the keys in the environment."""
    monkeypatch.setenv("S3_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", s3.secret_key)
    settings = S3Settings(endpoint_url=s3.endpoint, region=REGION)
    fresh = Home(tmp_path / "s3-home", model_hub.endpoint, s3_root, settings)
    fresh.write_catalog({MODEL: {"v1": {}}})
    return fresh


@pytest.fixture(scope="session")
def first_build(tmp_path_factory: pytest.TempPathFactory, first_files: Files) -> Finished:
    """The chain at the first commit, by real engines."""
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        home = Home(tmp_path_factory.mktemp("first-build") / "home", hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}})
        run = home.run()
    return Finished(home, run)


@pytest.fixture(scope="session")
def second_build(
    tmp_path_factory: pytest.TempPathFactory,
    first_build: Finished,
    first_files: Files,
    second_files: Files,
) -> SecondBuild:
    """The first commit's chain, and the second's, whose artifact was damaged for a while."""
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        commit = hub.commit(MODEL, second_files)
        folder = tmp_path_factory.mktemp("second-build") / "home"
        home = first_build.home.copy_to(folder, hub.endpoint)
        sealed = home.run(selection=UP_TO_ARTIFACT)
        shard = home.artifact(sealed) / "model.tensors"
        whole = shard.read_bytes()
        shard.write_bytes(flipped(whole))
        damaged = home.run()
        while_damaged = home.channel()
        alone = home.run(selection=["published"], launcher=NO_WORKER)
        shard.write_bytes(whole)
        run = home.run()
    return SecondBuild(home, commit, damaged, while_damaged, alone, run)


@pytest.fixture
def twice_built_home(
    second_build: SecondBuild, tmp_path: Path, model_hub: LocalHub, second_files: Files
) -> Home:
    """A home of one's own after both builds, its Hub at the second commit."""
    model_hub.commit(MODEL, second_files)
    return second_build.home.copy_to(tmp_path / "built-twice", model_hub.endpoint)


@pytest.fixture
def built_home(first_build: Finished, tmp_path: Path, model_hub: LocalHub) -> Home:
    """A home of one's own that stands as the first build left it."""
    return first_build.home.copy_to(tmp_path / "built", model_hub.endpoint)


@pytest.fixture(scope="session")
def stand_in_build(tmp_path_factory: pytest.TempPathFactory, first_files: Files) -> Finished:
    """The chain by workers that take no vLLM: the catalog's v1, and the one-shot `mine`."""
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        home = Home(tmp_path_factory.mktemp("stand-in-build") / "home", hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}})
        run = home.run(launcher=stand_in())
        home.run(suffix="adhoc", tags=oneshot("mine"), launcher=stand_in())
    return Finished(home, run)


@pytest.fixture
def stand_in_home(stand_in_build: Finished, tmp_path: Path, model_hub: LocalHub) -> Home:
    """A home of one's own in which the stand-in workers have built everything."""
    return stand_in_build.home.copy_to(tmp_path / "stand-in", model_hub.endpoint)
