"""The artifact store, as a worker reaches it: settings from its request, keys from the launcher."""

from __future__ import annotations

from pathlib import Path

from tensorize_assets.core.s3 import S3Access, S3Credentials, S3Settings, is_s3, resolve
from tensorize_assets.core.sealing import DataKey, write_keyfile
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.worker import session


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


def keyfile(folder: Path, where: str) -> Path:
    """Write the data key to a file in `folder`, as vLLM takes it: raw, and only this user's.

    Raises:
        WorkerError: the launcher has handed over none; `where` says for what.
    """
    path = folder / "data-key"
    with DataKey(session.data_key(where)) as data_key:
        write_keyfile(data_key, path)
    return path
