"""What somebody who can write to the store, but has no trusted key, can do: nothing unnoticed.

Each attack is tried on a store that is otherwise whole. What tensorizer itself notices of a changed
encrypted file is in tests/worker/test_encrypt_shard.py: it sees chunks that were exchanged, but
not tensors that were exchanged with their nonces and MACs, a tensor less, or a shard of another
build. The hash of the whole file, which the signed manifest holds, sees all of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from nacl.secret import SecretBox

from tensorize_assets.core import build_keys, channel, jsonio, layout, provenance, sealing, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.build import build_id
from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.copy import copy_build
from tensorize_assets.core.errors import (
    EvidenceError,
    HistoryError,
    ManifestError,
    SignatureError,
    StoreError,
    TensorizeAssetsError,
)
from tensorize_assets.core.evidence import Evidence, write_evidence
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import FileEntry, Manifest, StoredManifest
from tensorize_assets.core.publish import publish, roll_back
from tensorize_assets.core.verify import verify_directory, verify_folder

KEY = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(range(1, 33)))
TRUSTED = {KEY.public_key}
GOLDEN = manifests.decode(
    (Path(__file__).parent / "golden" / "manifest.json").read_bytes(), TRUSTED
)
SHARD, OTHER_SHARD = "model-rank-000.tensors", "model-rank-001.tensors"
DATA_KEY = bytes(range(100, 132))
CHUNK = 2 * 1024 * 1024
# A MAC and a chunk's ciphertext, as they would have to lie together to be moved together.
SEALED = 16 + CHUNK
HEADER = 1000


@dataclass(frozen=True)
class Build:
    """A complete, encrypted build of two ranks, with evidence and provenance."""

    store: LocalStore
    manifest: Manifest
    directory: str
    sha256: str

    @property
    def folder(self) -> Path:
        return self.store.root / self.directory

    def file(self, name: str) -> Path:
        return self.folder / name


@dataclass(frozen=True)
class Home:
    """A store with an old and a newer build, both published, and what this home has seen."""

    store: LocalStore
    seen: Path
    old: Build
    new: Build

    def publish(self, made: Build) -> ChannelEntry:
        return publish(
            self.store,
            KEY,
            TRUSTED,
            model=GOLDEN.model,
            suffix=GOLDEN.suffix,
            build_id=made.manifest.build_id,
            directory=made.directory,
            device="cpu",
            seen=self.seen,
        )

    def roll_back(self) -> ChannelEntry:
        return roll_back(
            self.store, KEY, TRUSTED, model=GOLDEN.model, suffix=GOLDEN.suffix, seen=self.seen
        )

    def copy(self, made: Build) -> object:
        target = LocalStore(self.seen.parent / "copy")
        return copy_build(self.store, made.directory, target, TRUSTED, lambda _: None)

    @property
    def channel(self) -> Path:
        return self.store.root / layout.channel_key(GOLDEN.model, GOLDEN.suffix)


def sealed_shard(commit: str, rank: int) -> bytes:
    """A header and two tensors of two chunks each, sealed as tensorizer seals them."""
    box = SecretBox(DATA_KEY)
    chunks: list[bytes] = []
    for tensor in range(2):
        # Of one nonce for a tensor, each chunk's is the next one.
        nonce = hashlib.sha256(f"{commit}{rank}{tensor}".encode()).digest()[:24]
        for number in range(2):
            plain = bytes([rank, tensor, number, ord(commit)]) * (CHUNK // 4)
            here = (int.from_bytes(nonce, "little") + number) % 2**192
            chunks.append(box.encrypt(plain, here.to_bytes(24, "little")).ciphertext)
    return commit.encode() * HEADER + b"".join(chunks)


def seal(store: LocalStore, commit: str, profile: str = "main") -> Build:
    """The build of the commit named by one letter."""
    content = {
        "config.json": b"{}",
        SHARD: sealed_shard(commit, 0),
        OTHER_SHARD: sealed_shard(commit, 1),
    }
    inputs = GOLDEN.inputs.model_copy(update={"commit": commit * 40, "data_key": "0" * 16})
    files = [
        FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in content.items()
    ]
    manifest = Manifest.model_validate(
        {
            **GOLDEN.model_dump(),
            "inputs": inputs.model_dump(),
            "build_id": build_id(inputs),
            "snapshot": {**GOLDEN.snapshot.model_dump(), "commit": inputs.commit},
            "profile": {"revision": profile},
            "files": files,
            "encryption": {"key_id": "0" * 16},
        }
    )
    directory = layout.encrypted_dir(manifest.model, manifest.suffix, manifest.build_id)
    for path, data in content.items():
        store.put_bytes(layout.file_key(directory, path), data)
    return complete(store, manifest, directory)


def complete(store: LocalStore, manifest: Manifest, directory: str) -> Build:
    data = manifests.encode(manifest, KEY)
    store.put_bytes(layout.manifest_key(directory), data)
    made = Build(store, manifest, directory, manifests.manifest_sha256(data))
    stored = StoredManifest(manifest, made.sha256)
    provenance.write(store, directory, stored, KEY, TRUSTED)
    write_evidence(store, KEY, evidence(made))
    return made


def evidence(made: Build) -> Evidence:
    return Evidence.model_validate(
        {
            "model": made.manifest.model,
            "suffix": made.manifest.suffix,
            "build_id": made.manifest.build_id,
            "manifest_sha256": made.sha256,
            "device": "cpu",
            "device_name": "CPU",
            "vllm_version": made.manifest.inputs.vllm,
            "tensor_parallel_size": 2,
            "dtype": "bfloat16",
            "passed": True,
            "checks": ({"name": "token_ids_equal", "passed": True, "description": "equal"},),
            "perplexity": 12.5,
            "load": {
                "bytes": 1,
                "seconds": 1.0,
                "bytes_per_second": 1.0,
                "host_memory_before": 1,
                "host_memory_after": 1,
            },
            "default_load_seconds": 1.0,
            "prompts_digest": "ff00",
            "when": datetime(2025, 11, 29, 15, 0, tzinfo=UTC),
        }
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with both builds, for tests to copy."""
    folder = tmp_path_factory.mktemp("pristine")
    for commit in ("a", "b"):
        seal(LocalStore(folder), commit)
    return folder


