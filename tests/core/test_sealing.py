from __future__ import annotations

import base64
import copy
import json
import logging
import multiprocessing
import os
import pickle
import re
import stat
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nacl import public

from tensorize_assets.core import jsonio, layout, sealing, signing
from tensorize_assets.core.errors import ConflictError, SignatureError, StoreError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.sealing import (
    PRIVATE_KEY_VARIABLE,
    DataKey,
    KeyRecord,
    PrivateKey,
    SealingError,
)
from tensorize_assets.core.store import Store, open_store

SIGNER = signing.SecretKey(bytes(range(32)))
STRANGER = signing.SecretKey(bytes(32))
TRUSTED = {SIGNER.public_key}
SECRETS = {name: name.encode() * 8 for name in ("anna", "bert", "carl", "dora")}
PRIVATE = {name: PrivateKey(secret) for name, secret in SECRETS.items()}
PUBLIC = {name: key.public_key for name, key in PRIVATE.items()}
ANNA, BERT, CARL, DORA = PRIVATE.values()
WHEN = datetime(2025, 11, 29, 15, 0, tzinfo=UTC)
RAW = bytes(range(100, 132))


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRIVATE_KEY_VARIABLE, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def named(names: str) -> dict[str, str]:
    """Recipients by their initials."""
    return {name: key for name, key in PUBLIC.items() if name[0] in names}


def make(store: Store, names: str) -> tuple[str, bytes]:
    made = sealing.new_data_key(store, named(names), SIGNER, when=WHEN)
    with made.data_key as key:
        return made.key_id, key.reveal()


def opened(store: Store, key_id: str, private_key: PrivateKey) -> bytes:
    with sealing.unseal(store, key_id, private_key, trusted=TRUSTED) as key:
        return key.reveal()


def reseal(store: Store, key_id: str, own: PrivateKey, names: str) -> KeyRecord:
    return sealing.reseal(store, key_id, own, named(names), SIGNER, trusted=TRUSTED, when=WHEN)


def amend(
    store: Store, key_id: str, own: PrivateKey, add: str = "", remove: tuple[str, ...] = ()
) -> KeyRecord:
    return sealing.amend(
        store, key_id, own, SIGNER, add=named(add), remove=remove, trusted=TRUSTED, when=WHEN
    )


def seals(store: Store, key_id: str) -> str:
    folder = layout.seals_folder(key_id)
    return "".join(key.removeprefix(folder)[0] for key in store.list(folder))


def recipients(store: Store, key_id: str) -> str:
    return "".join(name[0] for name in sealing.recipients_of(store, key_id, TRUSTED))


def sealed(store: Store, key_id: str, name: str) -> bytes:
    found = store.get_bytes(layout.seal_key(key_id, name))
    assert found
    return found.data


def signed_seal(key_id: str, name: str, inside: bytes, signer: signing.SecretKey = SIGNER) -> bytes:
    """A seal as whoever can write to the store would make it."""
    box = public.SealedBox(public.PublicKey(base64.b64decode(PUBLIC[name])))
    payload: dict[str, jsonio.JsonValue] = {
        "format": 1,
        "key_id": key_id,
        "recipient": {"name": name, "public_key": PUBLIC[name]},
        "sealed": base64.b64encode(box.encrypt(inside)).decode(),
    }
    return signing.sign("seal", payload, signer)


def binding(key_id: str, name: str) -> bytes:
    return f"tensorize_assets/data-key/1\n{key_id}\n{name}\n".encode()


# Data keys


def test_every_recipient_opens_the_same_key(store: LocalStore) -> None:
    """Each of them must be able to serve the build alone."""
    key_id, key = make(store, "ab")
    assert 32 == len(key)
    assert [key, key] == [opened(store, key_id, own) for own in (ANNA, BERT)]
    assert named("ab") == sealing.recipients_of(store, key_id, TRUSTED)
    assert [
        f"keys/{key_id}.json",
        f"keys/{key_id}/anna",
        f"keys/{key_id}/bert",
    ] == sorted(store.list("keys/"))
    assert (key_id,) == sealing.key_ids(store)


