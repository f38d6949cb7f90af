"""Moving a channel: what stands in the store decides, and every bad state is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tensorize_assets.core import build_keys, channel, layout, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import base_id, build_id
from tensorize_assets.core.channel import ChannelEntry, EncryptedVariant
from tensorize_assets.core.errors import (
    BuildMismatchError,
    EvidenceError,
    HistoryError,
    ManifestError,
    SignatureError,
    StoreError,
    TensorizeAssetsError,
)
from tensorize_assets.core.evidence import CheckOutcome, Evidence, LoadFigures, write_evidence
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest
from tensorize_assets.core.publish import publish, roll_back
from tensorize_assets.core.store import StoredObject

KEY = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(range(1, 33)))
TRUSTED = {KEY.public_key}
GOLDEN = manifests.decode(
    (Path(__file__).parent / "golden" / "manifest.json").read_bytes(), TRUSTED
)
SUFFIX = GOLDEN.suffix
CONTENT = {name: name.encode() * 100 for name in ("config.json", "model-rank-000.tensors")} | {
    "model-rank-001.tensors": b"rank 1"
}
TOKENS = CheckOutcome(name="token_ids_equal", passed=True, description="4 answers equal")


class Build(NamedTuple):
    """A complete build in a store."""

    id: str
    directory: str
    manifest_sha256: str


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def seal(
    store: LocalStore, commit: str = "a", *, vllm: str = "0.31.0", data_key: str | None = None
) -> Build:
    """A build of the commit named by one letter, without evidence."""
    fields = {"commit": commit * 40, "vllm": vllm, "data_key": data_key}
    inputs = GOLDEN.inputs.model_copy(update=fields)
    files = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in CONTENT.items()
    ]
    manifest = Manifest.model_validate(
        {
            **GOLDEN.model_dump(),
            "inputs": inputs.model_dump(),
            "build_id": build_id(inputs),
            "snapshot": {**GOLDEN.snapshot.model_dump(), "commit": inputs.commit},
            "files": files,
            "encryption": data_key and {"key_id": data_key},
        }
    )
    folder = layout.encrypted_dir if data_key else layout.artifact_dir
    directory = folder(manifest.model, SUFFIX, manifest.build_id)
    for path, data in CONTENT.items():
        store.put_bytes(layout.file_key(directory, path), data)
    data = manifests.encode(manifest, KEY)
    store.put_bytes(layout.manifest_key(directory), data)
    return Build(manifest.build_id, directory, manifests.manifest_sha256(data))


def evidence(build: Build, **fields: Any) -> Evidence:
    """A reload of the build on a CPU that passed."""
    return Evidence.model_validate(
        {
            "model": GOLDEN.model,
            "suffix": SUFFIX,
            "build_id": build.id,
            "manifest_sha256": build.manifest_sha256,
            "device": "cpu",
            "device_name": "CPU",
            "vllm_version": "0.31.0",
            "tensor_parallel_size": 2,
            "dtype": "bfloat16",
            "passed": True,
            "checks": (TOKENS,),
            "perplexity": 12.5,
            "load": LoadFigures(
                bytes=1, seconds=1, bytes_per_second=1, host_memory_before=1, host_memory_after=1
            ),
            "default_load_seconds": 1.0,
            "prompts_digest": "ff00",
            "when": datetime(2025, 11, 29, 15, 0, tzinfo=UTC),
            **fields,
        }
    )


def build(
    store: LocalStore, commit: str = "a", *, vllm: str = "0.31.0", data_key: str | None = None
) -> Build:
    """A build of a commit, with evidence that passed."""
    made = seal(store, commit, vllm=vllm, data_key=data_key)
    write_evidence(store, KEY, evidence(made, vllm_version=vllm))
    return made


def published(store: LocalStore, made: Build, **fields: Any) -> ChannelEntry:
    arguments: dict[str, Any] = {
        "model": GOLDEN.model,
        "suffix": SUFFIX,
        "build_id": made.id,
        "directory": made.directory,
        "device": "cpu",
        **fields,
    }
    return publish(store, KEY, TRUSTED, **arguments)


def rolled_back(store: LocalStore, to: Build | None = None) -> ChannelEntry:
    target = to.id if to else None
    return roll_back(store, KEY, TRUSTED, model=GOLDEN.model, suffix=SUFFIX, to_build_id=target)


def history(store: LocalStore) -> list[tuple[str, str]]:
    """The letter of each entry's commit, and its reason."""
    found = channel.read_channel(store, GOLDEN.model, SUFFIX, TRUSTED)
    entries = found.channel.entries if found else ()
    return [(entry.commit[0], entry.reason) for entry in entries]


