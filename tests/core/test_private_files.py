"""Files that hold a secret, as others mount them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorize_assets.core import sealing
from tensorize_assets.core.handover import WORKER_KEY_VARIABLE, seal
from tensorize_assets.core.private_files import read_private
from tensorize_assets.core.sealing import SealingError

# Root gives the file, and a process of another user, a group that nobody else has; any other user
# can only do so with a group of its own, and keeps the file.
_ROOT = os.getuid() == 0
_GROUP = 54321
_OPEN = """
import sys
from tensorize_assets.core.handover import unseal
print(sorted(unseal(sys.stdin.read())))
"""


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, str]:
    """A worker's private key as Kubernetes mounts it with fsGroup, and its public key."""
    path = tmp_path / "private-key"
    made = sealing.generate_private_key(path)
    if _ROOT:
        os.chown(path, 0, _GROUP)
        for folder in (tmp_path, *tmp_path.parents):
            if str(folder).startswith("/tmp/"):
                folder.chmod(0o711)
    path.chmod(0o440)
    return path, made.public_key


def _opened(path: Path, sealed: str, groups: list[int]) -> subprocess.CompletedProcess[str]:
    """What a worker that is not root makes of it."""
    return subprocess.run(
        [sys.executable, "-c", _OPEN],
        input=sealed,
        env={**os.environ, WORKER_KEY_VARIABLE: str(path)},
        capture_output=True,
        text=True,
        extra_groups=groups if _ROOT else None,
    )


def test_a_mounted_key_is_read_by_its_group(key: tuple[Path, str]) -> None:
    """Root's, mode 0440, of the pod's fsGroup: Kubernetes has no stricter way for other users."""
    path, public_key = key
    sealed = seal({"data_key": b"x" * 32}, public_key)
    done = _opened(path, sealed, [_GROUP])
    if _ROOT:
        assert done.stdout == "['data_key']\n", done.stderr
    else:
        # Another owner than root could change it.
        assert "open to other users" in done.stderr


def test_a_group_that_is_not_ours_is_refused(key: tuple[Path, str]) -> None:
    """Whoever is in it could read it; that we could is because we are root."""
    path, public_key = key
    done = _opened(path, seal({"data_key": b"x" * 32}, public_key), [])
    assert "open to other users (mode 0440)" in done.stderr


@pytest.mark.parametrize("mode", [0o444, 0o460, 0o441])
def test_more_than_reading_by_the_group_is_refused(key: tuple[Path, str], mode: int) -> None:
    """A key that a group may change, or all may read, is nobody's alone."""
    path, public_key = key
    path.chmod(mode)
    done = _opened(path, seal({"data_key": b"x" * 32}, public_key), [_GROUP])
    assert f"mode {mode:04o}" in done.stderr


def test_of_other_files_the_group_has_no_say(key: tuple[Path, str]) -> None:
    """A person's own keys are on machines where groups have members."""
    path, _ = key
    with pytest.raises(SealingError, match="open to other users"):
        read_private(path, "key", SealingError)
