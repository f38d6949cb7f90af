"""What the Hub's own client pushes to the local Hub is served, and still is after a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi

from tensorize_assets.demo.hub_server import LocalHub

MODEL = "org/model"
TOKEN = "token-of-the-pusher"
FIRST = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "old.txt": b"old"}


@pytest.fixture
def pushed(tmp_path: Path) -> Path:
    """The folder that the Hub keeps pushes in."""
    return tmp_path / "pushes"


@pytest.fixture
def open_hub(hub: LocalHub, pushed: Path) -> LocalHub:
    """A Hub with one commit, to which TOKEN may push."""
    hub.commit(MODEL, FIRST)
    hub.accept_pushes(pushed, TOKEN)
    return hub


def push(hub: LocalHub, folder: Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Upload a folder by the command that a user has."""
    command = [Path(sys.executable).with_name("hf"), "upload", MODEL, folder]
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def must_push(hub: LocalHub, folder: Path) -> None:
    """Upload a folder, and say why where that fails."""
    done = push(hub, folder)
    assert 0 == done.returncode, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is pushed: a large file, a small one that is new, and one that is there already."""
    made = tmp_path / "folder"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"\x07" * 100_000)
    (made / "README.md").write_text("# A model\n")
    (made / "config.json").write_bytes(FIRST["config.json"])
    return made


def test_a_push_is_a_commit_on_top_of_what_is_there(open_hub: LocalHub, folder: Path) -> None:
    """Files that were not pushed stay, as in a Git repo."""
    must_push(open_hub, folder)
    files = open_hub.files(MODEL, "main")
    assert files is not None
    assert {"config.json", "model.safetensors", "old.txt", "README.md"} == set(files)
    read = httpx.get(f"{open_hub.endpoint}/{MODEL}/resolve/main/model.safetensors")
    assert b"\x07" * 100_000 == read.content


def test_what_is_there_is_not_uploaded_again(open_hub: LocalHub, folder: Path) -> None:
    """A file of gigabytes that did not change is not sent for a new README."""
    must_push(open_hub, folder)
    (folder / "README.md").write_text("# Another\n")
    must_push(open_hub, folder)
    assert 1 == len(open_hub.requests_for("/lfs-uploads/", "PUT"))


def test_a_restarted_hub_has_the_same_commits(
    open_hub: LocalHub, folder: Path, pushed: Path
) -> None:
    """Otherwise the revision would go back to the first commit, and the channel with it."""
    must_push(open_hub, folder)
    before = HfApi(endpoint=open_hub.endpoint, token=False).model_info(MODEL).sha
    with LocalHub() as again:
        again.commit(MODEL, FIRST)
        again.accept_pushes(pushed, TOKEN)
        assert before == HfApi(endpoint=again.endpoint, token=False).model_info(MODEL).sha


def test_files_can_be_deleted(open_hub: LocalHub) -> None:
    """By the client's own call."""
    api = HfApi(endpoint=open_hub.endpoint, token=TOKEN)
    api.delete_file("old.txt", MODEL)
    assert "old.txt" not in (open_hub.files(MODEL, "main") or {})


def test_another_token_may_not_push(open_hub: LocalHub, folder: Path) -> None:
    """The Hub's content stays as it was."""
    done = push(open_hub, folder, "another")
    assert 0 != done.returncode
    assert set(FIRST) == set(open_hub.files(MODEL, "main") or {})


def test_a_hub_takes_no_pushes_unless_it_is_told_to(hub: LocalHub, folder: Path) -> None:
    """Tests that count requests do not get commits by mistake."""
    hub.commit(MODEL, FIRST)
    assert 0 != push(hub, folder).returncode
    assert set(FIRST) == set(hub.files(MODEL, "main") or {})


def test_damaged_uploads_are_refused(open_hub: LocalHub, pushed: Path) -> None:
    """What another name stands for must not be kept under this one."""
    oid = "0" * 64
    answer = httpx.put(f"{open_hub.endpoint}/lfs-uploads/{oid}", content=b"not that")
    assert 400 == answer.status_code
    assert [] == list(pushed.glob("*"))


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/api/models/org/model/commit/main", b"not json", 400),
        ("/api/models/org/model/commit/main", b'{"key": "strange", "value": {}}', 400),
        ("/api/models/org/model/elsewhere", b"{}", 404),
    ],
)
def test_what_is_no_push_is_refused(
    open_hub: LocalHub, path: str, content: bytes, status: int
) -> None:
    """With a reason, and without a commit."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(open_hub.endpoint + path, content=content, headers=headers)
    assert status == answer.status_code
    assert answer.json()["error"]
    assert set(FIRST) == set(open_hub.files(MODEL, "main") or {})
