"""One build, in the clear and encrypted, with adapters: sealed, reloaded and published together."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chain_home import MODEL, NO_WORKER, PROFILE, Home, Run, stand_in, weights

from tensorize_assets.assets.target import ONESHOT_TAG, Oneshot
from tensorize_assets.core import compare, layout, sealing
from tensorize_assets.core.catalog import Profile
from tensorize_assets.core.evidence import read_evidence
from tensorize_assets.core.manifest import StoredManifest, read_manifest
from tensorize_assets.core.verify import verify_directory
from tensorize_assets.demo.hub_server import LocalHub

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
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": MODEL, "r": 8, "target_modules": ["q"]}


@pytest.fixture
def adapter_hub(model_hub: LocalHub) -> LocalHub:
    """The model's Hub, with adapters of it; the stand-in workers do not read their tensors."""
    for name in ("pirate", "poet", "idle"):
        files: dict[str, bytes | Path] = {
            "adapter_config.json": json.dumps(CONFIG | {"name": name}).encode(),
            "adapter_model.safetensors": weights(name.encode()),
        }
        model_hub.commit(f"tiny/{name}", files)
    return model_hub


def with_profile(home: Home, *adapters: str, **fields: object) -> Home:
    """The home, its catalog with these adapters, and itself the one recipient of data keys."""
    key = home.folder / "keys" / "private.key"
    own = sealing.load_private_key(key) if key.exists() else sealing.generate_private_key(key)
    listed = [{"name": name, "repo": f"tiny/{name}", "revision": "main"} for name in adapters]
    profile: dict[str, object] = {"adapters": listed, **fields}
    home.write_catalog({MODEL: {"v1": profile}}, recipients={"home": own.public_key})
    return home


def manifests(home: Home) -> dict[str, StoredManifest]:
    """Every complete directory of the model, by its key."""
    ending = f"/{layout.MANIFEST}"
    places = [key.removesuffix(ending) for key in home.store.list("vllm/") if key.endswith(ending)]
    found = {place: read_manifest(home.store, place, home.trusted) for place in places}
    return {place: stored for place, stored in found.items() if stored}


def both(home: Home) -> tuple[StoredManifest, StoredManifest]:
    """The plaintext and the encrypted manifest."""
    one, other = sorted(manifests(home).values(), key=lambda each: bool(each.manifest.encryption))
    return one, other


def evidence_of(home: Home, stored: StoredManifest) -> Any:
    version = stored.manifest.inputs.vllm
    return read_evidence(home.store, stored.sha256, "cpu", version, home.trusted)


def published_alone(home: Home) -> Run:
    return home.run(selection=["published"], launcher=NO_WORKER)


def test_both_variants_are_sealed_reloaded_and_published_in_one_entry(
    home: Home, adapter_hub: LocalHub
) -> None:
    """Who has the key and who has none are served the same build, of vLLM's own ranks here."""
    with_profile(home, "pirate", "poet", encryption="both", sharding="executor")
    run = home.run(launcher=stand_in())
    assert {} == run.failures
    assert CHAIN == run.materialized
    assert dict.fromkeys(compare.CHECKS, True) == run.checks
    plain, secret = both(home)
    assert run.build_id == plain.manifest.build_id != secret.manifest.build_id
    assert secret.manifest.encryption is not None
    assert plain.sha256 == secret.manifest.encryption.plaintext
    assert plain.manifest.inputs == secret.manifest.inputs.model_copy(update={"data_key": None})
    assert "executor" == plain.manifest.sharding == secret.manifest.sharding
    for place in manifests(home):
        assert () == verify_directory(home.store, place, home.trusted).problems
    (entry,) = home.channel()
    assert entry.encrypted is not None
    assert (plain.manifest.build_id, plain.sha256) == (entry.build_id, entry.manifest_sha256)
    assert secret.sha256 == entry.encrypted.manifest_sha256
    assert evidence_of(home, plain).passed
    assert evidence_of(home, secret).passed


def test_no_event_and_no_log_shows_the_data_key(home: Home, adapter_hub: LocalHub) -> None:
    """Dagster keeps both for good, and shows them to everybody."""
    with_profile(home, "pirate", encryption="both")
    run = home.run(launcher=stand_in())
    (_, secret) = both(home)
    assert secret.manifest.encryption is not None
    private = sealing.load_private_key(home.folder / "keys" / "private.key")
    key_id = secret.manifest.encryption.key_id
    with sealing.unseal(home.store, key_id, private, trusted=home.trusted) as data_key:
        key = data_key.reveal()
    text = "\n".join([*run.log, *(repr(event) for event in run.result.all_events)])
    assert key_id in text
    for shown in (key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1]):
        assert shown not in text


