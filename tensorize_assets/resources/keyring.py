"""The key that signs manifests, evidence and channels."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
from pydantic import Field

from tensorize_assets.core.signing import SecretKey, load_or_create_signing_key


class KeyringResource(dg.ConfigurableResource["KeyringResource"]):
    """Holds where the key is, never the key: Dagster shows a resource's configuration."""

    signing_key: str = Field(
        description="File of the Ed25519 signing key, mode 0600; made when it does not exist. "
        "The environment variable TENSORIZE_ASSETS_SIGNING_KEY goes before it."
    )

    def key(self) -> SecretKey:
        """The signing key. Raises SignatureError when others can read its file."""
        return load_or_create_signing_key(Path(self.signing_key))

    def trusted(self) -> tuple[str, ...]:
        """The public keys whose signatures count: our own."""
        return (self.key().public_key,)
