"""The artifact store, as a worker reaches it: settings from its request, keys from the launcher."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings, is_s3, resolve
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.worker import session
from tensorize_assets.worker.scratch import scratch_folder

_MEMORY = "/dev/shm"


def access_of(settings: S3Settings | None) -> S3Access:
    """How S3 is reached: with the launcher's keys, without any as `core.s3.resolve` finds them.

    Raises:
        StoreError: credentials that are half there.
    """
    return resolve(settings, S3Credentials.from_secrets(session.secrets()))


def store_of(root: str, settings: S3Settings | None) -> Store:
    """The store at `root`, a folder or s3://bucket/prefix.

    Raises:
        StoreError: `root` is neither, or credentials are half there.
    """
    return open_store(root, access_of(settings) if is_s3(root) else None)


@contextmanager
def private_folder(*, in_memory: bool = False) -> Generator[Path]:
    """An empty folder that no other user can enter, for what only this process may know.

    It is removed at the end. What a killed process left is, by the next process that has one.
    `in_memory`: for keys, of which no disk keeps what a killed process left, where the host has
    `/dev/shm`; it may be small.

    Raises:
        PreflightError: the place for such folders is not this user's alone.
    """
    user = os.getuid()
    memory = in_memory and os.access(_MEMORY, os.W_OK)
    parent = Path(_MEMORY if memory else tempfile.gettempdir(), f"tensorize-assets-{user}")
    parent.mkdir(mode=0o700, exist_ok=True)
    # Not followed: whoever made a link there could change where it leads.
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise PreflightError(
            f"{parent} is where a worker keeps keys for its ranks, and others can get into it; "
            "remove it, or chmod 700 it if it is this user's"
        )
    # Of a name of its own: two workers may check one artifact, on two devices.
    with scratch_folder(parent, f"reload-{os.getpid()}-{os.urandom(4).hex()}") as folder:
        yield folder