def test_a_seal_opens_with_nothing_but_libsodium(store: LocalStore) -> None:
    """The key of a build must outlive this package; the format is a promise."""
    key_id, key = make(store, "a")
    document = json.loads(sealed(store, key_id, "anna"))
    box = public.SealedBox(public.PrivateKey(SECRETS["anna"]))
    inside = box.decrypt(base64.b64decode(document["sealed"]))
    assert binding(key_id, "anna") + key == inside


def test_no_two_builds_share_a_key_or_an_id(store: LocalStore) -> None:
    """One leaked key opens one build."""
    made = [make(store, "a") for _ in range(8)]
    assert 8 == len({key_id for key_id, _ in made}) == len({key for _, key in made})
    assert all(re.fullmatch("[0-9a-f]{16}", key_id) for key_id, _ in made)


@pytest.mark.fault("Secrets", "what the store has of a data key", "only sealed")
def test_nothing_stored_holds_the_key(store: LocalStore) -> None:
    """The root is readable by many, and copied about."""
    key_id, key = make(store, "ab")
    amend(store, key_id, ANNA, add="c", remove=("bert",))
    texts = [key, key.hex().encode(), base64.b64encode(key)]
    for path in (path for path in store.root.rglob("*") if path.is_file()):
        assert not any(text in path.read_bytes() for text in texts), path


def test_a_key_is_wiped_at_the_end_of_its_with() -> None:
    """A core dump of a process that is long done with the key must not hold it."""
    with DataKey(RAW) as key:
        memory = key._buffer  # pyright: ignore[reportPrivateUsage]
        assert RAW == key.reveal() == memory
    assert bytes(32) == memory
    assert "DataKey(wiped)" == repr(key)
    with pytest.raises(SealingError, match="was wiped; unseal it again"):
        key.reveal()
    key.wipe()


def test_a_wiped_key_is_never_written(tmp_path: Path) -> None:
    """Thirty-two zeros are a key as well, which everybody knows."""
    with DataKey(RAW) as key:
        pass
    with pytest.raises(SealingError, match="was wiped"):
        sealing.write_keyfile(key, tmp_path / "key")
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_data_key_has_32_bytes(length: int) -> None:
    """tensorizer would take a shorter one as a passphrase or fail late."""
    with pytest.raises(SealingError, match=f"has 32 bytes, not {length}"):
        DataKey(bytes(length))


def test_keys_do_not_show_their_secret() -> None:
    """Keys end in tracebacks, logs and configuration dumps by accident."""
    for key, raw in ((DataKey(RAW), RAW), (ANNA, SECRETS["anna"])):
        secrets = [raw.hex(), base64.b64encode(raw).decode(), repr(raw)[2:-1]]
        for shown in (repr(key), str(key), f"{key}", f"{[key]}"):
            assert not any(secret in shown for secret in secrets)
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="is n"):
                copied(key)
        with pytest.raises(TypeError, match="not JSON serializable"):
            json.dumps(key)


# A key that does not open


def test_a_key_that_opens_nothing_says_who_still_can(store: LocalStore) -> None:
    """Whoever lost a private key needs the name of a colleague, not a stack trace."""
    key_id, _ = make(store, "ab")
    with pytest.raises(SealingError, match=r"none of its recipients; .*: anna, bert$") as caught:
        opened(store, key_id, CARL)
    assert CARL.public_key in str(caught.value)
    amend(store, key_id, ANNA, remove=("bert",))
    with pytest.raises(SealingError, match=r"was removed .*2025-11-29 15:00 UTC.*: anna$"):
        opened(store, key_id, BERT)


def test_a_key_that_is_not_there_is_named(store: LocalStore) -> None:
    """A typing error must not read as a lost key."""
    with pytest.raises(SealingError, match=r"there is no data key abc: .*keys/abc\.json"):
        opened(store, "abc", ANNA)
    with pytest.raises(StoreError, match="slash"):
        opened(store, "../keys", ANNA)


def test_every_changed_byte_of_a_seal_is_seen(store: LocalStore) -> None:
    """Tampering must end in this package's error, which says who can repair it."""
    key_id, _ = make(store, "ab")
    data = sealed(store, key_id, "anna")
    for index in range(0, len(data), 7):
        changed = bytearray(data)
        changed[index] ^= 1
        store.put_bytes(layout.seal_key(key_id, "anna"), bytes(changed))
        with pytest.raises(SealingError, match=r"cannot be opened by anna: .*: bert$"):
            opened(store, key_id, ANNA)