@pytest.fixture
def home(pristine: Path, tmp_path: Path) -> Home:
    store = LocalStore(tmp_path / "root")
    shutil.copytree(pristine, store.root)
    old, new = (found(store, commit) for commit in ("a", "b"))
    made = Home(store, tmp_path / "home" / "seen", old, new)
    made.publish(old)
    made.publish(new)
    return made


def found(store: LocalStore, commit: str) -> Build:
    inputs = GOLDEN.inputs.model_copy(update={"commit": commit * 40, "data_key": "0" * 16})
    directory = layout.encrypted_dir(GOLDEN.model, GOLDEN.suffix, build_id(inputs))
    stored = manifests.read_manifest(store, directory, TRUSTED)
    assert stored
    return Build(store, stored.manifest, directory, stored.sha256)


def test_nothing_is_wrong_before_an_attack(home: Home) -> None:
    """Else every test below would pass for another reason."""
    for made in (home.old, home.new):
        report = verify_directory(home.store, made.directory, TRUSTED)
        assert ((), ()) == (report.problems, report.notes)
        assert verify_folder(made.folder, TRUSTED).ok
        home.copy(made)
    home.publish(home.new)
    assert home.old.manifest.build_id == home.roll_back().build_id


# Files: their sizes are looked at by whoever publishes, their bytes by whoever verifies or copies


def exchange(path: Path, first: int, second: int) -> None:
    data = bytearray(path.read_bytes())
    one, two = (slice(HEADER + n * SEALED, HEADER + (n + 1) * SEALED) for n in (first, second))
    data[one], data[two] = data[two], data[one]
    path.write_bytes(data)


def truncated(home: Home) -> None:
    path = home.new.file(SHARD)
    path.write_bytes(path.read_bytes()[:-100])


def cut_by_a_chunk(home: Home) -> None:
    path = home.new.file(SHARD)
    path.write_bytes(path.read_bytes()[:-SEALED])


def chunks_of_a_tensor_exchanged(home: Home) -> None:
    exchange(home.new.file(SHARD), 0, 1)


def chunks_of_two_tensors_exchanged(home: Home) -> None:
    exchange(home.new.file(SHARD), 0, 2)


def whole_tensors_exchanged(home: Home) -> None:
    exchange(home.new.file(SHARD), 0, 2)
    exchange(home.new.file(SHARD), 1, 3)


