"""A bad artifact: documents that were damaged or made to harm are refused, whatever is in them.

The bytes of every signed document are changed, and so is what stands in it before it is signed. The
.tensors files are in test_tensor_files.py. Everything here is the same in every run.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_builds import KEY, MODEL, PRIVATE, STRANGER, SUFFIX, TRUSTED, build, new_key, put

from tensorize_assets.core import (
    audit_record,
    block_hashes,
    build_keys,
    channel,
    evidence,
    jsonio,
    layout,
    provenance,
    sealing,
    signing,
)
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.audit_record import AuditRecord
from tensorize_assets.core.errors import StoreError, TensorizeAssetsError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.manifest import StoredManifest
from tensorize_assets.core.verify import verify_directory

MEMORY = 256 << 20
SHA = "ab" * 32
_SCRIPT = Path(__file__).parent / "scripts" / "document_memory.py"


class Document(NamedTuple):
    """A document of a store that is whole, and what reads it; None for what is not believed."""

    type: signing.DocumentType
    store: LocalStore
    key: str
    data: bytes
    read: Callable[[], object]

    def found(self, data: bytes) -> object:
        """What is read once `data` stands in its place. Raises what the reader does."""
        (self.store.root / self.key).write_bytes(data)
        return self.read()


DOCUMENTS = (
    "manifest",
    "evidence",
    "channel",
    "recipients",
    "seal",
    "build-key",
    "audit",
    "blocks",
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    """One of each kind, in one store."""
    store = LocalStore(tmp_path_factory.mktemp("root"))
    key_id, _ = new_key(store)
    made = build(store)
    put(made)
    build_keys.assign(store, MODEL, SUFFIX, made.manifest.build_id, lambda: key_id, KEY, TRUSTED)
    audited = AuditRecord(
        model=MODEL,
        suffix=SUFFIX,
        build_id=made.manifest.build_id,
        directory=made.directory,
        manifest_sha256=made.sha256,
        when=datetime(2025, 11, 29, tzinfo=UTC),
        bytes=1,
        seconds=1.0,
    )
    audit_record.write_record(store, KEY, audited)
    blocks = block_hashes.encode(SHA, 1, bytes(32), KEY)
    store.put_bytes("blocks.json", blocks)
    version, build_id = made.manifest.inputs.vllm, made.manifest.build_id

    def read_blocks() -> object:
        data = (store.root / "blocks.json").read_bytes()
        return block_hashes.decode(data, SHA, 1, TRUSTED, "blocks.json")

    def one(kind: signing.DocumentType, key: str, read: Callable[[], object]) -> Document:
        return Document(kind, store, key, (store.root / key).read_bytes(), read)

    return {
        found.type: found
        for found in (
            one(
                "manifest",
                layout.manifest_key(made.directory),
                lambda: manifests.read_manifest(store, made.directory, TRUSTED),
            ),
            one(
                "evidence",
                layout.evidence_key(made.sha256, "cpu", version),
                lambda: evidence.read_evidence(store, made.sha256, "cpu", version, TRUSTED),
            ),
            one(
                "channel",
                layout.channel_key(MODEL, SUFFIX),
                lambda: channel.read_channel(store, MODEL, SUFFIX, TRUSTED),
            ),
            one(
                "recipients",
                layout.key_record_key(key_id),
                lambda: sealing.read_record(store, key_id, TRUSTED),
            ),
            one(
                "seal",
                layout.seal_key(key_id, "anna"),
                lambda: sealing.unseal(store, key_id, PRIVATE, trusted=TRUSTED),
            ),
            one(
                "build-key",
                layout.build_key_key(MODEL, SUFFIX, build_id),
                lambda: build_keys.read_keys(store, MODEL, SUFFIX, build_id, TRUSTED),
            ),
            one(
                "audit",
                layout.audit_key(made.sha256),
                lambda: audit_record.read_record(store, made.sha256, TRUSTED),
            ),
            one("blocks", "blocks.json", read_blocks),
        )
    }


def tried(examples: int) -> Any:
    """Settings of a search that finds the same in every run, and keeps nothing."""
    return settings(
        derandomize=True,
        database=None,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


class Change(NamedTuple):
    """One change of some bytes, at a place that is a part of their length."""

    kind: str
    place: float
    length: int
    value: bytes

    def of(self, data: bytes) -> bytes:
        at = min(int(self.place * len(data)), len(data) - 1)
        end = min(at + self.length, len(data))
        before, inside, after = data[:at], data[at:end], data[end:]
        match self.kind:
            case "flip":
                return data[:at] + bytes([data[at] ^ (1 << self.length % 8)]) + data[at + 1 :]
            case "cut":
                return before
            case "drop":
                return before + after
            case "twice":
                return before + inside + inside + after
            case "backwards":
                return before + inside[::-1] + after
            case "insert":
                return before + self.value + inside + after
            case _:
                return before + self.value + after


KINDS = ("flip", "cut", "drop", "twice", "backwards", "insert", "replace")
# Bytes that mean something in JSON, in base64 and in a terminal.
PIECES = (
    *(bytes([value]) for value in b'"{}[],:\\0=/+ \n\x00\x1b\xff'),
    b'"\\u0000"',
    b"1e999",
    b"NaN",
    b"-0",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"null",
    b"\xf0\x9f\x98\x80",
    b"\xed\xa0\x80",
)
changes = st.builds(
    Change,
    st.sampled_from(KINDS),
    st.floats(0, 1),
    st.integers(1, 64),
    st.sampled_from(PIECES) | st.binary(max_size=8),
)


def outcome(document: Document, data: bytes) -> str:
    """`refused`, or `passed`; anything but an error of ours is raised."""
    try:
        found = document.found(data)
    except TensorizeAssetsError:
        return "refused"
    finally:
        (document.store.root / document.key).write_bytes(document.data)
    return "refused" if found is None else "passed"


def search(documents: dict[str, Document], kind: str, examples: int) -> None:
    document = documents[kind]

    @tried(examples)
    @given(st.lists(changes, min_size=1, max_size=4))
    def look(several: list[Change]) -> None:
        data = document.data
        for change in several:
            data = change.of(data) or b" "
        expected = "passed" if data == document.data else "refused"
        assert expected == outcome(document, data)

    look()


def fault(kind: str, what: str, outcome: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.fault("Bad artifact", f"{kind}: {what}", outcome))


@pytest.mark.parametrize(
    "kind",
    [fault(kind, "bytes changed anyhow", "refused by an error of ours") for kind in DOCUMENTS],
)
def test_no_change_of_bytes_passes_or_crashes(documents: dict[str, Document], kind: str) -> None:
    """Whoever writes to the store chooses every byte, and has no key."""
    assert "passed" == outcome(documents[kind], documents[kind].data)
    search(documents, kind, 60)


@pytest.mark.long
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_no_change_of_bytes_passes_or_crashes_of_many(
    documents: dict[str, Document], kind: str
) -> None:
    """The same, of more."""
    search(documents, kind, 3000)


@pytest.mark.fault(
    "Bad artifact", "signature written as other base64", "refused: it is not the one"
)
@pytest.mark.parametrize("kind", ["manifest", "channel"])
def test_a_signature_has_one_text(documents: dict[str, Document], kind: str) -> None:
    """The last character of a base64 has bits that nobody reads: 15 other texts of one signature.

    Evidence and channel name a manifest by its hash: a second form of it would lose its proof.
    """
    document = documents[kind]
    start = document.data.index(b'"signature":{"key_id"')
    end = document.data.index(b"}", start)
    alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
    for at in range(start, end):
        if document.data[at + 1 : at + 2] in b'="':
            for other in alphabet:
                data = document.data[:at] + bytes([other]) + document.data[at + 1 :]
                assert data == document.data or "refused" == outcome(document, data)


# What a field may hold that no field should: times that are no times elsewhere, numbers that no
# machine has, names that lead out.
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1 << 63,
    10**400,
    1e308,
    5e-324,
    "",
    "../../x",
    "/",
    "a\x00b",
    "\x1b[2J",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "2025-11-29T15:00:00",
    [],
    {},
    [[]],
    {"": None},
)
values = st.sampled_from(ODD) | st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything inside of a JSON value."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, name)
            yield from paths(part, (*path, name))


def with_value(value: Any, path: tuple[Any, ...], new: Any, *, removed: bool) -> None:
    for name in path[:-1]:
        value = value[name]
    if removed:
        del value[path[-1]]
    else:
        value[path[-1]] = new


def signed_search(documents: dict[str, Document], kind: str, examples: int) -> None:
    document = documents[kind]
    payload = {k: v for k, v in json.loads(document.data).items() if k != "signature"}
    places = sorted(paths(payload), key=str)

    @tried(examples)
    @given(st.sampled_from(places), values, st.booleans())
    def look(place: tuple[Any, ...], value: Any, removed: bool) -> None:
        changed = json.loads(json.dumps(payload))
        with_value(changed, place, value, removed=removed)
        for key in (KEY, STRANGER):
            try:
                data = signing.sign(document.type, changed, key)
            except StoreError:
                return
            found = outcome(document, data)
            assert key is KEY or "refused" == found

    look()

    # Something odd at every place.
    for number, place in enumerate(places):
        for value in ODD[number % 5 :: 5]:
            changed = json.loads(json.dumps(payload))
            with_value(changed, place, value, removed=False)
            outcome(document, signing.sign(document.type, changed, KEY))


@pytest.mark.parametrize(
    "kind",
    [fault(kind, "odd content, signed", "an error of ours, or what it says") for kind in DOCUMENTS],
)
def test_no_content_crashes_a_reader(documents: dict[str, Document], kind: str) -> None:
    """Another release may have signed what this one does not know. A stranger's is refused."""
    signed_search(documents, kind, 40)


