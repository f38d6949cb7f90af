"""The fleet's rows: what a line keeps, what needs a person first, and what channels say now."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_builds import KEY, MODEL, SUFFIX, TRUSTED, build, new_key, put

from tensorize_assets.core import fleet, layout
from tensorize_assets.core.channel import read_channel
from tensorize_assets.core.errors import EvidenceError, ManifestError
from tensorize_assets.core.fleet import FleetRow, Publication, Reload
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.publish import roll_back

NOW = datetime(2026, 6, 10, 12, 0, tzinfo=UTC)


def publication(**fields: Any) -> Publication:
    content = {
        "entry": 5,
        "build": "0123456789ab",
        "commit": "a" * 40,
        "published": NOW - timedelta(days=2),
        "reloaded": NOW - timedelta(days=3),
        "device": "cuda",
        "bytes": 10**9,
        "encryption": "both",
        "signed_by": "f" * 16,
    }
    return Publication.model_validate({**content, **fields})


def row(model: str = "org/a", state: fleet.State = "current", **fields: Any) -> FleetRow:
    return FleetRow(model=model, suffix="v1", state=state, **fields)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def published(store: LocalStore) -> FleetRow:
    """The row of what the channel has now, as the run that published it leaves it."""
    found = read_channel(store, MODEL, SUFFIX, TRUSTED)
    assert found is not None
    current, reload = fleet.look_up(store, found.channel.current, TRUSTED, held=False)
    return FleetRow(
        model=MODEL,
        suffix=SUFFIX,
        state="current",
        current=current,
        found_commit=current.commit,
        reload=reload,
    )


def verified(store: LocalStore, found: FleetRow) -> FleetRow:
    return fleet.verified(store, found, TRUSTED)


@pytest.mark.parametrize("fields", [{}, {"held": True}, {"encryption": "none"}])
def test_a_line_holds_a_whole_publication(fields: dict[str, Any]):
    """It travels as a data version: what is not in it, the table has not."""
    said = publication(**fields)
    assert said == fleet.read_line(fleet.line(said))


def test_the_same_publication_is_the_same_line():
    """A data version that changed would make everything after it look stale."""
    assert fleet.line(publication()) == fleet.line(publication())
    assert "\n" not in fleet.line(publication())


@pytest.mark.parametrize("text", ["", "a" * 40, "entry=1", "entry=x build=y", "a=1 a"])
def test_a_data_version_of_another_making_is_no_line(text: str):
    """Those of earlier releases stand in the event log for ever."""
    assert fleet.read_line(text) is None


def test_what_needs_a_person_comes_first():
    """Of a thousand rows nobody reads the last."""
    rows = [
        row("org/b"),
        row("org/a"),
        row("org/z", "failed"),
        row("org/y", "unpublished"),
        row("org/x", "behind"),
    ]
    assert ["org/y", "org/z", "org/x", "org/a", "org/b"] == [
        one.model for one in fleet.ordered(rows)
    ]


def test_totals_count_each_pair_once():
    """They are plotted over time: a pair that counts twice would be a false alarm."""
    reload = Reload(when=NOW - timedelta(hours=1), device="cpu", passed=False)
    rows = [
        row(current=publication()),
        row("org/b", "failed", current=publication(encryption="none", bytes=1), reload=reload),
        row("org/c", "unpublished"),
    ]
    found = fleet.totals(rows, NOW)
    assert (3, 1, 1, 1) == (found.pairs, found.current, found.failed, found.unpublished)
    assert found.pairs == sum(getattr(found, state) for state in fleet.ORDER)
    assert (10**9 + 1, 1) == (found.bytes, found.encrypted)
    assert (1, 3600.0) == (found.last_reload_failed, found.oldest_reload_seconds)


def test_an_empty_fleet_has_totals():
    """A catalog without models is valid."""
    assert 0 == fleet.totals([], NOW).pairs


def test_a_row_has_every_column():
    """Also that of a pair of which nothing is known."""
    full = fleet.cells(row(current=publication(), found_commit="b" * 40), NOW)
    empty = fleet.cells(row(state="unpublished", in_catalog=False), NOW)
    assert list(fleet.COLUMNS) == list(full) == list(empty)
    assert (True, 2.0, "2026-06-08 12:00") == (
        full["behind"],
        full["age_days"],
        full["published"],
    )
    assert "unpublished, not in the catalog" == empty["state"]


def test_it_is_looked_up_what_speaks_for_a_build(store: LocalStore):
    """Size of all variants, by which evidence, and whose signature."""
    key_id, _ = new_key(store)
    plain, hidden = build(store), build(store, data_key=key_id)
    entry = put(plain, hidden)
    found, reload = fleet.look_up(store, entry, TRUSTED, held=False)
    sizes = [file.size for one in (plain, hidden) for file in one.manifest.files]
    assert (1, sum(sizes), "both", KEY.key_id) == (
        found.entry,
        found.bytes,
        found.encryption,
        found.signed_by,
    )
    assert (True, "cpu", found.reloaded) == (reload.passed, reload.device, reload.when)


@pytest.mark.parametrize("lost", ["manifest", "evidence"])
def test_what_is_gone_is_said(store: LocalStore, lost: str):
    """A build that cannot be served any more must not look well."""
    entry = put(build(store))
    keys = {"manifest": layout.manifest_key(entry.directory), "evidence": entry.evidence_key}
    found = published(store)
    store.delete(keys[lost])
    kind = {"manifest": ManifestError, "evidence": EvidenceError}[lost]
    with pytest.raises(kind, match=entry.build_id):
        fleet.look_up(store, entry, TRUSTED, held=False)
    before = found.model_copy(update={"current": publication(entry=9)})
    assert "is gone" in str(verified(store, before).problem) or "has lost" in str(
        verified(store, before).problem
    )


def test_a_channel_that_a_person_moved_shows_when_it_is_read(store: LocalStore):
    """No run says that somebody rolled back at night."""
    first = put(build(store, "a"))
    put(build(store, "b"))
    before = published(store)
    assert before == verified(store, before)
    roll_back(store, KEY, TRUSTED, model=MODEL, suffix=SUFFIX)
    after = verified(store, before)
    assert after.current is not None
    assert ("held", 3, first.build_id, True) == (
        after.state,
        after.current.entry,
        after.current.build,
        after.behind,
    )


def test_a_channel_that_is_gone_shows_when_it_is_read(store: LocalStore):
    """Whoever serves it finds nothing."""
    put(build(store))
    before = published(store)
    store.delete(layout.channel_key(MODEL, SUFFIX))
    after = verified(store, before)
    assert ("unpublished", "its channel is gone") == (after.state, after.problem)


def test_a_damaged_channel_hides_no_other(store: LocalStore):
    """One line of the table says what is wrong; the command goes on."""
    put(build(store))
    before = published(store)
    store.put_bytes(layout.channel_key(MODEL, SUFFIX), b"{}")
    after = verified(store, before)
    assert ("damaged", before.current) == (after.state, after.current)
    assert layout.channel_key(MODEL, SUFFIX) in str(after.problem)


@pytest.mark.parametrize("what", [layout.MANIFEST, "model-rank-001.tensors"])
def test_a_published_build_that_lost_something_is_damaged(store: LocalStore, what: str):
    """Its channel is as it was, and says that all is well."""
    put(build(store))
    before = published(store)
    found = read_channel(store, MODEL, SUFFIX, TRUSTED)
    assert found is not None
    store.delete(layout.file_key(found.channel.current.directory, what))
    after = verified(store, before)
    assert "damaged" == after.state
    said = "has lost the manifest" if what == layout.MANIFEST else f"{what} is gone"
    assert said in str(after.problem)