def test_a_build_with_evidence_is_published(store: LocalStore) -> None:
    """The entry says what was published and on which proof."""
    made = build(store)
    entry = published(store, made)
    assert (1, "publish", "cpu", "0.31.0") == (
        entry.number,
        entry.reason,
        entry.device,
        entry.vllm_version,
    )
    assert (made.id, made.directory, made.manifest_sha256) == (
        entry.build_id,
        entry.directory,
        entry.manifest_sha256,
    )
    assert store.stat(entry.evidence_key)


def test_publishing_again_moves_nothing(store: LocalStore) -> None:
    """A daily schedule must not fill the history."""
    made = build(store)
    assert published(store, made) == published(store, made)
    assert [("a", "publish")] == history(store)


# Bad states


def no_manifest(store: LocalStore, made: Build) -> None:
    store.delete(layout.manifest_key(made.directory))


def unsigned_manifest(store: LocalStore, made: Build) -> None:
    store.put_bytes(layout.manifest_key(made.directory), b'{"format":1}\n')


def strangers_manifest(store: LocalStore, made: Build) -> None:
    stored = manifests.read_manifest(store, made.directory, TRUSTED)
    assert stored
    data = manifests.encode(stored.manifest, STRANGER)
    store.put_bytes(layout.manifest_key(made.directory), data)


def changed_manifest(store: LocalStore, made: Build) -> None:
    stored = manifests.read_manifest(store, made.directory, TRUSTED)
    assert stored
    # Signed by us, and not the one that was reloaded.
    other = stored.manifest.model_copy(update={"profile": {"revision": "other"}})
    store.put_bytes(layout.manifest_key(made.directory), manifests.encode(other, KEY))


def another_builds_manifest(store: LocalStore, made: Build) -> None:
    other = build(store, "b")
    found = store.get_bytes(layout.manifest_key(other.directory))
    assert found
    store.put_bytes(layout.manifest_key(made.directory), found.data)


def missing_shard(store: LocalStore, made: Build) -> None:
    store.delete(layout.file_key(made.directory, "model-rank-001.tensors"))


def short_shard(store: LocalStore, made: Build) -> None:
    store.put_bytes(layout.file_key(made.directory, "model-rank-001.tensors"), b"rank")


def no_evidence(store: LocalStore, made: Build) -> None:
    store.delete(layout.evidence_key(made.manifest_sha256, "cpu", "0.31.0"))


def failed_evidence(store: LocalStore, made: Build) -> None:
    wrong = TOKENS.model_copy(update={"passed": False, "description": "1 of 4 answers differ"})
    write_evidence(store, KEY, evidence(made, passed=False, checks=(wrong,)))


def strangers_evidence(store: LocalStore, made: Build) -> None:
    write_evidence(store, STRANGER, evidence(made))


def evidence_of_another_vllm(store: LocalStore, made: Build) -> None:
    no_evidence(store, made)
    write_evidence(store, KEY, evidence(made, vllm_version="0.32.0"))


def evidence_on_another_device(store: LocalStore, made: Build) -> None:
    no_evidence(store, made)
    write_evidence(store, KEY, evidence(made, device="cuda"))


