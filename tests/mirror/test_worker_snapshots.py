"""What a worker on another machine does with a mirrored snapshot."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, run_script: Callable[..., None]) -> Any:
    """What snapshot_cases.py found."""
    out = tmp_path_factory.mktemp("snapshots")
    run_script("snapshot_cases.py", out, out / "cases.json")
    return json.loads((out / "cases.json").read_text())


def test_what_is_asked_for_is_brought_once(cases: Any) -> None:
    """Small files alone, then all, then those of another commit: each content comes once."""
    assert [["config.json", "copy/config.json"], 1] == cases["small"]
    assert [True, 2] == cases["whole"]
    assert [True, 1] == cases["next"]
    assert 1 == cases["blocks"]
    assert [
        "1 files of tiny/llama came from the mirror, 2 bytes",
        "2 files of tiny/llama came from the mirror, 5,000,000 bytes",
        "1 files of tiny/llama came from the mirror, 6 bytes",
    ] == cases["said"]


def test_workers_of_one_machine_share_a_download(cases: Any) -> None:
    """Of three at once one downloads the three contents."""
    assert [0, 0, 0, 3] == cases["many"]


def test_what_a_killed_worker_had_is_kept(cases: Any) -> None:
    """The next one brings the rest, and removes what is half there."""
    died, before, after = cases["killed"]
    assert signal.SIGKILL == died
    assert (3, 1) == (before, after)
    assert [] == cases["left"]


def test_what_nobody_uses_makes_way(cases: Any) -> None:
    """A node is not filled with models; what a worker uses stays while it does."""
    assert {"gone": [], "files": 1, "used": True} == cases["full"]
    assert cases["no number"].startswith("PreflightError: TENSORIZE_SNAPSHOT_CACHE_BYTES is 'lots'")


def test_what_is_not_the_hubs_is_not_used(cases: Any) -> None:
    """The worker believes the request, and no byte of the store."""
    assert cases["damaged"].startswith("StoreError: model-2.safetensors of tiny/llama cannot be")
    assert 0 == cases["damaged folders"]
    assert [True, 1] == cases["mended"]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no room", "needs 5,000,002 bytes"),
        ("open", "is not this user's alone"),
    ],
)
def test_a_cache_that_cannot_be_used_is_refused(cases: Any, case: str, said: str) -> None:
    """Before anything is downloaded, with the variable that names another one."""
    assert cases[case].startswith("PreflightError: ")
    assert said in cases[case]
    assert "TENSORIZE_SNAPSHOT_CACHE" in cases[case]


def test_a_folder_is_taken_as_it_is(cases: Any) -> None:
    """It needs no root; what is mirrored does."""
    assert cases["folder"]
    assert cases["no root"].startswith("WorkerError: tiny/llama is in the mirror")