def shard_of_another_rank(home: Home) -> None:
    shutil.copy(home.new.file(OTHER_SHARD), home.new.file(SHARD))


def shard_of_another_build(home: Home) -> None:
    # Encrypted with the same key: tensorizer decrypts and verifies all of it.
    shutil.copy(home.old.file(SHARD), home.new.file(SHARD))


def shard_removed(home: Home) -> None:
    home.new.file(SHARD).unlink()


FILES: list[tuple[Callable[[Home], None], str, str]] = [
    (truncated, "size", "has 8,389,572 bytes, its manifest says 8,389,672"),
    (cut_by_a_chunk, "size", "its manifest says 8,389,672"),
    (chunks_of_a_tensor_exchanged, "hash", ""),
    (chunks_of_two_tensors_exchanged, "hash", ""),
    (whole_tensors_exchanged, "hash", ""),
    (shard_of_another_rank, "hash", ""),
    (shard_of_another_build, "hash", ""),
    (shard_removed, "missing", "is gone"),
]


@pytest.mark.parametrize(("attack", "kind", "said"), FILES, ids=[a.__name__ for a, _, _ in FILES])
def test_a_changed_file_is_found(
    home: Home, attack: Callable[[Home], None], kind: str, said: str
) -> None:
    """Also where every chunk still decrypts."""
    attack(home)
    for report in (
        verify_directory(home.store, home.new.directory, TRUSTED),
        verify_folder(home.new.folder, TRUSTED),
    ):
        assert [(kind, SHARD)] == [(problem.kind, problem.path) for problem in report.problems]
    with pytest.raises(StoreError, match=SHARD):
        home.copy(home.new)
    if said:
        with pytest.raises(ManifestError, match=said):
            home.publish(home.new)


# Manifests


