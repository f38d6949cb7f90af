"""The key that signs manifests, evidence and channels, and the one that opens encrypted builds."""

import os
from pathlib import Path

import dagster as dg
from pydantic import Field

from tensorize_assets.core import sealing
from tensorize_assets.core.errors import SignatureError
from tensorize_assets.core.signing import SecretKey, load_or_create_signing_key
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

    def key(self) -> SecretKey:
        """The signing key.

        Raises SignatureError when others can read its file, or when the catalog does not trust it:
        what it signs, nobody would believe.
        """
        key = load_or_create_signing_key(Path(self.signing_key))
        trust = self.catalog.catalog().trust
        if trust is not None and key.public_key not in trust:
            raise SignatureError(
                f"the signing key of this home ({self.signing_key}, id {key.key_id}) is not on the "
                f"catalog's trust list; add its public key {key.public_key} to `trust`, or use a "
                "key that is on it"
            )
        return key

    def trusted(self) -> tuple[str, ...]:
        """The public keys whose signatures count: the catalog's, or else our own alone."""
        trust = self.catalog.catalog().trust
        return trust if trust is not None else (self.key().public_key,)

    def private(self) -> sealing.PrivateKey:
        """The key that opens encrypted builds.

        Raises SealingError when there is none, or others can read its file.
        """
        in_environment = os.environ.get(sealing.PRIVATE_KEY_VARIABLE, "").strip()
        return sealing.load_private_key(None if in_environment else Path(self.private_key))