@pytest.mark.long
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_no_content_crashes_a_reader_of_many(documents: dict[str, Document], kind: str) -> None:
    """The same, of more."""
    signed_search(documents, kind, 2000)


@pytest.mark.fault(
    "Bad artifact", "provenance: bytes changed anyhow", "its statement, or a problem"
)
def test_provenance_says_the_same_or_is_a_problem(tmp_path: Path) -> None:
    """Its envelope is other people's, and not canonical: what it says is what counts."""
    store = LocalStore(tmp_path)
    made = build(store)
    place = layout.provenance_key(made.directory)
    good = (store.root / place).read_bytes()
    stored = StoredManifest(made.manifest, made.sha256)

    @tried(150)
    @given(st.lists(changes, min_size=1, max_size=3))
    @example([Change("replace", 0.0, 10**6, b'{"payload":"","payloadType":"","signatures":[]}')])
    def look(several: list[Change]) -> None:
        data = good
        for change in several:
            data = change.of(data) or b" "
        try:
            provenance.verify(data, stored, TRUSTED)
        except TensorizeAssetsError:
            return
        assert json.loads(data)["payload"] == json.loads(good)["payload"]

    look()
    (store.root / place).write_bytes(good[:-9])
    report = verify_directory(store, made.directory, TRUSTED)
    assert ["provenance"] == [problem.kind for problem in report.problems]