def write_manifest(made: Build, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest that this package would not write, signed by the trusted key."""
    payload = json.loads(made.file("manifest.json").read_bytes())
    del payload["signature"]
    change(payload)
    made.file("manifest.json").write_bytes(signing.sign("manifest", payload, KEY))


def rank_missing(home: Home) -> None:
    write_manifest(home.new, lambda said: said["shards"].pop())


def rank_repeated(home: Home) -> None:
    write_manifest(home.new, lambda said: said["shards"].append(said["shards"][0]))


def rank_twice_instead_of_the_other(home: Home) -> None:
    write_manifest(home.new, lambda said: said["shards"].__setitem__(1, said["shards"][0]))


def ranks_exchanged(home: Home) -> None:
    def change(said: dict[str, Any]) -> None:
        one, two = said["shards"]
        one["file"], two["file"] = two["file"], one["file"]

    write_manifest(home.new, change)


def rank_and_size_missing(home: Home) -> None:
    def change(said: dict[str, Any]) -> None:
        said["shards"].pop()
        said["tensor_parallel_size"] = 1

    write_manifest(home.new, change)


def manifest_of_another_build(home: Home) -> None:
    shutil.copy(home.old.file("manifest.json"), home.new.file("manifest.json"))


def directory_of_another_build(home: Home) -> None:
    shutil.rmtree(home.new.folder)
    shutil.copytree(home.old.folder, home.new.folder)


def another_data_key(home: Home) -> None:
    write_manifest(home.new, lambda said: said["encryption"].update(key_id="f" * 16))


def no_encryption(home: Home) -> None:
    write_manifest(home.new, lambda said: said.pop("encryption"))


MANIFESTS: list[tuple[Callable[[Home], None], str]] = [
    (rank_missing, "shards are of ranks [0]; tensor_parallel_size 2"),
    (rank_repeated, "shards are of ranks [0, 1, 0]"),
    (rank_twice_instead_of_the_other, "shards are of ranks [0, 0]"),
    (ranks_exchanged, "the shard of rank 0 is model-rank-001.tensors"),
    (rank_and_size_missing, "is model-rank-000.tensors, not model.tensors"),
    (manifest_of_another_build, "was moved or put back"),
    (directory_of_another_build, "was moved or put back"),
    (another_data_key, "the data key differs"),
    (no_encryption, "the data key differs"),
]


@pytest.mark.parametrize(
    ("attack", "said"), MANIFESTS, ids=[attack.__name__ for attack, _ in MANIFESTS]
)
def test_a_manifest_of_something_else_is_refused(
    home: Home, attack: Callable[[Home], None], said: str
) -> None:
    """Its signature is the trusted key's own: what it says, or where it lies, gives it away."""
    attack(home)
    for report in (
        verify_directory(home.store, home.new.directory, TRUSTED),
        verify_folder(home.new.folder, TRUSTED),
    ):
        assert ["manifest"] == [problem.kind for problem in report.problems]
        assert said in report.problems[0].message
    for act in (home.publish, home.copy):
        with pytest.raises(ManifestError) as caught:
            act(home.new)
        assert said in str(caught.value)


def test_an_old_manifest_of_the_same_build_is_not_what_was_published(home: Home) -> None:
    """A build may be made again, with other prompts or by other tools: its id is the same.

    Files and signature are right, so that only its hash, in channel and evidence, tells it apart.
    """
    before = home.old.file("manifest.json").read_bytes()
    other = home.old.manifest.model_copy(update={"profile": {"revision": "older"}})
    complete(home.store, other, home.old.directory)
    with pytest.raises(ManifestError, match="another manifest than the one that was published"):
        home.roll_back()
    home.old.file("manifest.json").write_bytes(before)
    assert home.old.manifest.build_id == home.roll_back().build_id


def test_a_manifest_without_its_own_evidence_is_not_published(home: Home) -> None:
    """Evidence is of one manifest's bytes."""
    data = manifests.encode(
        home.new.manifest.model_copy(update={"profile": {"revision": "older"}}), KEY
    )
    home.new.file("manifest.json").write_bytes(data)
    with pytest.raises(EvidenceError, match="no evidence of a reload on cpu"):
        home.publish(home.new)


# Channels


def test_an_old_channel_that_is_put_back_is_refused(home: Home) -> None:
    """It would make the servers load the build before, or one that was found bad."""
    now = home.channel.read_bytes()
    home.roll_back()
    home.channel.write_bytes(now)
    for act in (lambda: home.publish(home.old), home.roll_back):
        with pytest.raises(HistoryError, match=r"ends at entry 2, but entry 3 was seen"):
            act()
    assert now == home.channel.read_bytes()


# Signatures: of every kind of document


def keys(home: Home) -> tuple[sealing.PrivateKey, str]:
    """A data key that is sealed to a recipient, and the recipient."""
    private = sealing.PrivateKey(bytes(range(7, 39)))
    made = sealing.new_data_key(home.store, {"anna": private.public_key}, KEY)
    made.data_key.wipe()
    return private, made.key_id


def unseal(home: Home) -> None:
    private = sealing.PrivateKey(bytes(range(7, 39)))
    (key_id,) = sealing.key_ids(home.store)
    sealing.unseal(home.store, key_id, private, trusted=TRUSTED).wipe()


def reseal(home: Home) -> None:
    private = sealing.PrivateKey(bytes(range(7, 39)))
    (key_id,) = sealing.key_ids(home.store)
    recipients = {"anna": private.public_key}
    sealing.reseal(home.store, key_id, private, recipients, KEY, trusted=TRUSTED)


def assigned(home: Home) -> str:
    """The id of the build's data key."""
    return build_keys.assign(
        home.store,
        GOLDEN.model,
        GOLDEN.suffix,
        GOLDEN.build_id,
        lambda: "0" * 16,
        KEY,
        TRUSTED,
    )


def verified(home: Home) -> None:
    """As `tensorize verify` does it."""
    for problem in verify_folder(home.new.folder, TRUSTED).problems:
        assert problem.kind in ("signature", "provenance")
        raise SignatureError(problem.message)


def place(home: Home, document: str) -> str:
    """Where the document is; makes those that no build has by itself."""
    if document in ("recipients", "seal") and not sealing.key_ids(home.store):
        keys(home)
    if document == "build-key":
        assigned(home)
    (key_id,) = sealing.key_ids(home.store) or ("0" * 16,)
    version = home.new.manifest.inputs.vllm
    return {
        "manifest": layout.manifest_key(home.new.directory),
        "evidence": layout.evidence_key(home.new.sha256, "cpu", version),
        "channel": layout.channel_key(GOLDEN.model, GOLDEN.suffix),
        "recipients": layout.key_record_key(key_id),
        "seal": layout.seal_key(key_id, "anna"),
        "build-key": layout.build_key_key(GOLDEN.model, GOLDEN.suffix, GOLDEN.build_id),
        "provenance": layout.provenance_key(home.new.directory),
    }[document]


def unsigned(document: str, payload: dict[str, Any]) -> bytes:
    return jsonio.canonical(payload)


def changed(document: str, payload: dict[str, Any]) -> bytes:
    data = json.loads(signing.sign(document, payload, KEY))  # type: ignore[arg-type]
    data["changed"] = True
    return jsonio.canonical(data)


def by_a_stranger(document: str, payload: dict[str, Any]) -> bytes:
    return signing.sign(document, payload, STRANGER)  # type: ignore[arg-type]


def in_a_strangers_name(document: str, payload: dict[str, Any]) -> bytes:
    """A stranger's signature under the trusted key's name."""
    data = json.loads(by_a_stranger(document, payload))
    data["signature"] |= {"key_id": KEY.key_id, "public_key": KEY.public_key}
    return jsonio.canonical(data)


def as_another_document(document: str, payload: dict[str, Any]) -> bytes:
    """Signed by the trusted key, but as something else."""
    other = "evidence" if document != "evidence" else "manifest"
    return signing.sign(other, payload, KEY)


FORGERIES: list[tuple[Callable[[str, dict[str, Any]], bytes], str]] = [
    (unsigned, "is not signed"),
    (changed, "does not fit its content"),
    (by_a_stranger, "not trusted here"),
    (in_a_strangers_name, "does not fit its content"),
    (as_another_document, "is a document of another type"),
]

Act = Callable[[Home], object]
READERS: dict[str, list[Act]] = {
    "manifest": [
        verified,
        lambda home: home.publish(home.new),
        lambda home: home.copy(home.new),
    ],
    "evidence": [lambda home: home.publish(home.new), lambda home: home.copy(home.new)],
    "channel": [
        lambda home: home.publish(home.new),
        Home.roll_back,
        lambda home: channel.read_channel(home.store, GOLDEN.model, GOLDEN.suffix, TRUSTED),
    ],
    "recipients": [unseal, reseal],
    "seal": [unseal, reseal],
    "build-key": [assigned],
}


@pytest.mark.parametrize("document", READERS)
@pytest.mark.parametrize(
    ("forge", "said"), FORGERIES, ids=[forge.__name__ for forge, _ in FORGERIES]
)
def test_a_document_without_a_trusted_signature_is_refused(
    home: Home, document: str, forge: Callable[[str, dict[str, Any]], bytes], said: str
) -> None:
    """By everybody who reads it, before anything that it says is done."""
    where = home.store.root / place(home, document)
    payload = json.loads(where.read_bytes())
    del payload["signature"]
    where.write_bytes(forge(document, payload))
    forged = where.read_bytes()
    for act in READERS[document]:
        with pytest.raises(TensorizeAssetsError) as caught:
            act(home)
        assert isinstance(caught.value, SignatureError | sealing.SealingError)
        assert said in str(caught.value)
        assert where.name in str(caught.value)
    assert forged == where.read_bytes()


def test_a_rollback_needs_a_trusted_signature_too(home: Home) -> None:
    """Of the manifest and the evidence of the build that it goes back to."""
    where = home.store.root / layout.evidence_key(
        home.old.sha256, "cpu", home.old.manifest.inputs.vllm
    )
    good = where.read_bytes()
    write_evidence(home.store, STRANGER, evidence(home.old))
    with pytest.raises(SignatureError, match="not trusted here"):
        home.roll_back()
    where.write_bytes(good)
    home.old.file("manifest.json").write_bytes(manifests.encode(home.old.manifest, STRANGER))
    with pytest.raises(SignatureError, match="not trusted here"):
        home.roll_back()


def test_provenance_by_a_stranger_is_refused(home: Home) -> None:
    """Verified where it lies, and not carried elsewhere."""
    data = provenance.encode(home.new.manifest, home.new.sha256, STRANGER)
    home.new.file("provenance.dsse.json").write_bytes(data)
    for act in (verified, lambda home: home.copy(home.new)):
        with pytest.raises(SignatureError, match="not signed by a key that is trusted here"):
            act(home)


def test_a_copy_takes_the_provenance_along(home: Home) -> None:
    """And the copy is verified with it."""
    home.copy(home.new)
    target = LocalStore(home.seen.parent / "copy")
    report = verify_directory(target, home.new.directory, TRUSTED)
    assert ((), ()) == (report.problems, report.notes)
