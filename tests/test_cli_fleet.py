"""`tensorize fleet`, as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from test_cli import MODEL, SUFFIX
from test_cli import publish as publish_build

from tensorize_assets import partitions
from tensorize_assets.core import fleet, layout
from tensorize_assets.core.channel import ChannelEntry, read_channel
from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.publish import roll_back
from tensorize_assets.core.signing import SecretKey, load_or_create_signing_key

DAGSTER_YAML = Path(__file__).parent.parent / "dagster_home" / "dagster.yaml"
COMMAND = """
import typer
from tensorize_assets.cli_fleet import fleet
app = typer.Typer()
app.command()(fleet)
app()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A Dagster home with two models in its catalog; nothing was built."""
    folder = tmp_path / "home"
    folder.mkdir()
    shutil.copy(DAGSTER_YAML, folder)
    profiles = {"profiles": {SUFFIX: {"reload_device": "cpu"}}}
    content = {
        "root": "artifacts",
        "models": {MODEL: profiles, "org/never-built": profiles},
    }
    (folder / "models.yaml").write_text(yaml.safe_dump(content))
    return folder


def tensorize_fleet(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON document on stdout, its rows by model."""
    found = json.loads(done.stdout)
    return {**found, "fleet": {row["model"]: row for row in found["fleet"]}}


def store_of(home: Path) -> LocalStore:
    return LocalStore(home / "artifacts")


def key_of(home: Path) -> SecretKey:
    return load_or_create_signing_key(home / "keys" / "signing.key")


def publish(home: Path, commit: str) -> ChannelEntry:
    """A build in the channel, and in the event log as the asset `published` leaves it."""
    publish_build(home, commit * 40)
    store, trusted = store_of(home), (key_of(home).public_key,)
    found = read_channel(store, MODEL, SUFFIX, trusted)
    assert found is not None
    entry = found.channel.current
    current, _ = fleet.look_up(store, entry, trusted, held=False)
    key = partitions.partition_key(MODEL, SUFFIX)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        partitions.add_pairs(instance, [MODEL], [SUFFIX])
        for asset, version in (("hf_snapshot", entry.commit), ("published", fleet.line(current))):
            instance.report_runless_asset_event(
                dg.AssetMaterialization(
                    asset, partition=key, tags={"dagster/data_version": version}
                )
            )
    return entry


def test_the_fleet_is_one_table(home: Path):
    """What needs a person is its first line, and the numbers its last."""
    entry = publish(home, "a")
    done = tensorize_fleet(home)
    assert 0 == done.returncode, done.stderr
    lines = done.stdout.splitlines()
    (never,) = (number for number, line in enumerate(lines) if "never-built" in line)
    (built,) = (number for number, line in enumerate(lines) if entry.build_id in line)
    assert never < built
    assert "unpublished" in lines[never]
    assert "current" in lines[built]
    assert "2 pairs, 1 unpublished, 1 current" in lines[-1]


def test_the_same_as_one_document(home: Path):
    """For whoever watches it by a program."""
    entry = publish(home, "a")
    found = document(tensorize_fleet(home, "--json"))
    row = found["fleet"][MODEL]
    assert ("current", False, entry.build_id, entry.number) == (
        row["state"],
        row["behind"],
        row["current"]["build"],
        row["current"]["entry"],
    )
    assert datetime.fromisoformat(row["current"]["published"]) <= datetime.now(UTC)
    assert "unpublished" == found["fleet"]["org/never-built"]["state"]
    assert (2, 1, 1) == tuple(found["totals"][name] for name in ("pairs", "unpublished", "current"))


def test_channels_themselves_are_read_when_it_is_asked_for(home: Path):
    """Somebody rolled back at night, and no run has met that yet."""
    first = publish(home, "a")
    publish(home, "b")
    key = key_of(home)
    roll_back(store_of(home), key, (key.public_key,), model=MODEL, suffix=SUFFIX)
    said = document(tensorize_fleet(home, "--json"))["fleet"][MODEL]
    assert ("current", 2) == (said["state"], said["current"]["entry"])
    done = tensorize_fleet(home, "--json", "--verify")
    assert 0 == done.returncode, done.stderr
    read = document(done)["fleet"][MODEL]
    assert ("held", 3, first.build_id) == (
        read["state"],
        read["current"]["entry"],
        read["current"]["build"],
    )


def test_a_channel_that_cannot_be_read_is_named(home: Path):
    """The others are shown, and a script sees it by the exit code."""
    publish(home, "a")
    store_of(home).put_bytes(layout.channel_key(MODEL, SUFFIX), b"{}")
    done = tensorize_fleet(home, "--verify")
    assert 1 == done.returncode
    assert f"{MODEL} {SUFFIX}: " in done.stderr
    assert layout.channel_key(MODEL, SUFFIX) in done.stderr.replace("\n", "")
    assert "never-built" in done.stdout


def test_without_a_home_it_says_where_one_is_looked_for(tmp_path: Path):
    """The commonest mistake: another folder."""
    done = tensorize_fleet(tmp_path / "nowhere")
    assert 2 == done.returncode
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
