"""Whom this home believes: its keys, the keys it trusts, and what it has seen."""

import os
from pathlib import Path

import dagster as dg
from pydantic import Field

from tensorize_assets.core import sealing
from tensorize_assets.core.signing import (
    SecretKey,
    load_or_create_signing_key,
    require_own_trusted,
)
from tensorize_assets.resources.catalog import CatalogResource


class KeyringResource(dg.ConfigurableResource["KeyringResource"]):
    """Holds where the keys are, never a key: Dagster shows a resource's configuration."""

    catalog: dg.ResourceDependency[CatalogResource]
    signing_key: str = Field(
        description="File of the Ed25519 signing key, mode 0600; made when it does not exist. "
        "The environment variable TENSORIZE_ASSETS_SIGNING_KEY goes before it."
    )
    private_key: str = Field(
        description="File of the X25519 private key that opens encrypted builds, mode 0600, as "
        "`tensorize keys generate` makes it. The environment variable "
        "TENSORIZE_ASSETS_PRIVATE_KEY goes before it."
    )

    seen_folder: str = Field(
        description="Folder in which it is kept how far each channel was seen, so that an old one "
        "that is put back into the store is refused. This home's own; not in the store."
    )

    def key(self) -> SecretKey:
        """The signing key.

        Raises SignatureError when others can read its file, or when the catalog does not trust it:
        what it signs, nobody would believe.
        """
        key = load_or_create_signing_key(Path(self.signing_key))
        trust = self.catalog.catalog().trust
        return key if trust is None else require_own_trusted(key, trust)

    def trusted(self) -> tuple[str, ...]:
        """The public keys whose signatures count: the catalog's, or else our own alone."""
        trust = self.catalog.catalog().trust
        return trust if trust is not None else (self.key().public_key,)

    def seen(self) -> Path:
        """The folder of what was seen of each channel, and of each build's data keys."""
        return Path(self.seen_folder)

    def private(self) -> sealing.PrivateKey:
        """The key that opens encrypted builds.

        Raises SealingError when there is none, or others can read its file.
        """
        in_environment = os.environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
        return sealing.load_private_key(None if in_environment else Path(self.private_key))