def test_the_encrypted_directory_has_everything_but_plaintext_tensors(
    home: Home, adapter_hub: LocalHub
) -> None:
    """It is served by itself: config, tokenizer and the adapters' configs lie in it too."""
    with_profile(home, "pirate", "poet", encryption="both")
    home.run(launcher=stand_in())
    plain, secret = both(home)
    files = {file.path: file.sha256 for file in plain.manifest.files}
    hidden = {file.path: file.sha256 for file in secret.manifest.files}
    assert files.keys() == hidden.keys()
    assert set(plain.manifest.tensor_files) == {
        path for path in files if files[path] != hidden[path]
    }
    assert 3 == len(plain.manifest.tensor_files)
    assert ["pirate", "poet"] == [adapter.name for adapter in secret.manifest.adapters]


def test_a_finished_pair_does_nothing_again(home: Home, adapter_hub: LocalHub) -> None:
    """No worker, no second entry, the same files."""
    with_profile(home, "pirate", encryption="both")
    home.run(launcher=stand_in())
    before = home.store.list("")
    run = home.run(launcher=NO_WORKER)
    assert {} == run.failures
    assert before == home.store.list("")
    assert ["plaintext", "encrypted"] == [
        line.partition(" ")[0] for line in run.log if "stands: not loaded again" in line
    ]


def test_with_only_there_is_no_plaintext_anywhere(home: Home, adapter_hub: LocalHub) -> None:
    """Not in its directory, not in scratch; and the channel names the encrypted build."""
    with_profile(home, "pirate", encryption="only")
    run = home.run(launcher=stand_in())
    assert {} == run.failures
    ((place, stored),) = manifests(home).items()
    assert stored.manifest.encryption is not None
    assert stored.manifest.encryption.plaintext is None
    assert place.endswith("-encrypted")
    assert all(key.startswith(place) for key in home.store.list("vllm/") if "/v1-" in key)
    content = home.store.get_bytes(f"{place}/model.tensors").data
    assert b"one tensor" not in content
    (entry,) = home.channel()
    assert (stored.manifest.build_id, None) == (entry.build_id, entry.encrypted)
    assert run.build_id != entry.build_id
    assert () == verify_directory(home.store, place, home.trusted).problems


def test_one_weak_variant_fails_the_check_and_is_named(
    home: Home, adapter_hub: LocalHub, tmp_path: Path
) -> None:
    """The plaintext variant has nothing to show for it, and must not cover it."""
    with_profile(home, encryption="both")
    (tmp_path / "weak").touch()
    run = home.run(launcher=stand_in(tmp_path))
    failing = {name for name, passed in run.checks.items() if not passed}
    assert {"encryption_holds"} == failing
    said = run.check_descriptions["encryption_holds"]
    assert said.startswith("plaintext: not applicable: ")
    assert "; encrypted: no key: it loaded; " in said
    assert "tag: it loaded" in said
    assert () == home.channel()
    plain, secret = both(home)
    assert evidence_of(home, plain).passed
    assert not evidence_of(home, secret).passed
    alone = published_alone(home)
    assert f"build {secret.manifest.build_id}: its last reload" in alone.failures["published"]
    assert () == home.channel()


@pytest.mark.parametrize("which", [0, 1], ids=["plaintext", "encrypted"])
def test_evidence_of_one_variant_does_not_speak_for_the_other(
    home: Home, adapter_hub: LocalHub, which: int
) -> None:
    """Each is another file that somebody loads."""
    with_profile(home, encryption="both")
    home.run(launcher=stand_in(), selection=sorted(CHAIN - {"published"}))
    lost = both(home)[which]
    for key in home.store.list(layout.evidence_folder(lost.sha256)):
        home.store.delete(key)
    alone = published_alone(home)
    assert f"build {lost.manifest.build_id}: no evidence" in alone.failures["published"]
    assert () == home.channel()


def test_an_adapter_that_changes_nothing_is_not_published(
    home: Home, adapter_hub: LocalHub
) -> None:
    """It equals its source in every digit."""
    with_profile(home, "pirate", "idle")
    run = home.run(launcher=stand_in())
    failing = {name for name, passed in run.checks.items() if not passed}
    assert {"adapters_change_answers"} == failing
    assert run.check_descriptions["adapters_change_answers"].startswith("idle: the answers are the")
    assert () == home.channel()