def test_a_removed_seal_says_who_can_restore_it(store: LocalStore) -> None:
    """A reseal that was killed leaves this, and so does a careless clean-up."""
    key_id, key = make(store, "ab")
    store.delete(layout.seal_key(key_id, "anna"))
    with pytest.raises(SealingError, match=r"anna does not exist; .*: bert$"):
        opened(store, key_id, ANNA)
    reseal(store, key_id, BERT, "ab")
    assert key == opened(store, key_id, ANNA)
    store.delete(layout.seal_key(key_id, "anna"))
    amend(store, key_id, BERT, remove=("anna",))
    store.delete(layout.seal_key(key_id, "bert"))
    with pytest.raises(SealingError, match="nobody else can open it"):
        opened(store, key_id, BERT)


def test_the_seal_of_another_key_is_refused(store: LocalStore) -> None:
    """Put in place, it would have a build encrypted with a key that another group has."""
    first, _ = make(store, "a")
    second, _ = make(store, "ab")
    store.put_bytes(layout.seal_key(first, "anna"), sealed(store, second, "anna"))
    with pytest.raises(SealingError, match=f"is the seal of data key {second}"):
        opened(store, first, ANNA)


def test_the_seal_of_another_recipient_is_refused(store: LocalStore) -> None:
    """Also when its words are right and only what is inside is another's."""
    key_id, _ = make(store, "ab")
    store.put_bytes(layout.seal_key(key_id, "anna"), sealed(store, key_id, "bert"))
    with pytest.raises(SealingError, match="is the seal of bert"):
        opened(store, key_id, ANNA)


@pytest.mark.parametrize("name", ["bert", "anna"])
@pytest.mark.parametrize("other", ["0" * 16, ""])
def test_what_is_sealed_names_its_key_and_recipient(
    store: LocalStore, name: str, other: str
) -> None:
    """The words around a seal can be written anew by whoever may sign; those inside cannot."""
    key_id, _ = make(store, "ab")
    inside = binding(other or key_id, name) + RAW
    store.put_bytes(layout.seal_key(key_id, "anna"), signed_seal(key_id, "anna", inside))
    if name == "anna" and not other:
        assert RAW == opened(store, key_id, ANNA)
        return
    with pytest.raises(SealingError, match="is not the key it should be"):
        opened(store, key_id, ANNA)


@pytest.mark.parametrize("key", [b"", RAW[:-1], RAW + b"x"])
def test_what_is_sealed_is_32_bytes(store: LocalStore, key: bytes) -> None:
    """A short key must not be padded by whoever uses it."""
    key_id, _ = make(store, "a")
    forged = signed_seal(key_id, "anna", binding(key_id, "anna") + key)
    store.put_bytes(layout.seal_key(key_id, "anna"), forged)
    with pytest.raises(SealingError, match="is not the key it should be"):
        opened(store, key_id, ANNA)


def test_a_seal_of_a_stranger_is_refused(store: LocalStore) -> None:
    """Anyone can seal a key of their own to a public key, and then read what it encrypts."""
    key_id, _ = make(store, "ab")
    forged = signed_seal(key_id, "anna", binding(key_id, "anna") + RAW, STRANGER)
    store.put_bytes(layout.seal_key(key_id, "anna"), forged)
    with pytest.raises(SealingError, match="not trusted here"):
        opened(store, key_id, ANNA)


# The record


def test_a_record_of_a_stranger_is_refused(store: LocalStore) -> None:
    """Whoever can write to the store could name themselves a recipient, for the next reseal."""
    key_id, _ = make(store, "a")
    place = layout.key_record_key(key_id)
    record = sealing.read_record(store, key_id, TRUSTED).record
    store.put_bytes(place, signing.sign("recipients", jsonio.dump_record(record), STRANGER))
    for refused in (
        lambda: sealing.recipients_of(store, key_id, TRUSTED),
        lambda: opened(store, key_id, ANNA),
        lambda: amend(store, key_id, ANNA, add="b"),
    ):
        with pytest.raises(SignatureError, match="is not trusted here"):
            refused()


