"""Secrets that are set by the environment: in a variable, or in a file that a variable names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorize_assets.core.errors import CatalogError

ALERT_WEBHOOK = "TENSORIZE_ASSETS_ALERT_WEBHOOK"
HUB_WEBHOOK_SECRET = "TENSORIZE_ASSETS_WEBHOOK_SECRET"
VARIABLES = (ALERT_WEBHOOK, HUB_WEBHOOK_SECRET)
"""Variables that hold a secret; no worker and no server of a model has a use for them."""

_MAX_BYTES = 4096


def secret_setting(name: str, environ: Mapping[str, str]) -> str | None:
    """Return the secret in the variable `name`, or in the file that `{name}_FILE` names, stripped.

    None when neither is set. The file may be readable by others, as those that Docker and
    Kubernetes mount are. What is raised quotes neither the secret nor the file's name, which may
    be the secret, put into the wrong variable.

    Raises CatalogError for a file that cannot be read, or holds no line of text.
    """
    secret = environ.get(name, "").strip()
    if secret:
        return secret
    path = environ.get(f"{name}_FILE", "").strip()
    if not path:
        return None
    where = f"the file that {name}_FILE names"
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "not a path"
        raise CatalogError(f"{where} cannot be read: {said or type(error).__name__}") from None
    try:
        secret = data.decode("utf-8").strip()
    except ValueError:
        secret = ""
    if not secret or len(data) > _MAX_BYTES or len(secret.splitlines()) > 1:
        raise CatalogError(f"{where} must hold the secret, on one line, and nothing else")
    return secret
