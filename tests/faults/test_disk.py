"""A disk that is full, broken or read-only, wherever a build writes to one.

Errors are raised by the system call (`os.write`, `os.fsync`, `os.replace`, `os.link`), in the
step's process and in the worker's; a full disk is a real one in test_full_disk.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from chain import require_whole
from chain_home import MODEL, Home, stand_in
from injection import Rule, environment
from points import ASSETS

from tensorize_assets.core import layout
from tensorize_assets.demo.hub_server import LocalHub, folder_files
from tensorize_assets.resources.launchers.local import SubprocessLauncher


class Write(NamedTuple):
    """One thing that a build writes to a disk, and the system call that puts it there."""

    asset: str
    what: str
    call: str
    path: str
    in_worker: bool = False
    # The run after it notes the mark at its beginning.
    once: bool = False


# In the order of a run.
WRITES = (
    Write("hf_snapshot", "the record", "replace", "records/hf_snapshot/"),
    Write("reference_outputs", "the answers", "write", "/artifacts/references/"),
    Write("tensorized_shards", "the shard's last bytes", "fsync", "/stand-in-", True),
    Write("tensorized_shards", "the shard's name", "replace", "/model.tensors", True),
    Write("artifact", "a config file", "replace", "/config.json"),
    Write("artifact", "the manifest", "write", "/artifacts/vllm/"),
    Write("artifact", "the manifest's name", "link", "/manifest.json"),
    Write("reload_check", "the evidence", "fsync", "/artifacts/evidence/"),
    Write("published", "the channel", "write", "/artifacts/vllm/tiny/llama/."),
    Write("published", "the channel's name", "link", "/vllm/tiny/llama/v1.json"),
    Write("published", "the mark of what was seen", "write", "/seen/", once=True),
)
NUMBERS = {
    errno.ENOSPC: ("No space left on device", "free some space there"),
    errno.EIO: ("Input/output error", "check the disk"),
    errno.EROFS: ("Read-only file system", "mount it writable"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Iterator[Home]:
    """A home in which nothing was built; every test goes on where the one before was stopped."""
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        fresh = Home(tmp_path_factory.mktemp("disk") / "home", hub.endpoint)
        fresh.write_catalog({MODEL: {"v1": {}}})
        yield fresh


def at(write: Write, number: int) -> Any:
    cell = f"{write.asset}, {write.what}: {errno.errorcode[number]} of os.{write.call}"
    outcome = "refused: what, where and what to do; the next run goes on"
    name = f"{write.asset}-{write.what}-{errno.errorcode[number]}"
    return pytest.param(write, number, id=name, marks=pytest.mark.fault("Bad disk", cell, outcome))


@pytest.mark.parametrize(
    ("write", "number"),
    [
        at(write, number)
        for write in WRITES
        for number in list(NUMBERS)[: 1 if write.once else None]
    ],
)
def test_an_error_of_the_disk_is_explained_and_nothing_half_is_seen(
    home: Home, write: Write, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The step that it came to fails, with the call's own words."""
    launcher = stand_in()
    fired = tmp_path / "fired"
    if write.in_worker:
        rule = Rule(f"os:{write.call}", "before", "error", str(fired), write.path, number=number)
        path = launcher.env["PYTHONPATH"].split(os.pathsep)
        env = environment([rule], *map(Path, path))
        launcher = SubprocessLauncher(module=launcher.module, env=env)
    else:
        _fail(monkeypatch, write, number, fired)
    # No further: other branches of the chain would go on.
    run = home.run(launcher=launcher, selection=ASSETS[: ASSETS.index(write.asset) + 1])
    monkeypatch.undo()
    assert fired.exists(), run.failures
    assert [write.asset] == list(run.failures)
    for part in NUMBERS[number]:
        assert part in run.failures[write.asset]
    assert str(home.folder) in run.failures[write.asset]
    require_whole(home)


@pytest.mark.fault("Bad disk", "after all of these", "published; nothing is left behind")
def test_the_last_run_goes_to_the_end(home: Home) -> None:
    run = home.run(launcher=stand_in())
    assert {} == run.failures
    require_whole(home)
    assert 1 == len(home.channel())
    assert [] == [path for path in home.folder.rglob(f"{layout.HIDDEN_PREFIX}*") if path.is_file()]


@pytest.mark.fault(
    "Bad disk",
    "artifact, a shard lost or cut short after it was stored",
    "refused: no manifest names it",
)
def test_a_shard_that_the_disk_lost_is_in_no_manifest(tmp_path: Path, tiny_models: Path) -> None:
    """Of a disk that said it had it."""
    with LocalHub() as hub:
        hub.commit(MODEL, folder_files(tiny_models / "llama"))
        home = Home(tmp_path / "home", hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}})
        before = ASSETS[: ASSETS.index("artifact")]
        assert home.run(launcher=stand_in(), selection=before).success
        (key,) = [key for key in home.store.list("vllm/") if key.endswith(".tensors")]
        shard = home.folder / "artifacts" / key
        os.truncate(shard, shard.stat().st_size - 1)
        run = home.run(launcher=stand_in(), selection=["artifact"])
    assert "gone or has another size" in run.failures["artifact"]
    assert str(shard) in run.failures["artifact"]
    assert not [key for key in home.store.list("vllm/") if key.endswith(layout.MANIFEST)]


def _fail(patch: pytest.MonkeyPatch, write: Write, number: int, fired: Path) -> None:
    """Have a system call of this process fail, once, for paths that match."""
    real = getattr(os, write.call)

    def call(*arguments: Any, **named: Any) -> Any:
        paths = [_path(argument) for argument in arguments]
        if not fired.exists() and any(write.path in path for path in paths):
            fired.touch()
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    patch.setattr(os, write.call, call)


def _path(argument: Any) -> str:
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else str(argument)