def evidence_of_another_build(store: LocalStore, made: Build) -> None:
    """A passed reload put where this build's own evidence belongs."""
    other = build(store, "b")
    found = store.get_bytes(layout.evidence_key(other.manifest_sha256, "cpu", "0.31.0"))
    assert found
    place = layout.evidence_key(made.manifest_sha256, "cpu", "0.31.0")
    store.put_bytes(place, found.data)


Damage = Callable[[LocalStore, Build], None]
BAD_STATES: list[tuple[Damage, type[TensorizeAssetsError], str]] = [
    (no_manifest, ManifestError, "has no manifest: it is not a finished build"),
    (unsigned_manifest, SignatureError, "is not signed"),
    (strangers_manifest, SignatureError, "not trusted"),
    (changed_manifest, EvidenceError, "no evidence of a reload on cpu"),
    (another_builds_manifest, ManifestError, "was moved or put back"),
    (missing_shard, ManifestError, "model-rank-001.tensors is gone"),
    (short_shard, ManifestError, "has 4 bytes, its manifest says 6"),
    (no_evidence, EvidenceError, "no evidence of a reload on cpu with vLLM 0.31.0"),
    (failed_evidence, EvidenceError, "token_ids_equal (1 of 4 answers differ). Mend the cause"),
    (strangers_evidence, SignatureError, "not trusted"),
    (evidence_of_another_vllm, EvidenceError, "no evidence of a reload on cpu with vLLM 0.31.0"),
    (evidence_on_another_device, EvidenceError, "no evidence of a reload on cpu"),
    (evidence_of_another_build, EvidenceError, "is the evidence of another reload"),
]


@pytest.mark.parametrize(
    ("damage", "error", "said"), BAD_STATES, ids=[damage.__name__ for damage, _, _ in BAD_STATES]
)
def test_a_bad_state_is_refused(
    store: LocalStore, damage: Damage, error: type[TensorizeAssetsError], said: str
) -> None:
    """Whatever Dagster believes: the channel stays where it is."""
    before = build(store, "c")
    published(store, before)
    made = build(store)
    damage(store, made)
    with pytest.raises(error) as caught:
        published(store, made)
    assert said in str(caught.value)
    assert [("c", "publish")] == history(store)


ROLLBACK_STATES = [
    (changed_manifest, ManifestError, "another manifest than the one that was published"),
    *(state for state in BAD_STATES if state[0] is not changed_manifest),
]


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    ROLLBACK_STATES,
    ids=[damage.__name__ for damage, _, _ in ROLLBACK_STATES],
)
def test_a_rollback_refuses_the_same(
    store: LocalStore, damage: Damage, error: type[TensorizeAssetsError], said: str
) -> None:
    """An old build may have lost its files; a rollback at night must not serve the gap."""
    made = build(store)
    published(store, made)
    published(store, build(store, "d"))
    damage(store, made)
    with pytest.raises(error) as caught:
        rolled_back(store)
    assert said in str(caught.value)
    assert [("a", "publish"), ("d", "publish")] == history(store)


def test_a_build_under_another_name_is_refused(store: LocalStore) -> None:
    """A record may name a build that the directory does not hold."""
    made = build(store)
    with pytest.raises(ManifestError, match="not 000000000000; materialize this partition"):
        published(store, made._replace(id="0" * 12))
    assert [] == history(store)


def test_a_strangers_channel_is_not_moved(store: LocalStore) -> None:
    """Appending would sign a history that we never wrote."""
    made = build(store)
    channel.append(
        store,
        STRANGER,
        GOLDEN.model,
        SUFFIX,
        build_id=made.id,
        directory=made.directory,
        manifest_sha256=made.manifest_sha256,
        commit="a" * 40,
        vllm_version="0.31.0",
        device="cpu",
        trusted=None,
    )
    with pytest.raises(SignatureError, match="not trusted"):
        published(store, made)


# Rollbacks


def test_a_build_that_was_rolled_back_stays_out(store: LocalStore) -> None:
    """What a person did is not undone by the next run; the entry returned is the rollback's."""
    first, second = build(store, "a"), build(store, "b")
    published(store, first)
    published(store, second)
    assert first.id == rolled_back(store).build_id
    held = published(store, second)
    assert (3, first.id, "rollback") == (held.number, held.build_id, held.reason)
    assert [("a", "publish"), ("b", "publish"), ("a", "rollback")] == history(store)


