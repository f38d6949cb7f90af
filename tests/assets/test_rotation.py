"""A new data key: the build is encrypted anew, reloaded and published, and never sharded again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chain_home import MODEL, NO_WORKER, Home, Run, stand_in, weights
from typer.testing import CliRunner

import tensorize_assets.definitions
from tensorize_assets import cli
from tensorize_assets.assets import published as publishing
from tensorize_assets.core import build_keys, layout, rotation, sealing
from tensorize_assets.core.channel import ChannelEntry
from tensorize_assets.core.errors import HistoryError, StoreError
from tensorize_assets.core.manifest import read_manifest
from tensorize_assets.core.rotation import Rotation
from tensorize_assets.core.sealing import PrivateKey, SealingError
from tensorize_assets.demo.hub_server import LocalHub

DAGSTER_YAML = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"
CONFIG = {"peft_type": "LORA", "base_model_name_or_path": MODEL, "r": 8, "target_modules": ["q"]}
ADAPTER: dict[str, bytes | Path] = {
    "adapter_config.json": json.dumps(CONFIG).encode(),
    "adapter_model.safetensors": weights(b"pirate"),
}
LISTED = [{"name": "pirate", "repo": "tiny/pirate", "revision": "main"}]

MakeHome = Callable[[str], Home]


def private(home: Home) -> PrivateKey:
    return sealing.load_private_key(home.folder / "keys" / "private.key")


def write_catalog(home: Home, encryption: str, **fields: object) -> None:
    profile = {"adapters": LISTED, "encryption": encryption}
    recipients = {"home": private(home).public_key}
    home.write_catalog({MODEL: {"v1": profile}}, **{"recipients": recipients, **fields})


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, first_files: dict[str, bytes | Path]
) -> Iterator[dict[str, Home]]:
    """Homes with a published build, by their profile's encryption."""
    homes: dict[str, Home] = {}
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        hub.commit("tiny/pirate", ADAPTER)
        for encryption in ("none", "both", "only"):
            home = Home(tmp_path_factory.mktemp(encryption) / "home", hub.endpoint)
            sealing.generate_private_key(home.folder / "keys" / "private.key")
            write_catalog(home, encryption)
            run = home.run(launcher=stand_in())
            assert {} == run.failures
            homes[encryption] = home
        yield homes


@pytest.fixture
def make_home(finished: dict[str, Home], tmp_path: Path) -> MakeHome:
    """Makes a home of one's own after a build with some encryption."""

    def make(encryption: str) -> Home:
        done = finished[encryption]
        return done.copy_to(tmp_path / "home", done.endpoint)

    return make


def begin(home: Home, **changes: Any) -> Rotation:
    own = private(home)
    fields: dict[str, Any] = {"recipients": {"home": own.public_key}, "own": own, "key": home.key}
    return rotation.begin(home.store, MODEL, "v1", trusted=home.trusted, **{**fields, **changes})


def published(home: Home) -> rotation.Published:
    return rotation.published(home.store, MODEL, "v1", home.trusted)


def run(home: Home, starts: Path) -> Run:
    """The chain; `starts` gets to know which workers are started."""
    starts.mkdir(exist_ok=True)
    return home.run(launcher=stand_in(starts))


def started(starts: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_size for path in starts.glob("*.starts")}


def data_keys(home: Home) -> int:
    return len(sealing.key_ids(home.store))