@pytest.mark.fault("Bad artifact", "files: bytes changed at random", "named by verify, whichever")
def test_verify_names_every_changed_file(tmp_path: Path) -> None:
    """Of an artifact no byte can be changed, dropped or added."""
    store = LocalStore(tmp_path)
    made = build(store, adapters={"one": 8})
    chance = random.Random(5)
    for entry in made.manifest.files:
        path = store.root / made.key(entry.path)
        good = path.read_bytes()
        for kind in KINDS:
            change = Change(kind, chance.random(), chance.randint(1, 9), chance.randbytes(3))
            data = change.of(good)
            if data == good:
                continue
            path.write_bytes(data)
            problems = verify_directory(store, made.directory, TRUSTED).problems
            assert [entry.path] == [problem.path for problem in problems]
        path.write_bytes(good)
    assert verify_directory(store, made.directory, TRUSTED).ok


def in_memory(tmp_path: Path, which: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path / "documents"), str(tmp_path / "cases"), which],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        text=True,
        timeout=550,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    return json.loads((tmp_path / "cases").read_text())


def require_modest(cases: dict[str, Any]) -> None:
    large = {name: case["grown"] >> 20 for name, case in cases.items() if case["grown"] > MEMORY}
    assert {} == large
    assert {} == {name: one for name, one in cases.items() if one["outcome"].startswith("crash")}


@pytest.mark.fault("Bad artifact", "documents as large as are read", "256 MiB are enough for any")
def test_no_document_fills_the_memory(tmp_path: Path) -> None:
    """The worst of each kind, unsigned, signed by a stranger, and by anybody where any will do."""
    cases = in_memory(tmp_path, "few")
    require_modest(cases)
    assert "where documents end" in cases["unsigned: lists beyond what is read"]["said"]
    assert "where documents end" in cases["unsigned: names beyond what is read"]["said"]
    assert "is missing" in cases["ours: the largest manifest"]["said"]
    assert "read" == cases["ours: the largest list of blocks"]["outcome"]


@pytest.mark.long
def test_no_document_of_many_fills_the_memory(tmp_path: Path) -> None:
    """Every kind of document, with every kind of content."""
    require_modest(in_memory(tmp_path, "all"))


def test_nothing_is_signed_that_nobody_reads() -> None:
    """It would be found out when the build is done, by whoever wants it."""
    payloads: tuple[dict[str, Any], ...] = (
        {"a": "a" * jsonio.MAX_BYTES},
        {"a": [0] * (1 << 20)},
    )
    for payload in payloads:
        with pytest.raises(StoreError, match="documents end"):
            signing.sign("manifest", payload, KEY)


def test_of_a_large_document_some_wrong_fields_are_named() -> None:
    """The first of each list; nothing is kept of what they hold."""
    found: dict[str, Any] = jsonio.dump_record(manifests.decode(_golden(), TRUSTED))
    found["extra"] = [0] * 20_000
    del found["suffix"]
    found["files"] = [{"path": "a"}]
    with pytest.raises(StoreError) as caught:
        jsonio.load_record(manifests.Manifest, jsonio.canonical(found, "it"), "it")
    for said in ("suffix: Field required", "files.0.size: Field required", "extra: Extra inputs"):
        assert said in str(caught.value)


def _golden() -> bytes:
    return (Path(__file__).parents[1] / "core" / "golden" / "manifest.json").read_bytes()