def test_the_record_of_another_key_is_refused(store: LocalStore) -> None:
    """Put in place, it would give one build's recipients to another."""
    first, _ = make(store, "a")
    second, _ = make(store, "ab")
    found = store.get_bytes(layout.key_record_key(second))
    assert found
    store.put_bytes(layout.key_record_key(first), found.data)
    with pytest.raises(StoreError, match=f"is the record of data key {second}"):
        sealing.recipients_of(store, first, TRUSTED)


def change(number: int, added: str = "", removed: str = "") -> dict[str, jsonio.JsonValue]:
    def listed(names: str) -> list[jsonio.JsonValue]:
        return [{"name": name, "public_key": key} for name, key in named(names).items()]

    note = "who was removed may have kept the data key: rotate it" if removed else None
    return {
        "number": number,
        "when": "2025-11-29T15:00:00Z",
        "added": listed(added),
        "removed": listed(removed),
        "note": note,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "at least 1 item"),
        ([change(2, "a")], "numbered"),
        ([change(1, "a"), change(3, "b")], "numbered"),
        ([change(1, "a"), change(2, "ab")], "adds a recipient twice"),
        ([change(1, "a"), change(2, "b", "c")], "removes who was no recipient"),
        ([change(1, "a"), change(2, "", "a")], "leaves nobody"),
        ([change(1, "a"), {**change(2, "b", "a"), "note": None}], "lacks it"),
        ([{**change(1), "added": [{"name": "../a", "public_key": PUBLIC["anna"]}]}], "slash"),
        ([{**change(1), "added": [{"name": "a", "public_key": "AAAA"}]}], "not a public key"),
    ],
)
def test_a_history_that_cannot_be_is_refused(
    store: LocalStore, changes: list[jsonio.JsonValue], message: str
) -> None:
    """Signed or not: people decide by it whom to trust and what to rotate."""
    key_id = "0" * 16
    payload: dict[str, jsonio.JsonValue] = {"format": 1, "key_id": key_id, "changes": changes}
    store.put_bytes(layout.key_record_key(key_id), signing.sign("recipients", payload, SIGNER))
    with pytest.raises(StoreError, match=message):
        sealing.recipients_of(store, key_id, TRUSTED)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "there are no recipients"),
        ({"anna": PUBLIC["anna"], "ann": PUBLIC["anna"]}, "ann and anna have one public key"),
        ({"a/b": PUBLIC["anna"]}, "recipient 'a/b': .*slash"),
        ({"..": PUBLIC["anna"]}, r"recipient '\.\.'"),
        ({"anna": ""}, "recipient 'anna': it is not a public key"),
        ({"anna": PUBLIC["anna"] + "\n"}, "is not a public key"),
        ({"anna": PUBLIC["anna"][:-2] + "B="}, "is not a public key"),
        # The same point with its unused bit set: it could be sealed to, and never opened.
        ({"anna": base64.b64encode(b"\x09" + bytes(30) + b"\x80").decode()}, "is not a public key"),
        ({"anna": base64.b64encode(bytes(32)).decode()}, "a point of the curve that anyone"),
        ({"anna": base64.b64encode(b"\x01" + bytes(31)).decode()}, "a point of the curve"),
    ],
)
def test_recipients_that_nothing_can_be_sealed_to_are_refused(
    store: LocalStore, wrong: dict[str, str], message: str
) -> None:
    """Before a build is encrypted with a key that somebody cannot open."""
    with pytest.raises(SealingError, match=message):
        sealing.new_data_key(store, wrong, SIGNER)
    assert () == store.list("keys/")


def test_a_private_key_given_as_a_recipient_is_not_repeated(
    store: LocalStore, tmp_path: Path
) -> None:
    """The likeliest mistake of all; the message must not spread it further."""
    sealing.generate_private_key(tmp_path / "key")
    text = (tmp_path / "key").read_text().splitlines()[-1]
    with pytest.raises(SealingError, match="a private key was given as a public one") as caught:
        sealing.new_data_key(store, {"anna": text}, SIGNER)
    assert text.partition(":")[2] not in "".join(traceback.format_exception(caught.value))


# Changing recipients


