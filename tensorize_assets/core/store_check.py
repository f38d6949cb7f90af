"""Tries every verb that the product needs of a store, and says what to set where one fails.

Everything is tried under a name of its own that no listing shows, and removed afterwards.
"""

from __future__ import annotations

from pathlib import Path

from tensorize_assets.core.errors import StoreError
from tensorize_assets.core.s3 import S3Access, from_environment, is_s3
from tensorize_assets.core.store_check_bucket import check_bucket
from tensorize_assets.core.store_check_folder import check_folder
from tensorize_assets.core.store_verbs import StoreReport

__all__ = ["StoreReport", "check_store"]


def check_store(root: str, access: S3Access | None = None) -> StoreReport:
    """Try every verb on a folder or s3://bucket/prefix. `access` None: as the environment says.

    What the store refuses is in the report. Raises StoreError for a root that is none, and for
    settings with which nothing can be tried.
    """
    if is_s3(root):
        return check_bucket(root, access or from_environment())
    if "://" in root or not root:
        raise StoreError(f"{root!r} is no store; give s3://bucket/prefix or the path of a folder")
    return check_folder(Path(root).expanduser().absolute())