def test_a_person_can_publish_it_again(store: LocalStore) -> None:
    """Once the reason is gone, on purpose."""
    first, second = build(store, "a"), build(store, "b")
    published(store, first)
    published(store, second)
    rolled_back(store)
    entry = published(store, second, republish=True)
    assert (4, second.id, "publish") == (entry.number, entry.build_id, entry.reason)


def test_a_new_build_is_published_after_a_rollback(store: LocalStore) -> None:
    """The fix for what was rolled back must get out; and then the old one is a build as any."""
    first, second, third = (build(store, letter) for letter in "abc")
    published(store, first)
    published(store, second)
    rolled_back(store)
    assert third.id == published(store, third).build_id
    assert second.id == published(store, second).build_id
    assert "abacb" == "".join(letter for letter, _ in history(store))


def test_everything_since_the_build_gone_back_to_is_held(store: LocalStore) -> None:
    """Rolled back past two builds, neither comes back by itself."""
    builds = [build(store, letter) for letter in "abc"]
    for made in builds:
        published(store, made)
    rolled_back(store, builds[0])
    assert [builds[0].id] * 3 == [published(store, made).build_id for made in builds]


def test_a_build_superseded_before_is_not_held(store: LocalStore) -> None:
    """The branch went back further than the rollback did: that commit is asked for, and known."""
    builds = [build(store, letter) for letter in "abc"]
    for made in builds:
        published(store, made)
    rolled_back(store, builds[1])
    assert builds[1].id == published(store, builds[2]).build_id
    assert builds[0].id == published(store, builds[0]).build_id
    assert "abcba" == "".join(letter for letter, _ in history(store))


def test_a_rollback_for_one_vllm_holds_nothing_of_another(store: LocalStore) -> None:
    """Each vLLM version has its own current build."""
    first, second = build(store, "a"), build(store, "b")
    newer = build(store, "a", vllm="0.32.0")
    for made in (first, second, newer):
        published(store, made)
    rolled_back(store, first)
    assert first.id == published(store, second).build_id
    later = build(store, "b", vllm="0.32.0")
    assert later.id == published(store, later).build_id


def test_a_rollback_to_nothing_is_refused(store: LocalStore) -> None:
    """There must be an earlier build, and it must be one of this channel's."""
    with pytest.raises(StoreError, match="nothing was published to roll back to"):
        rolled_back(store)
    made = build(store)
    published(store, made)
    with pytest.raises(StoreError, match="no earlier build"):
        rolled_back(store)
    with pytest.raises(StoreError, match="was never published"):
        rolled_back(store, build(store, "b"))
    with pytest.raises(StoreError, match="is current already"):
        rolled_back(store, made)
    assert [("a", "publish")] == history(store)


# Data keys that were changed


OLD_KEY, NEW_KEY = "1" * 16, "2" * 16
BASE = base_id(GOLDEN.inputs.model_copy(update={"commit": "a" * 40}))


def assign(store: LocalStore, seen: Path | None = None) -> None:
    build_keys.assign(store, GOLDEN.model, SUFFIX, BASE, lambda: OLD_KEY, KEY, TRUSTED, seen)


def rotate(store: LocalStore, seen: Path | None = None) -> None:
    stored = build_keys.read_keys(store, GOLDEN.model, SUFFIX, BASE, TRUSTED, seen)
    assert stored
    build_keys.rotate(store, stored, NEW_KEY, KEY, seen)


def by_itself(store: LocalStore, key_id: str) -> tuple[Build, dict[str, Any]]:
    """With `encryption: only`."""
    return build(store, data_key=key_id), {}


def beside_plaintext(store: LocalStore, key_id: str) -> tuple[Build, dict[str, Any]]:
    """With `encryption: both`."""
    other = build(store, data_key=key_id)
    encrypted = EncryptedVariant(
        build_id=other.id, directory=other.directory, manifest_sha256=other.manifest_sha256
    )
    return build(store), {"encrypted": encrypted}