def content(home: Home, directory: str, key_id: str) -> bytes:
    """A shard, opened with a data key as the stand-in workers do."""
    stored = home.store.get_bytes(f"{directory}/model.tensors").data
    with sealing.unseal(home.store, key_id, private(home), trusted=home.trusted) as key:
        stream = key.reveal() * (len(stored) // 32 + 1)
    return bytes(one ^ other for one, other in zip(stored, stream, strict=False))


@pytest.mark.parametrize(
    ("encryption", "workers"),
    [("both", {"encrypt": 1, "reload": 1}), ("only", {"encrypt": 2, "reload": 1})],
)
def test_a_build_gets_a_new_key_and_is_not_sharded_again(
    make_home: MakeHome, tmp_path: Path, encryption: str, workers: dict[str, int]
) -> None:
    """Of the whole chain only encrypting and the reload of its result are left to do.

    With `both` from the plaintext, shards and adapters at once; with `only` from what the earlier
    key opens, each for itself.
    """
    home = make_home(encryption)
    before = published(home)
    begun = begin(home)
    assert (before, True) == (begun.old, begun.made)
    done = run(home, tmp_path / "starts")
    assert {} == done.failures
    assert workers == started(tmp_path / "starts")
    after = published(home)
    assert (begun.new_key_id, before.base_id) == (after.key_id, after.base_id)
    assert before.build_id != after.build_id
    assert [1, 2] == [entry.number for entry in home.channel()]
    new = content(home, after.directory, after.key_id)
    assert new == content(home, before.directory, before.key_id)
    assert home.store.get_bytes(f"{before.directory}/model.tensors").data != (
        home.store.get_bytes(f"{after.directory}/model.tensors").data
    )
    assert ("encrypted_anew_from" in done.metadata("tensorized_shards")) == (encryption == "only")
    again = home.run(launcher=NO_WORKER)
    assert {} == again.failures


@pytest.mark.parametrize("encryption", ["both", "only"])
def test_what_was_begun_is_completed_with_the_same_key(
    make_home: MakeHome, tmp_path: Path, encryption: str
) -> None:
    """Killed after the key was made, after encrypting, or before the channel moved."""
    home = make_home(encryption)
    begun = begin(home)
    keys = data_keys(home)
    for selection in (
        ["hf_snapshot"],
        ["hf_snapshot", "tensorized_shards", "lora_adapters", "encrypted_shards"],
        ["hf_snapshot", "tensorized_shards", "lora_adapters", "encrypted_shards", "artifact"],
    ):
        assert (begun.new_key_id, False) == begin(home)[1:]
        assert home.run(launcher=stand_in(), selection=selection).success
    assert begun.old.build_id == published(home).build_id
    assert (begun.new_key_id, False) == begin(home)[1:]
    assert {} == run(home, tmp_path / "starts").failures
    assert {"reload": 1} == started(tmp_path / "starts")
    assert begun.new_key_id == published(home).key_id
    assert keys == data_keys(home)
    assert begin(home).made


def test_a_key_that_was_begun_is_not_used_when_someone_is_removed_meanwhile(
    make_home: MakeHome,
) -> None:
    """Rotating is how they are shut out, and they may have kept the key that was begun."""
    home = make_home("only")
    own, other = private(home).public_key, sealing.PrivateKey(bytes(range(32))).public_key
    begun = begin(home, recipients={"home": own, "other": other})
    again = begin(home)
    assert again.made
    assert begun.new_key_id != again.new_key_id
    assert (again.new_key_id, False) == begin(home)[1:]


@pytest.mark.parametrize("encryption", ["both", "only"])
def test_a_data_key_that_was_given_up_does_not_come_back(
    make_home: MakeHome, tmp_path: Path, encryption: str
) -> None:
    """Who can write to the store puts back the signed choice of the old key: no run follows it."""
    home = make_home(encryption)
    place = layout.build_key_key(MODEL, "v1", published(home).base_id)
    before = home.store.get_bytes(place).data
    begun = begin(home)
    assert {} == run(home, tmp_path / "starts").failures
    home.store.put_bytes(place, before)
    failed = home.run(launcher=NO_WORKER).failures
    assert "ends at entry 1, but entry 2 was seen here" in failed["hf_snapshot"]
    assert f"`tensorize channel accept {MODEL} v1`" in failed["hf_snapshot"]
    with pytest.raises(HistoryError, match="an old one was put back"):
        begin(home, seen=home.folder / "seen")
    assert begun.new_key_id == published(home).key_id


def test_a_rotation_is_seen_before_any_run_follows(make_home: MakeHome) -> None:
    """The choice may be put back at once."""
    home = make_home("only")
    place = layout.build_key_key(MODEL, "v1", published(home).base_id)
    before = home.store.get_bytes(place).data
    begin(home, seen=home.folder / "seen")
    home.store.put_bytes(place, before)
    failed = home.run(launcher=NO_WORKER).failures
    assert "ends at entry 1, but entry 2 was seen here" in failed["hf_snapshot"]


@pytest.mark.parametrize("encryption", ["both", "only"])
def test_a_run_under_way_does_not_bring_the_old_key_back(
    make_home: MakeHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encryption: str
) -> None:
    """It comes to publish what it built with the old key when the new one is out already."""
    home = make_home(encryption)
    at_once = publishing.publish

    def rotated_meanwhile(*given: Any, **fields: Any) -> ChannelEntry:
        monkeypatch.setattr(publishing, "publish", at_once)
        begin(home)
        assert {} == run(home, tmp_path / "starts").failures
        return at_once(*given, **fields)

    old = published(home)
    monkeypatch.setattr(publishing, "publish", rotated_meanwhile)
    failed = home.run(launcher=NO_WORKER).failures
    assert f"is encrypted with data key {old.key_id}" in failed["published"]
    assert "materialize this partition from hf_snapshot on" in failed["published"]
    assert old.key_id != published(home).key_id
    assert [1, 2] == [entry.number for entry in home.channel()]
    assert {} == home.run(launcher=NO_WORKER).failures


def test_a_killed_worker_leaves_the_channel_and_the_next_run_completes(
    make_home: MakeHome, tmp_path: Path, no_waiting: None
) -> None:
    """It is a step as any other: tried again by itself, and then by hand."""
    home = make_home("only")
    begun = begin(home)
    starts = tmp_path / "starts"
    starts.mkdir()
    # Of two assets, four times each.
    for number in range(1, 9):
        (starts / f"encrypt-{number}").write_text("KILL")
    assert "tensorized_shards" in run(home, starts).failures
    assert begun.old.build_id == published(home).build_id
    assert {} == run(home, tmp_path / "more").failures
    assert begun.new_key_id == published(home).key_id


def test_the_shards_of_an_earlier_key_that_no_one_here_opens_are_made_anew(
    make_home: MakeHome, tmp_path: Path
) -> None:
    """Then the build is still to be had, from its source; the log says why it took longer."""
    home = make_home("only")
    old = begin(home).old
    for key in home.store.list(f"keys/{old.key_id}/"):
        home.store.delete(key)
    done = run(home, tmp_path / "starts")
    assert {} == done.failures
    assert 1 == started(tmp_path / "starts")["shard"]
    assert any("is not encrypted anew: data key" in line for line in done.log)


def test_no_key_is_made_that_nothing_could_be_encrypted_with(make_home: MakeHome) -> None:
    """Said before: a key in the history that leads nowhere would be in the way of every build."""
    home = make_home("only")
    keys, old = data_keys(home), published(home)
    stranger = sealing.PrivateKey(bytes(range(32)))
    with pytest.raises(SealingError, match="add its public key to the catalog's recipients"):
        begin(home, recipients={"other": stranger.public_key})
    recipients = {"other": stranger.public_key, "home": private(home).public_key}
    with pytest.raises(SealingError, match="does not open data key"):
        begin(home, own=stranger, recipients=recipients)
    for key in home.store.list("keys/builds/"):
        home.store.delete(key)
    with pytest.raises(StoreError, match=f"which says that build {old.base_id} has data key"):
        begin(home)
    assert keys == data_keys(home)


def test_what_is_not_published_encrypted_has_no_key_to_change(
    make_home: MakeHome, tmp_path: Path
) -> None:
    """Each is told apart, with what to do."""
    home = make_home("none")
    with pytest.raises(StoreError, match="is not encrypted, and has no data key"):
        begin(home)
    with pytest.raises(StoreError, match="nothing was published"):
        rotation.published(home.store, MODEL, "v2", home.trusted)
    assert 0 == data_keys(home)


def test_two_who_rotate_at_once_make_one_key_current(make_home: MakeHome) -> None:
    """The loser is told to come again, and then goes on with the winner's."""
    home = make_home("both")
    old = published(home)
    stored = build_keys.read_keys(home.store, MODEL, "v1", old.base_id, home.trusted)
    assert stored is not None
    theirs = begin(home)
    with pytest.raises(StoreError):
        build_keys.rotate(home.store, stored, "0123456789abcdef", home.key)
    assert theirs.new_key_id == begin(home).new_key_id


# The assets by themselves


def test_without_encryption_it_says_so(make_home: MakeHome) -> None:
    """A profile that needs nothing encrypted still materializes."""
    done = make_home("none").run(launcher=NO_WORKER)
    assert done.metadata("encrypted_shards")["encryption"].startswith("not applicable")


def test_what_was_encrypted_is_told_and_kept(make_home: MakeHome, tmp_path: Path) -> None:
    """The UI shows the key, who opens it, and what it came to; an interrupted run's files stay."""
    home = make_home("both")
    place = published(home)
    home.store.delete(f"{place.directory}/manifest.json")
    done = home.run(launcher=NO_WORKER)
    assert {} == done.failures
    assert "the files that an earlier, interrupted run encrypted are whole: kept" in done.log
    said = done.metadata("encrypted_shards")
    assert (place.key_id, "home", 2) == (said["data_key"], said["recipients"], said["files"])
    assert said["bytes"] > 1000
    # Damaged without its manifest, it is encrypted again.
    home.store.delete(f"{place.directory}/manifest.json")
    home.store.put_bytes(f"{place.directory}/model.tensors", b"half a file")
    done = run(home, tmp_path / "starts")
    assert {} == done.failures
    assert {"encrypt": 1} == started(tmp_path / "starts")
    said = done.metadata("encrypted_shards")
    assert 0.25 == said["seconds_encrypt"]
    assert said["bytes"] * 4 == said["bytes_per_second"]


def test_only_says_that_shards_were_written_encrypted(make_home: MakeHome) -> None:
    """In the asset that one looks at for it."""
    home = make_home("only")
    done = home.run(launcher=NO_WORKER)
    said = done.metadata("encrypted_shards")
    assert "the shards were written encrypted" == said["encryption"]
    assert published(home).key_id == said["data_key"]
    assert done.metadata("tensorized_shards")["encrypted"]


# The command


def rotate(home: Home, monkeypatch: pytest.MonkeyPatch, *arguments: str, **given: Any) -> Any:
    """`tensorize keys rotate`, by stand-in workers."""
    launcher = given.get("launcher", stand_in())
    monkeypatch.setattr(tensorize_assets.definitions, "chosen", lambda _: launcher)
    monkeypatch.setenv("DAGSTER_HOME", str(home.folder))
    monkeypatch.setenv("HF_ENDPOINT", home.endpoint)
    for name in (sealing.PRIVATE_KEY_VARIABLE, "TENSORIZE_ASSETS_SIGNING_KEY"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(DAGSTER_YAML, home.folder)
    return CliRunner().invoke(cli.app, ["keys", "rotate", *(arguments or (MODEL, "v1"))])


def test_the_command_rotates_and_says_what_became_of_it(
    make_home: MakeHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole of it, at the terminal; no key is told, only its name."""
    home = make_home("only")
    old = published(home)
    done = rotate(home, monkeypatch)
    assert 0 == done.exit_code, done.output
    new = published(home)
    assert f"old data key: {old.key_id} ({old.directory})" in done.stdout
    assert f"new data key: {new.key_id}" in done.stdout
    assert f"published:    {new.directory}, encrypted with the new key" in done.stdout
    assert "still opens with the old key" in done.stdout
    assert old.key_id != new.key_id
    kept = read_manifest(home.store, old.directory, home.trusted)
    assert kept is not None
    for key_id in (old.key_id, new.key_id):
        with sealing.unseal(home.store, key_id, private(home), trusted=home.trusted) as key:
            assert key.reveal().hex() not in done.output
    document = json.loads(rotate(home, monkeypatch, MODEL, "v1", "--json").stdout)
    assert (new.key_id, True) == (document["old_key"], document["moved"])
    assert published(home).key_id == document["new_key"]


def test_the_command_that_could_not_publish_says_how_to_go_on(
    make_home: MakeHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the second time goes on with the key of the first."""
    home = make_home("both")
    old = published(home)
    failed = rotate(home, monkeypatch, launcher=NO_WORKER)
    assert 1 == failed.exit_code
    assert "the channel has not moved" in failed.output
    assert "encrypted_shards" in failed.output
    assert old == published(home)
    keys = data_keys(home)
    done = rotate(home, monkeypatch)
    assert 0 == done.exit_code, done.output
    assert "was made before" in done.output
    assert keys == data_keys(home)


@pytest.mark.parametrize(
    ("encryption", "pair", "code", "says"),
    [
        ("both", ("tiny/nobody", "v1"), 2, "tiny/nobody"),
        ("both", (MODEL, "v2"), 2, "v2"),
        ("none", (MODEL, "v1"), 2, "is not encrypted (`encryption: none`)"),
    ],
)
def test_the_command_refuses_what_has_no_data_key(
    make_home: MakeHome,
    monkeypatch: pytest.MonkeyPatch,
    encryption: str,
    pair: tuple[str, str],
    code: int,
    says: str,
) -> None:
    """Asked wrongly: exit code 2, and nothing is made."""
    home = make_home(encryption)
    before = home.store.list("")
    done = rotate(home, monkeypatch, *pair)
    assert code == done.exit_code
    assert says in done.output
    assert before == home.store.list("")


def test_another_commit_is_published_with_a_key_of_its_own_and_told(
    make_home: MakeHome,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    first_files: dict[str, bytes | Path],
    second_files: dict[str, bytes | Path],
) -> None:
    """The branch may have moved on since: that build has never had the old key."""
    home = make_home("both")
    with LocalHub() as hub:
        hub.commit(MODEL, first_files)
        hub.commit(MODEL, second_files)
        hub.commit("tiny/pirate", ADAPTER)
        done = rotate(Home(home.folder, hub.endpoint), monkeypatch)
    assert 1 == done.exit_code
    assert "another build was published" in done.output
    assert published(home).key_id in done.output


@pytest.mark.parametrize("encryption", ["both", "only"])
def test_show_leads_from_a_build_to_its_data_key(
    make_home: MakeHome, monkeypatch: pytest.MonkeyPatch, encryption: str
) -> None:
    """Who unseals or rotates asks first which key a served build has."""
    home = make_home(encryption)
    monkeypatch.setenv("DAGSTER_HOME", str(home.folder))
    shutil.copy(DAGSTER_YAML, home.folder)
    done = CliRunner().invoke(cli.app, ["show", MODEL, "--json"])
    assert 0 == done.exit_code, done.output
    (row,) = json.loads(done.stdout)["suffixes"]
    served = published(home)
    place = row["directory"] if encryption == "only" else row["encrypted_directory"]
    assert served.key_id == row["data_key"]
    assert place.endswith(served.directory)
    assert [adapter["name"] for adapter in LISTED] == row["adapters"]
    text = CliRunner().invoke(cli.app, ["show", MODEL]).stdout
    assert f"v1 data key: {served.key_id}\n" in text