def test_an_added_recipient_opens_the_key_and_a_removed_one_has_no_seal(store: LocalStore) -> None:
    """No tensor is touched: what stays the same is the key itself."""
    key_id, key = make(store, "ab")
    record = reseal(store, key_id, ANNA, "ac")
    assert [key, key] == [opened(store, key_id, own) for own in (ANNA, CARL)]
    assert "ac" == recipients(store, key_id) == seals(store, key_id)
    assert record == sealing.read_record(store, key_id, TRUSTED).record
    last = record.changes[-1]
    assert (2, WHEN, ("carl",), ("bert",)) == (
        last.number,
        last.when,
        tuple(one.name for one in last.added),
        tuple(one.name for one in last.removed),
    )


def test_a_removed_recipient_is_recorded_as_one_who_may_have_the_key(store: LocalStore) -> None:
    """Resealing shuts nobody out who kept the key; only a rotation does, and people forget."""
    key_id, _ = make(store, "ab")
    record = reseal(store, key_id, ANNA, "a")
    assert "who was removed may have kept the data key: rotate it" == record.changes[-1].note
    assert ["bert"] == [one.name for one in record.former]
    record = reseal(store, key_id, ANNA, "ab")
    assert None is record.changes[-1].note
    assert () == record.former
    assert 3 == len(record.changes)


def test_a_recipient_may_get_a_new_public_key_under_the_old_name(store: LocalStore) -> None:
    """A lost laptop: the name stays, the key pair does not."""
    key_id, key = make(store, "ab")
    changed = {**named("a"), "bert": PUBLIC["dora"]}
    record = sealing.reseal(store, key_id, ANNA, changed, SIGNER, trusted=TRUSTED)
    assert changed == record.recipients
    assert key == opened(store, key_id, DORA)
    assert [PUBLIC["bert"]] == [one.public_key for one in record.former]
    with pytest.raises(SealingError, match="was removed from its recipients"):
        opened(store, key_id, BERT)


def test_recipients_that_are_as_asked_for_add_no_change(store: LocalStore) -> None:
    """An asset that reseals at every run must not grow the history."""
    key_id, _ = make(store, "ab")
    before = {key: store.get_bytes(key) for key in store.list("")}
    assert 1 == len(reseal(store, key_id, BERT, "ab").changes)
    assert 1 == len(amend(store, key_id, BERT, add="a").changes)
    assert before == {key: store.get_bytes(key) for key in store.list("")}


def test_only_a_recipient_changes_recipients(store: LocalStore) -> None:
    """Also one who was removed: a seal that was copied away gives no say."""
    key_id, _ = make(store, "ab")
    with pytest.raises(SealingError, match="does not open"):
        reseal(store, key_id, CARL, "ac")
    kept = sealed(store, key_id, "bert")
    amend(store, key_id, ANNA, remove=("bert",))
    store.put_bytes(layout.seal_key(key_id, "bert"), kept)
    with pytest.raises(SealingError, match="was removed from its recipients"):
        reseal(store, key_id, BERT, "b")
    assert "a" == recipients(store, key_id)
    # What has no place there goes with the next change, or with none.
    reseal(store, key_id, ANNA, "a")
    assert "a" == seals(store, key_id)


def test_who_changes_recipients_stays_one(store: LocalStore) -> None:
    """Of them alone it is known that their private key exists; without one the build is lost."""
    key_id, key = make(store, "ab")
    with pytest.raises(SealingError, match=r"stays one of them.*remove this one \(anna\)"):
        amend(store, key_id, ANNA, remove=("anna",))
    amend(store, key_id, BERT, remove=("anna",))
    assert key == opened(store, key_id, BERT)
    with pytest.raises(SealingError, match="nobody could open the data key"):
        amend(store, key_id, BERT, remove=("bert",))
    assert "b" == recipients(store, key_id) == seals(store, key_id)


def test_names_to_change_are_checked(store: LocalStore) -> None:
    """A name mistyped in a removal would leave in place whom it was about."""
    key_id, _ = make(store, "ab")
    with pytest.raises(SealingError, match="never sealed to brt; its recipients are anna, bert"):
        amend(store, key_id, ANNA, remove=("brt",))
    with pytest.raises(SealingError, match="to be added and removed"):
        amend(store, key_id, ANNA, add="b", remove=("bert",))
    amend(store, key_id, ANNA, remove=("bert",))
    assert 2 == len(amend(store, key_id, ANNA, remove=("bert",)).changes)


