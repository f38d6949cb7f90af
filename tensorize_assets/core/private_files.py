"""Files that hold a secret: read only when nobody else can, and made so that nobody else could.

What is raised never quotes what a file holds.
"""

from __future__ import annotations

import base64
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from tensorize_assets.core.errors import TensorizeAssetsError

SECRET_BYTES = 32

_MAX_BYTES = 4096


def read_private(
    path: Path, what: str, error: type[TensorizeAssetsError], *, mounted: bool = False
) -> str:
    """Return the text of the file at `path`, which is called `what` in messages.

    A link is followed: mounted secrets are links. It is the file behind it that must be private.
    `mounted`: it may also be one that root owns and only a group of this process can read. So does
    Kubernetes mount a Secret for a user that is not root, whatever mode it is told: the group is
    the pod's `fsGroup`, and has no other members.

    Raises `error` when other users can open the file, OSError when it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # Of the open file: the one at the path may be another by the time it is read.
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077 and not (mounted and _is_of_our_group(status)):
            raise error(
                f"the {what} {path} is open to other users (mode {mode:04o}): run "
                f"`chmod 600 {path}`, or make a new key if one of them may have read it"
            )
        text = os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
    return text.decode("ascii", errors="replace")


def _is_of_our_group(status: os.stat_result) -> bool:
    return (
        status.st_uid == 0
        and not status.st_mode & 0o037
        and status.st_gid in (os.getegid(), *os.getgroups())
    )


def create_private(path: Path, write: Callable[[int], None]) -> None:
    """Make the file at `path`, mode 0600, of what `write` puts into its open descriptor.

    It appears complete or not at all, and never in place of another.

    Raises FileExistsError when anything has that name, a dangling link too; OSError when the
    file cannot be made.
    """
    temp = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Whatever the umask took away.
        os.fchmod(descriptor, 0o600)
        write(descriptor)
        os.fsync(descriptor)
        os.link(temp, path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        os.close(descriptor)
        temp.unlink()


def secret_from_text(text: str) -> bytes | None:
    """Return the 32 bytes that `text` gives in base64 or hex, None when it gives no such thing."""
    try:
        if len(text) == 2 * SECRET_BYTES:
            secret = bytes.fromhex(text)
        else:
            secret = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return secret if len(secret) == SECRET_BYTES else None