Variant = Callable[[LocalStore, str], tuple[Build, dict[str, Any]]]
VARIANTS = pytest.mark.parametrize("variant", [by_itself, beside_plaintext])


@VARIANTS
def test_a_build_whose_key_was_changed_is_refused(store: LocalStore, variant: Variant) -> None:
    """A run that was under way meanwhile would bring the old key back, also as the first entry."""
    assign(store)
    old, its_old = variant(store, OLD_KEY)
    rotate(store)
    said = f"{OLD_KEY}, and {NEW_KEY} has taken its place meanwhile; materialize this partition"
    for republish in (False, True):
        with pytest.raises(BuildMismatchError, match=said):
            published(store, old, **its_old, republish=republish)
    assert [] == history(store)
    new, its_new = variant(store, NEW_KEY)
    assert new.id == published(store, new, **its_new).build_id


@dataclass(frozen=True)
class SlowStore(LocalStore):
    """A store in which others act when the channel was read, and before it is moved."""

    meanwhile: list[Callable[[], object]]

    def get_bytes(self, key: str) -> StoredObject | None:
        if key == layout.build_key_key(GOLDEN.model, SUFFIX, BASE):
            found = super().get_bytes(key)
            if self.meanwhile:
                self.meanwhile.pop()()
            return found
        return super().get_bytes(key)


@pytest.mark.fault("Race", "publish while the data key is rotated", "refused; the new build stays")
@VARIANTS
def test_a_key_that_is_changed_between_the_look_and_the_move_is_seen(
    store: LocalStore, variant: Variant
) -> None:
    """Another run has published the new one by then: the channel is read again, and the key."""
    assign(store)
    old, its_old = variant(store, OLD_KEY)
    published(store, build(store, "b"))

    def others() -> None:
        rotate(store)
        new, its_new = variant(store, NEW_KEY)
        published(store, new, **its_new)

    with pytest.raises(BuildMismatchError, match="has taken its place"):
        published(SlowStore(store.root, [others]), old, **its_old)
    assert [("b", "publish"), ("a", "publish")] == history(store)
    assert NEW_KEY == current_data_key(store)


def current_data_key(store: LocalStore) -> str | None:
    found = channel.read_channel(store, GOLDEN.model, SUFFIX, TRUSTED)
    assert found
    *_, (_, directory, _) = found.channel.current.manifests()
    stored = manifests.read_manifest(store, directory, TRUSTED)
    return stored and stored.manifest.inputs.data_key


def test_a_key_that_was_put_back_publishes_nothing(store: LocalStore, tmp_path: Path) -> None:
    """Whoever can write to the store would otherwise have the old build published by this run."""
    seen, place = tmp_path / "seen", layout.build_key_key(GOLDEN.model, SUFFIX, BASE)
    assign(store, seen)
    before = store.get_bytes(place)
    assert before
    old, _ = by_itself(store, OLD_KEY)
    rotate(store, seen)
    for attack in (lambda: store.put_bytes(place, before.data), lambda: store.delete(place)):
        attack()
        with pytest.raises(HistoryError, match="entry 2 was seen here"):
            published(store, old, seen=seen)
    assert [] == history(store)


def test_a_rollback_to_the_build_of_an_old_key_is_let(store: LocalStore) -> None:
    """A person may need what was served before, whatever the reason for the new key."""
    assign(store)
    old, _ = by_itself(store, OLD_KEY)
    published(store, old)
    rotate(store)
    published(store, by_itself(store, NEW_KEY)[0])
    assert old.id == rolled_back(store).build_id
    assert OLD_KEY == current_data_key(store)


def test_an_encrypted_build_without_a_history_of_keys_is_published(store: LocalStore) -> None:
    """A copy in another root has none."""
    made, _ = by_itself(store, OLD_KEY)
    assert made.id == published(store, made).build_id