def test_a_signing_key_that_is_not_trusted_changes_nothing(store: LocalStore) -> None:
    """Written first, the record would be one that nobody believes, and the key lost."""
    key_id, key = make(store, "a")
    with pytest.raises(SealingError, match=f"signing key {STRANGER.key_id} is not trusted"):
        sealing.reseal(store, key_id, ANNA, named("ab"), STRANGER, trusted=TRUSTED)
    assert key == opened(store, key_id, ANNA)


def in_processes(count: int, work: Callable[[int], object]) -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        work(number)

    processes = [fork.Process(target=run, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [0] * count == [process.exitcode for process in processes]


def test_what_resealers_at_once_ask_for_is_all_done(store: LocalStore) -> None:
    """A lost addition is a colleague who cannot open; a lost removal is one who can."""
    key_id, key = make(store, "ab")
    asked: list[tuple[str, tuple[str, ...]]] = [("c", ()), ("d", ()), ("", ("bert",)), ("c", ())]
    in_processes(4, lambda number: amend(store, key_id, ANNA, *asked[number]))
    assert "acd" == recipients(store, key_id) == seals(store, key_id)
    assert [key] * 3 == [opened(store, key_id, own) for own in (ANNA, CARL, DORA)]
    record = sealing.read_record(store, key_id, TRUSTED).record
    assert [1, 2, 3, 4] == [change.number for change in record.changes]


def test_of_two_whole_lists_at_once_the_later_stays_and_both_are_recorded(
    store: LocalStore,
) -> None:
    """Records and seals must tell the same, whoever came last."""
    key_id, key = make(store, "a")
    for _ in range(5):
        in_processes(2, lambda number: reseal(store, key_id, ANNA, ("abc", "ad")[number]))
        assert recipients(store, key_id) == seals(store, key_id)
        assert seals(store, key_id) in ("abc", "ad")
        for own in PRIVATE.values():
            if own.public_key in sealing.recipients_of(store, key_id, TRUSTED).values():
                assert key == opened(store, key_id, own)


Others = list[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class OvertakenStore(LocalStore):
    """A store in which others do something just before the first writes with such a name."""

    others: Others = field(default_factory=list)

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        if self.others and key.endswith(self.others[0][0]):
            self.others.pop(0)[1]()
        return super().put_bytes(key, data, if_absent=if_absent, if_match=if_match)


def test_a_seal_that_comes_late_does_not_outlive_a_removal(store: LocalStore) -> None:
    """Between the record and the seal of one who adds, another removes the same recipient."""
    key_id, key = make(store, "ab")
    others: Others = [("/carl", lambda: amend(store, key_id, BERT, remove=("carl",)))]
    record = amend(OvertakenStore(store.root, others), key_id, ANNA, add="c")
    assert [] == others
    assert "ab" == recipients(store, key_id) == seals(store, key_id)
    assert 3 == len(record.changes)
    assert key == opened(store, key_id, BERT)


def test_a_late_seal_to_an_old_public_key_is_replaced(store: LocalStore) -> None:
    """The later record names another key for the same recipient; the seal must be for that."""
    key_id, key = make(store, "ab")
    changed = {**named("ab"), "carl": PUBLIC["dora"]}

    def other() -> None:
        sealing.reseal(store, key_id, BERT, changed, SIGNER, trusted=TRUSTED)

    amend(OvertakenStore(store.root, [("/carl", other)]), key_id, ANNA, add="c")
    assert changed == sealing.recipients_of(store, key_id, TRUSTED)
    assert key == opened(store, key_id, DORA)


def test_one_who_is_removed_meanwhile_has_no_say(store: LocalStore) -> None:
    """Read again after a lost race, the record no longer names them."""
    key_id, _ = make(store, "ab")
    others: Others = [(".json", lambda: amend(store, key_id, ANNA, remove=("bert",)))]
    with pytest.raises(SealingError, match="was removed from its recipients"):
        amend(OvertakenStore(store.root, others), key_id, BERT, add="c")
    assert "a" == recipients(store, key_id) == seals(store, key_id)


def test_a_reseal_that_was_killed_is_completed_by_the_next(store: LocalStore) -> None:
    """Killed after the record, it leaves a new recipient without a seal and an old one with it."""
    key_id, key = make(store, "ab")

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reseal(OvertakenStore(store.root, [("/carl", killed)]), key_id, ANNA, "ac")
    assert ("ac", "ab") == (recipients(store, key_id), seals(store, key_id))
    assert 2 == len(reseal(store, key_id, ANNA, "ac").changes)
    assert "ac" == seals(store, key_id)
    assert key == opened(store, key_id, CARL)


def test_a_key_whose_making_was_killed_does_not_exist(store: LocalStore) -> None:
    """Nothing can have been encrypted with it; half a key must not be listed as one."""

    def killed() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(OvertakenStore(store.root, [("/bert", killed)]), "ab")
    assert () == sealing.key_ids(store)


@dataclass(frozen=True)
class BusyStore(LocalStore):
    """A store in which every compare-and-swap loses."""

    def put_bytes(
        self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        if if_match:
            raise ConflictError("again")
        return super().put_bytes(key, data, if_absent=if_absent, if_match=if_match)


def test_a_reseal_that_always_loses_says_so(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must end, and without a seal that the record does not tell of."""
    monkeypatch.setattr(sealing, "_LONGEST_PAUSE_S", 0.0)
    key_id, _ = make(store, "a")
    with pytest.raises(ConflictError, match="run this again"):
        amend(BusyStore(store.root), key_id, ANNA, add="b")
    assert "a" == recipients(store, key_id) == seals(store, key_id)


def test_s3_keeps_keys_as_a_folder_does(s3_root: str, s3_access: S3Access) -> None:
    """Conditional writes, listing and deleting are the server's own there."""
    store = open_store(s3_root, s3_access)
    key_id, key = make(store, "ab")
    record = reseal(store, key_id, ANNA, "ac")
    assert ("ac", "ac") == (recipients(store, key_id), seals(store, key_id))
    assert [key, key] == [opened(store, key_id, own) for own in (ANNA, CARL)]
    assert 2 == len(record.changes)
    assert (key_id,) == sealing.key_ids(store)
    with pytest.raises(SealingError, match=r"was removed .*: anna, carl$"):
        opened(store, key_id, BERT)


# Files


def test_a_private_key_is_made_once_and_private(tmp_path: Path) -> None:
    """Overwritten, it would be the last that opened what is sealed to it."""
    path = tmp_path / "keys/anna.key"
    path.parent.mkdir()
    umask = os.umask(0o777)
    try:
        key = sealing.generate_private_key(path)
    finally:
        os.umask(umask)
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert key.public_key == sealing.load_private_key(path).public_key
    before = path.read_text()
    assert f"# public key: {key.public_key}" == before.splitlines()[0]
    with pytest.raises(SealingError, match="keys are never overwritten"):
        sealing.generate_private_key(path)
    assert before == path.read_text()
    assert ["anna.key"] == os.listdir(path.parent)


@pytest.mark.fault(
    "Secrets", "a private key that other users can open", "refused, with the command that mends it"
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o610])
def test_a_private_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever read it opens every build; a silent chmod would hide that."""
    path = tmp_path / "key"
    sealing.generate_private_key(path)
    path.chmod(mode)
    with pytest.raises(SealingError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        sealing.load_private_key(path)


def test_behind_a_link_it_is_the_file_that_must_be_private(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links; the link's own mode says nothing."""
    target, link = tmp_path / "key", tmp_path / "link"
    key = sealing.generate_private_key(target)
    link.symlink_to(target)
    assert key.public_key == sealing.load_private_key(link).public_key
    target.chmod(0o644)
    with pytest.raises(SealingError, match="is open to other users"):
        sealing.load_private_key(link)


@pytest.mark.parametrize("made", ["file", "link", "dangling", "folder"])
def test_nothing_is_written_through_or_over_what_is_there(tmp_path: Path, made: str) -> None:
    """A link put there by another user would carry the key to where they read it."""
    path, elsewhere = tmp_path / "key", tmp_path / "elsewhere"
    if made == "file":
        path.write_text("mine")
    elif made == "folder":
        path.mkdir()
    else:
        if made == "link":
            elsewhere.write_text("mine")
        path.symlink_to(elsewhere)
    before = sorted(os.listdir(tmp_path))
    for write in (
        sealing.generate_private_key,
        lambda path: sealing.write_keyfile(DataKey(RAW), path),
    ):
        with pytest.raises(SealingError, match=f"{path}: there is something of that name"):
            write(path)
    assert before == sorted(os.listdir(tmp_path))
    assert not path.is_file() or "mine" == path.read_text()


def test_a_keyfile_is_the_raw_key_and_private(tmp_path: Path) -> None:
    """vLLM reads all of the file as the key: a newline would be part of it."""
    path = tmp_path / "keyfile"
    with DataKey(RAW) as key:
        sealing.write_keyfile(key, path)
    assert RAW == path.read_bytes()
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert ["keyfile"] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        SECRETS["anna"].hex(),
        base64.b64encode(SECRETS["anna"]).decode(),
        f"# Anna's\n\nX25519-PRIVATE-KEY:{base64.b64encode(SECRETS['anna']).decode()}\n",
    ],
)
def test_a_private_key_is_read_from_file_or_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Secret stores hand out either form; a file that was named goes before the variable."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(text)
    assert PUBLIC["anna"] == sealing.load_private_key(path).public_key
    monkeypatch.setenv(PRIVATE_KEY_VARIABLE, text)
    assert PUBLIC["anna"] == sealing.load_private_key().public_key
    path.write_text(SECRETS["bert"].hex())
    assert PUBLIC["bert"] == sealing.load_private_key(path).public_key
    monkeypatch.setenv(PRIVATE_KEY_VARIABLE, " ")
    with pytest.raises(SealingError, match=f"set {PRIVATE_KEY_VARIABLE}"):
        sealing.load_private_key()


@pytest.mark.parametrize("text", ["", "s3cret", "z" * 64, "s3cret" * 1000, "é", "s3\ncret"])
def test_a_damaged_private_key_is_refused_without_quoting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Half a key in a log is half a secret, also as the cause of another error."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(SealingError, match=f"file {path} holds no private key") as caught:
        sealing.load_private_key(path)
    assert None is caught.value.__cause__ is caught.value.__context__
    assert not text or text not in str(caught.value)
    if text:
        monkeypatch.setenv(PRIVATE_KEY_VARIABLE, text)
        with pytest.raises(SealingError, match=f"variable {PRIVATE_KEY_VARIABLE} holds no"):
            sealing.load_private_key()


def test_a_path_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """An OSError would not name the way out."""
    (tmp_path / "file").touch()
    for use in (
        lambda: sealing.load_private_key(tmp_path / "absent"),
        lambda: sealing.load_private_key(tmp_path / "file/key"),
        lambda: sealing.generate_private_key(tmp_path / "file/key"),
        lambda: sealing.write_keyfile(DataKey(RAW), tmp_path / "absent/key"),
    ):
        with pytest.raises(
            SealingError,
            match=r"cannot .*; (give|choose)|no private key .*; give|never overwritten",
        ):
            use()
    (tmp_path / "folder").mkdir(0o700)
    with pytest.raises(SealingError, match="Is a directory"):
        sealing.load_private_key(tmp_path / "folder")


@pytest.mark.fault("Secrets", "every error about keys", "no key material in it")
def test_no_error_and_no_log_tells_key_material(
    store: LocalStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole tracebacks, causes included, go to Dagster's event log."""
    caplog.set_level(logging.DEBUG)
    key_id, key = make(store, "ab")
    forged = signed_seal(key_id, "anna", binding("0" * 16, "anna") + key)
    store.put_bytes(layout.seal_key(key_id, "anna"), forged)
    (tmp_path / "there").touch()

    def write_over() -> None:
        with sealing.unseal(store, key_id, BERT, trusted=TRUSTED) as data_key:
            sealing.write_keyfile(data_key, tmp_path / "there")

    tried: list[Callable[[], object]] = [
        lambda: opened(store, key_id, ANNA),
        lambda: opened(store, key_id, CARL),
        lambda: reseal(store, key_id, ANNA, "ac"),
        lambda: amend(store, key_id, BERT, remove=("nobody",)),
        write_over,
    ]
    shown = caplog.text
    for use in tried:
        with pytest.raises(SealingError) as caught:
            use()
        shown += "".join(traceback.format_exception(caught.value))
    for raw in (key, *SECRETS.values()):
        for text in (raw.hex(), base64.b64encode(raw).decode(), repr(raw)[2:-1]):
            assert text not in shown
