"""`tensorize audit` and `tensorize retention`, as processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent / "core"))

from small_builds import KEY, MODEL, SUFFIX, Build, build, put

from tensorize_assets.core import layout
from tensorize_assets.core.local_store import LocalStore

SHARD = "model-rank-000.tensors"
LONG_AGO = (datetime.now(UTC) - timedelta(days=100)).timestamp()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Dagster home with a signing key, whose catalog has a root in it."""
    monkeypatch.delenv("TENSORIZE_ASSETS_SIGNING_KEY", raising=False)
    folder = tmp_path / "home"
    (folder / "keys").mkdir(parents=True)
    with (folder / "keys" / "signing.key").open("wb") as file:
        KEY.write_to(file.fileno())
    (folder / "keys" / "signing.key").chmod(0o600)
    shutil.copy(Path(__file__).parents[1] / "dagster_home" / "dagster.yaml", folder)
    catalog(folder)
    return folder


def catalog(home: Path, **retention: object) -> None:
    """A catalog with another model than the builds': those have a channel, which is enough."""
    content = {
        "root": "root",
        "automation": {"retention": {"keep": 1, **retention}},
        "models": {"org/tiny": {"profiles": {SUFFIX: {"reload_device": "cpu"}}}},
    }
    (home / "models.yaml").write_text(yaml.safe_dump(content))


def published(home: Path, commits: str) -> list[Build]:
    """Builds that were published long ago, and the record that a run of the chain leaves."""
    store = LocalStore(home / "root")
    store.put_bytes(layout.record_key("hf_snapshot", MODEL, SUFFIX), b"{}")
    made = [build(store, commit) for commit in commits]
    for one in made:
        put(one)
    return made


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensorize_assets.cli", *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_an_audit_says_what_it_read(home: Path) -> None:
    """And leaves the record that the nightly one goes by."""
    (made,) = published(home, "a")
    done = command(home, "audit")
    assert 0 == done.returncode, done.stderr
    assert "1 of 1 published directories read" in done.stdout
    assert made.store.stat(layout.audit_key(made.sha256)) is not None


def test_an_audit_of_one_model_marks_and_lifts(home: Path) -> None:
    """What a person does who has restored a file, without waiting for the night."""
    made, _ = published(home, "ab")
    whole = made.store.get_bytes(made.key(SHARD))
    assert whole is not None
    made.store.put_bytes(made.key(SHARD), bytes(len(whole.data)))

    done = command(home, "audit", MODEL, SUFFIX)
    assert 1 == done.returncode
    assert SHARD in done.stderr
    assert f"tensorize rollback {MODEL} {SUFFIX}" in done.stderr
    report = json.loads(command(home, "audit", MODEL, "--json").stdout)
    assert [made.directory] == [one["directory"] for one in report["damaged"]]
    assert "found damaged" in command(home, "rollback", MODEL, SUFFIX).stderr

    made.store.put_bytes(made.key(SHARD), whole.data)
    assert 0 == command(home, "audit", MODEL, SUFFIX).returncode
    assert 0 == command(home, "rollback", MODEL, SUFFIX).returncode


def test_an_audit_of_what_is_not_there_is_asked_wrongly(home: Path) -> None:
    """A typing error is no intact store."""
    done = command(home, "audit", "org/other")
    assert 2 == done.returncode
    assert "nothing of org/other is published" in done.stderr


def old(made: Build) -> None:
    """Let everything in the root have been written long ago."""
    for key in made.store.list(""):
        path = made.store.local_path(key)
        assert path is not None
        os.utime(path, (LONG_AGO, LONG_AGO))


def test_retention_shows_what_would_go_and_removes_it_when_told(home: Path) -> None:
    """The table first; `--delete` is never a default."""
    store = LocalStore(home / "root")
    unpublished = build(store, "d")
    (made,) = published(home, "a")
    old(made)

    done = command(home, "retention")
    assert 0 == done.returncode, done.stderr
    assert "goes" in done.stdout
    assert "it was never published" in done.stdout
    assert "nothing was removed: give --delete" in done.stdout
    assert store.list(f"{unpublished.directory}/")

    report = json.loads(command(home, "retention", "--delete", "--json").stdout)
    assert [store.uri(unpublished.directory)] == report["removed"]
    assert report["removed_bytes"] == report["going_bytes"] > 0
    assert () == store.list(f"{unpublished.directory}/")
    assert "nothing goes" in command(home, "retention").stdout


def test_retention_says_which_channel_it_cannot_read(home: Path) -> None:
    """Nothing of that model goes."""
    made, *_ = published(home, "abc")
    old(made)
    made.store.put_bytes(layout.channel_key(MODEL, SUFFIX), b"{}")
    done = command(home, "retention", "--delete")
    assert f"nothing of {MODEL} goes" in done.stderr
    assert "would go" not in done.stdout
    assert made.store.list(f"{made.directory}/")