def test_a_lost_manifest_of_the_encrypted_variant_is_written_again(
    home: Home, adapter_hub: LocalHub
) -> None:
    """To the same bytes, and without a worker."""
    with_profile(home, "pirate", encryption="both")
    home.run(launcher=stand_in())
    key = next(key for key in home.store.list("vllm/") if key.endswith("-encrypted/manifest.json"))
    before = home.store.get_bytes(key).data
    home.store.delete(key)
    run = home.run(launcher=NO_WORKER)
    assert {} == run.failures
    assert before == home.store.get_bytes(key).data


def test_its_small_files_are_not_downloaded_again(home: Home, adapter_hub: LocalHub) -> None:
    """The encrypted variant takes them from the plaintext one, which may be years older."""
    with_profile(home)
    home.run(launcher=stand_in())
    before = adapter_hub.requests_for("resolve")
    shutil.rmtree(home.folder / "hub")
    with_profile(home, encryption="both")
    run = home.run(launcher=stand_in())
    assert {} == run.failures
    assert 2 == len(manifests(home))
    assert before == adapter_hub.requests_for("resolve")


def references(home: Home) -> Sequence[str]:
    return home.store.list("references/")


def test_references_are_of_the_adapters_too(home: Home, adapter_hub: LocalHub) -> None:
    """Those of a profile without keep their key; another adapter, or commit of one, is another."""
    chosen = ["hf_snapshot", "reference_outputs"]
    with_profile(home)
    assert home.run(launcher=stand_in(), selection=chosen).success
    (plain,) = references(home)
    prompts = json.loads(home.store.get_bytes(plain).data)["answers"]["outputs"]
    digest = compare.prompts_digest(tuple(output["prompt"] for output in prompts))
    assert plain.endswith(f"-{digest}.json")
    with_profile(home, encryption="both")
    assert home.run(launcher=NO_WORKER, selection=chosen).success
    with_profile(home, "pirate")
    assert home.run(launcher=stand_in(), selection=chosen).success
    with_profile(home, "poet")
    assert home.run(launcher=stand_in(), selection=chosen).success
    assert 3 == len(references(home))


@pytest.mark.parametrize(
    ("adapters", "file"),
    [
        (("pirate",), "adapter_config.json"),
        (("pirate", "poet"), "adapters/poet/adapter_config.json"),
    ],
)
def test_a_repo_with_files_where_ours_go_is_refused(
    home: Home,
    adapter_hub: LocalHub,
    first_files: dict[str, bytes | Path],
    adapters: tuple[str, ...],
    file: str,
) -> None:
    """Whichever were written last would be taken for the other."""
    companion = json.dumps({"r": 1}).encode()
    adapter_hub.commit(MODEL, {**first_files, file: companion})
    with_profile(home, *adapters)
    run = home.run(launcher=stand_in())
    assert (
        f"brings files of its own where those of this build go ({file})"
        in (run.failures["artifact"])
    )
    assert {} == manifests(home)


def test_a_oneshot_with_a_keyfile_is_encrypted_where_a_plain_one_would_lie(
    home: Home, adapter_hub: LocalHub
) -> None:
    """As vLLM's own script has it; whoever asked for the key opens it, catalog or not."""
    own = sealing.generate_private_key(home.folder / "keys" / "private.key")
    profile = Profile(**{**PROFILE, "encryption": "only"})
    tag = Oneshot(suffix="mine", profile=profile, keyfile=True).model_dump_json()
    run = home.run(suffix="adhoc", tags={ONESHOT_TAG: tag}, launcher=stand_in())
    assert {} == run.failures
    ((place, stored),) = manifests(home).items()
    assert layout.oneshot_dir(MODEL, "mine") == place
    assert stored.manifest.encryption is not None
    key_id = stored.manifest.encryption.key_id
    assert key_id == run.metadata("hf_snapshot")["data_key"]
    assert {"this-home": own.public_key} == sealing.recipients_of(home.store, key_id, None)
    assert () == verify_directory(home.store, place, home.trusted).problems
    again = home.run(suffix="adhoc", tags={ONESHOT_TAG: tag}, launcher=NO_WORKER)
    assert {} == again.failures
    assert run.build_id == again.build_id
    other = Oneshot(suffix="mine", profile=Profile(**PROFILE)).model_dump_json()
    plain = home.run(suffix="adhoc", tags={ONESHOT_TAG: other}, launcher=NO_WORKER)
    assert "a directory is written once" in plain.failures["hf_snapshot"]
