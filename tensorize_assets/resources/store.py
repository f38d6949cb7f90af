"""The artifact store, as Dagster hands it to assets and the IO manager."""

from typing import NamedTuple

import dagster as dg
from pydantic import Field

from tensorize_assets.core import s3
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.resources.catalog import CatalogResource

_LOCAL_SCRATCH = ".scratch"


class HandedOver(NamedTuple):
    """What a worker needs to open the same store: settings in its request, secrets beside it."""

    settings: s3.S3Settings | None
    secrets: dict[str, bytes]


class StoreResource(dg.ConfigurableResource["StoreResource"]):
    """Opens the catalog's root, or a one-shot build's own: a folder or s3://bucket/prefix.

    Settings of S3 are the catalog's `s3`; credentials come from S3_ACCESS_KEY_ID and
    S3_SECRET_ACCESS_KEY, or from boto3's own chain (AWS_* variables, profiles, web identity,
    instance roles). `resources.s3.S3StoreResource` takes them from dagster-aws's S3Resource.
    """

    catalog: dg.ResourceDependency[CatalogResource]
    scratch: str = Field(
        description="Folder on a local disk, for shards on their way to an object store: room for "
        "two of the largest."
    )

    def root(self) -> str:
        """The catalog's root. Raises CatalogError with every mistake in the catalog."""
        return self.catalog.root()

    def open(self, root: str) -> Store:
        """The store at `root`. Raises StoreError for one that cannot be."""
        return open_store(root, self.access() if s3.is_s3(root) else None)

    def access(self) -> s3.S3Access:
        """How S3 is reached. Raises StoreError for credentials that are half there."""
        return s3.resolve(self.catalog.catalog().s3)

    def hand_over(self, root: str) -> HandedOver:
        """What a worker is given to open `root`."""
        if not s3.is_s3(root):
            return HandedOver(None, {})
        access = self.access()
        secrets = access.credentials.to_secrets() if access.credentials else {}
        return HandedOver(access.settings, secrets)

    def scratch_for(self, root: str) -> str:
        """Where a worker writes before it stores: on the disk of a local root, a file moves."""
        return self.scratch if s3.is_s3(root) else f"{root}/{_LOCAL_SCRATCH}"
