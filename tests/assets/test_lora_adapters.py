"""lora_adapters: adapters from their repos to the store, by the real worker; it needs no vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chain_home import MODEL, NO_WORKER, Home, Run, flipped, stand_in

from tensorize_assets.core import build_keys, layout, sealing
from tensorize_assets.demo.hub_server import LocalHub, folder_files

SELECTION = ["hf_snapshot", "lora_adapters"]
SEALED = [*SELECTION, "tensorized_shards", "encrypted_shards", "artifact"]
POET = {"name": "poet", "repo": "org/poet", "revision": "main"}
CODER = {"name": "coder", "repo": "org/coder", "revision": "main"}


@pytest.fixture(scope="session")
def adapters(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters of tiny_adapters.py."""
    folder = tmp_path_factory.mktemp("tiny-adapters")
    script = Path(__file__).parents[1] / "worker" / "scripts" / "tiny_adapters.py"
    # In a process of its own: torch stays out of pytest's.
    command = [sys.executable, str(script), str(tiny_models), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture
def adapter_hub(model_hub: LocalHub, adapters: Path) -> LocalHub:
    """A Hub that holds the model and its adapters."""
    for folder in adapters.iterdir():
        model_hub.commit(f"org/{folder.name}", folder_files(folder))
    return model_hub


def with_adapters(home: Home, *names: Mapping[str, str], **fields: Any) -> Home:
    home.write_catalog({MODEL: {"v1": {"adapters": [dict(name) for name in names], **fields}}})
    return home


def directory(run: Run) -> str:
    return run.metadata("lora_adapters")["directory"]


def record(home: Home) -> dict[str, Any]:
    stored = home.store.get_bytes(layout.record_key("lora_adapters", MODEL, "v1"))
    return json.loads(stored.data)


def stored(home: Home) -> list[str]:
    return [key for key in home.store.list("vllm/") if not key.startswith(".")]


def by_path(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(files, key=lambda file: file["path"])


def matrix(folder: Path) -> bytes:
    """Some values of an adapter as its repo has them in the clear."""
    return (folder / "adapter_model.safetensors").read_bytes()[-256:]


def test_a_profile_without_adapters_has_nothing_to_do(home: Home) -> None:
    """It says so, and starts no worker."""
    run = home.run(selection=SELECTION, launcher=NO_WORKER)
    assert {} == run.failures
    said = run.metadata("lora_adapters")["adapters"]
    assert "not applicable: the profile lists none" == said
    assert record(home)["result"] is None


def test_an_adapter_lies_beside_the_model(home: Home, adapter_hub: LocalHub) -> None:
    """Under vLLM's names, with its own config; the UI shows what it is."""
    with_adapters(home, POET)
    run = home.run(selection=SELECTION)
    assert {} == run.failures
    folder = layout.artifact_dir(MODEL, "v1", run.build_id)
    files = [f"{folder}/adapter_config.json", f"{folder}/adapter_model.tensors"]
    assert files == stored(home)
    assert home.store.uri(folder) == directory(run)
    (row,) = (entry.data for entry in run.metadata("lora_adapters")["adapters"].records)
    assert ("poet", "org/poet", 8, 16) == (row["name"], row["repo"], row["rank"], row["tensors"])
    assert home.store.stat(files[1]) == row["bytes"]
    (entry,) = record(home)["result"]["adapters"]
    assert row["commit"] == entry["snapshot"]["commit"]
    assert ["adapter_config.json", "adapter_model.safetensors"] == [
        file["path"] for file in entry["snapshot"]["files"]
    ]
    assert () == home.store.list(".scratch")


def test_several_adapters_lie_in_folders_of_their_own(home: Home, adapter_hub: LocalHub) -> None:
    """Their files have the same names."""
    with_adapters(home, POET, CODER)
    run = home.run(selection=SELECTION)
    assert {} == run.failures
    folder = layout.artifact_dir(MODEL, "v1", run.build_id)
    assert [
        f"{folder}/adapters/{name}/{file}"
        for name in ("coder", "poet")
        for file in ("adapter_config.json", "adapter_model.tensors")
    ] == stored(home)
    rows = [entry.data for entry in run.metadata("lora_adapters")["adapters"].records]
    assert {("poet", 8), ("coder", 16)} == {(row["name"], row["rank"]) for row in rows}


def test_what_an_interrupted_run_left_whole_is_kept_and_what_is_damaged_is_not(
    home: Home, adapter_hub: LocalHub
) -> None:
    """Without a manifest there is only the record and the files' hashes to go by."""
    with_adapters(home, POET)
    first = home.run(selection=SELECTION)
    before = record(home)
    again = home.run(selection=SELECTION, launcher=NO_WORKER)
    assert {} == again.failures
    assert before == record(home)
    assert "the adapters of an earlier, interrupted run are whole: kept" in again.log
    path = home.artifact(first) / "adapter_model.tensors"
    whole = path.read_bytes()
    path.write_bytes(flipped(whole))
    assert {"lora_adapters"} == set(home.run(selection=SELECTION, launcher=NO_WORKER).failures)
    assert {} == home.run(selection=SELECTION).failures
    assert whole == path.read_bytes()


def test_another_commit_of_an_adapter_is_another_build(
    home: Home, adapter_hub: LocalHub, adapters: Path
) -> None:
    """The record of the build before is not taken for it."""
    with_adapters(home, POET)
    first = home.run(selection=SELECTION)
    files = folder_files(adapters / "poet") | {"README.md": b"better"}
    adapter_hub.commit("org/poet", files)
    second = home.run(selection=SELECTION)
    assert {} == second.failures
    assert first.build_id != second.build_id
    assert 4 == len(stored(home))


def test_a_pinned_profile_keeps_its_adapters_too(
    home: Home, adapter_hub: LocalHub, adapters: Path
) -> None:
    """Pinned is the build, of which an adapter is a part."""
    with_adapters(home, POET, track="pin")
    first = home.run(selection=["hf_snapshot"])
    files = folder_files(adapters / "poet") | {"README.md": b"better"}
    moved = adapter_hub.commit("org/poet", files)
    pinned = home.run(selection=["hf_snapshot"])
    assert first.build_id == pinned.build_id
    before = pinned.metadata("hf_snapshot")["adapter poet"]
    assert before == first.metadata("hf_snapshot")["adapter poet"]
    with_adapters(home, POET)
    after = home.run(selection=["hf_snapshot"]).metadata("hf_snapshot")["adapter poet"]
    assert after == f"{adapter_hub.endpoint}/org/poet/tree/{moved}" != before


def test_adapters_that_left_the_cache_come_again(home: Home, adapter_hub: LocalHub) -> None:
    """The step may run days later, or on another host."""
    with_adapters(home, POET)
    assert {} == home.run(selection=["hf_snapshot"]).failures
    shutil.rmtree(home.folder / "hub")
    run = home.run(selection=["lora_adapters"])
    assert {} == run.failures
    assert 2 == len(stored(home))


def test_an_adapter_that_vllm_refuses_fails_at_once_with_its_name(
    home: Home, adapter_hub: LocalHub
) -> None:
    """A retry would only delay the message; the other adapter is not written either."""
    with_adapters(home, POET, {**POET, "name": "dora", "repo": "org/dora"})
    run = home.run(selection=SELECTION)
    (said,) = run.failures.values()
    assert "adapter dora (org/dora@" in said
    assert "it was trained with DoRA (use_dora: True), which vLLM does not serve" in said
    assert [] == run.retried
    assert [] == stored(home)


def test_a_repo_that_is_no_adapter_fails_before_the_model_is_downloaded(
    home: Home, adapter_hub: LocalHub
) -> None:
    """The likeliest mistake costs a second, not the weights."""
    with_adapters(home, {**POET, "repo": MODEL})
    run = home.run(selection=SELECTION)
    assert "is no LoRA adapter of PEFT" in run.failures["hf_snapshot"]
    assert () == adapter_hub.requests_for("model.safetensors")


def test_a_complete_build_is_read_from_its_manifest(home: Home, adapter_hub: LocalHub) -> None:
    """Whatever became of the record, the files and the cache."""
    with_adapters(home, POET, CODER)
    assert {} == home.run(selection=SEALED, launcher=stand_in()).failures
    before = record(home)
    home.store.delete(layout.record_key("lora_adapters", MODEL, "v1"))
    shutil.rmtree(home.folder / "hub")
    run = home.run(selection=SELECTION, launcher=NO_WORKER)
    assert {} == run.failures
    after = record(home)
    assert before["result"]["adapters"] == after["result"]["adapters"]
    assert by_path(before["result"]["files"]) == by_path(after["result"]["files"])
    assert 2 == len(run.metadata("lora_adapters")["adapters"].records)


def encrypted_only(home: Home) -> sealing.PrivateKey:
    """Have the home's adapters encrypted, with this home the only recipient."""
    own = sealing.generate_private_key(home.folder / "keys" / "private.key")
    profile = {"adapters": [POET], "encryption": "only"}
    home.write_catalog({MODEL: {"v1": profile}}, recipients={"home": own.public_key})
    return own


def test_encrypted_only_means_that_no_plaintext_is_anywhere(
    home: Home, adapter_hub: LocalHub, adapters: Path
) -> None:
    """Nor the key: not in an event, a record or a file."""
    own = encrypted_only(home)
    run = home.run(selection=SELECTION)
    assert {} == run.failures
    assert run.metadata("lora_adapters")["encrypted"]
    folder = record(home)["directory"]
    assert folder.endswith("-encrypted")
    files = [f"{folder}/adapter_config.json", f"{folder}/adapter_model.tensors"]
    assert files == stored(home)
    values = matrix(adapters / "poet")
    root = home.store.root
    assert [] == [p for p in root.rglob("*") if p.is_file() and values in p.read_bytes()]
    (key_id,) = sealing.key_ids(home.store)
    with sealing.unseal(home.store, key_id, own, trusted=home.trusted) as data_key:
        key = data_key.reveal()
    shown = [line.encode() for line in run.log]
    shown += [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    assert [] == [text for text in shown if key in text or key.hex().encode() in text]
    again = home.run(selection=SELECTION, launcher=NO_WORKER)
    assert {} == again.failures


def test_a_config_that_is_not_its_manifests_gets_no_new_key(
    home: Home, adapter_hub: LocalHub
) -> None:
    """It is taken over in the clear; only the old manifest speaks for it."""
    own = encrypted_only(home)
    assert {} == home.run(selection=SEALED, launcher=stand_in()).failures
    folder = record(home)["directory"]
    key = f"{folder}/adapter_config.json"
    whole = home.store.get_bytes(key).data
    build = record(home)["build_id"]
    keys = build_keys.read_keys(home.store, MODEL, "v1", build, home.trusted)
    assert keys is not None
    made = sealing.new_data_key(home.store, {"home": own.public_key}, home.key)
    build_keys.rotate(home.store, keys, made.key_id, home.key)
    home.store.put_bytes(key, whole.replace(b"8", b"9"))
    run = home.run(selection=SELECTION, launcher=stand_in())
    assert f"{key} is gone or is not what its manifest says" in run.failures["lora_adapters"]
    home.store.put_bytes(key, whole)
    run = home.run(selection=SELECTION, launcher=stand_in())
    assert {} == run.failures
    assert folder == run.metadata("lora_adapters")["encrypted_anew_from"]
    assert folder != record(home)["directory"]
    assert whole == home.store.get_bytes(f"{record(home)['directory']}/adapter_config.json").data


def test_adapters_go_to_s3(s3_home: Home, adapter_hub: LocalHub) -> None:
    """By the real worker, with the keys that the launcher hands it."""
    with_adapters(s3_home, POET, CODER)
    run = s3_home.run(selection=SELECTION)
    assert {} == run.failures
    assert 4 == len(stored(s3_home))
