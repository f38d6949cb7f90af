"""Secrets for a worker on another machine: sealed on the way, opened with a key that it has there.

A subprocess inherits a pipe. A job of a cluster does not, and what it is asked with shows in the
cluster's own pages and logs. So secrets travel in the request, encrypted to the public key of the
workers' machines (X25519 sealed boxes); the private key is a file there, such as a mounted secret.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

from nacl import public

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.sealing import SealingError, check_public_key, load_private_key

WORKER_KEY_VARIABLE = "TENSORIZE_WORKER_KEY_FILE"
"""Names the file of the private key on a machine whose workers get secrets by `seal`."""


def seal(secrets: Mapping[str, bytes], public_key: str) -> str:
    """Encrypt `secrets` to `public_key` (base64, as `tensorize keys generate` prints it).

    Raises:
        SealingError: it is no public key.
    """
    encoded = {name: base64.b64encode(secret).decode() for name, secret in secrets.items()}
    box = public.SealedBox(public.PublicKey(base64.b64decode(check_public_key(public_key))))
    return base64.b64encode(box.encrypt(json.dumps(encoded).encode())).decode()


def unseal(sealed: str) -> dict[str, bytes]:
    """Open what `seal` made, with the key in the file that WORKER_KEY_VARIABLE names.

    Raises:
        WorkerError: there is no key, or another.
    """
    path = os.environ.get(WORKER_KEY_VARIABLE)
    if not path:
        raise WorkerError(
            f"the worker was handed sealed secrets and has no key to open them: set "
            f"{WORKER_KEY_VARIABLE} on its machine to the file of the private key whose public key "
            "is the launcher's worker_public_key"
        )
    try:
        key = load_private_key(Path(path), mounted=True)
        opened = key.open(base64.b64decode(sealed, validate=True))
    except (SealingError, ValueError) as error:
        raise WorkerError(f"the worker's secrets cannot be opened: {error}") from None
    if opened is None:
        raise WorkerError(
            f"the worker's secrets are sealed to another key than that in {path} "
            f"({key.public_key}): set the launcher's worker_public_key to this one"
        )
    return {name: base64.b64decode(value) for name, value in json.loads(opened).items()}
