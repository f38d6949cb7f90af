"""A LoRA adapter of a folder, as builds find it in the Hub's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensorize_assets.core import hub, hub_access, local_adapter
from tensorize_assets.core.catalog import Adapter
from tensorize_assets.core.errors import HubError
from tensorize_assets.core.hub_access import HubAccess

# Nobody is asked.
ENDPOINT = "http://127.0.0.1:9"


@pytest.fixture
def access(tmp_path: Path) -> HubAccess:
    return HubAccess(endpoint=ENDPOINT, cache_dir=tmp_path / "cache")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "my adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not taken")
    return folder


def test_it_is_found_as_one_of_the_hub_is(access: HubAccess, adapter: Path) -> None:
    """Later steps of a build know no other way, and no server is asked."""
    repo, commit = local_adapter.take(access, adapter)
    assert local_adapter.is_local(repo)
    name = repo.rpartition("/")[2]
    # What a catalog takes for an adapter.
    assert commit == Adapter(name=name, repo=repo, revision=commit).revision
    listing = local_adapter.resolve(access, repo, commit)
    snapshot, folder = hub.download(access, repo, listing)
    assert folder == hub.ensure_local(access, snapshot, adapter=True)
    assert {"adapter_config.json", "adapter_model.safetensors"} == {
        file.path for file in snapshot.files
    }
    assert b"weights" == (folder / "adapter_model.safetensors").read_bytes()


def test_its_commit_is_that_of_its_content(access: HubAccess, adapter: Path) -> None:
    """Changed weights are another build; the same ones are none."""
    first = local_adapter.take(access, adapter)
    assert first == local_adapter.take(access, adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"others")
    assert first[1] != local_adapter.take(access, adapter)[1]


def test_what_is_no_adapter_or_is_gone_is_refused(access: HubAccess, adapter: Path) -> None:
    """With what is missing, and what to do."""
    repo, commit = local_adapter.take(access, adapter)
    (hub_access.snapshot_dir(access, repo, commit) / "adapter_config.json").unlink()
    with pytest.raises(HubError, match="start `tensorize build --lora-path` anew"):
        local_adapter.resolve(access, repo, commit)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(HubError, match="is no LoRA adapter of PEFT"):
        local_adapter.take(access, adapter)


@pytest.mark.parametrize("text", ["x", "my adapter", "-a--b..c.", "..", "é" * 99])
def test_any_folder_gives_a_name_that_a_catalog_takes(text: str) -> None:
    """Names of folders are anything."""
    assert Adapter(name=local_adapter.name_of(text), repo="a/b").name
