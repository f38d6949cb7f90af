"""What `tensorize serve` tells the vLLM that it becomes: which build, where it lies, what opens it.

It is a file of this user's alone, and its path an environment variable, which every process of the
engine inherits: vLLM logs its arguments, and the process list shows them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tensorize_assets.core import jsonio, layout, manifest
from tensorize_assets.core.errors import ManifestError, StoreError
from tensorize_assets.core.evidence import Device
from tensorize_assets.core.manifest import Manifest
from tensorize_assets.core.private_files import create_private
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.store import open_store

VARIABLE = "TENSORIZE_ASSETS_SERVING"


class Serving(jsonio.Record):
    """One build as it is served. Holds no secret, but says where some are.

    `root` is a folder, s3://bucket/prefix or an http(s) URL, and `directory` the artifact's key
    below it. `folder` is what vLLM takes for its model: config, tokenizer, and the manifest, which
    was verified. `keyfile` holds the data key of an encrypted build. Each rank leaves a
    `tasks.RankLoad` without tensors in `reports`. `began` is when the command started, in seconds
    since the epoch.
    """

    format: Literal[1] = 1
    model: jsonio.ModelId
    suffix: jsonio.Suffix
    build_id: jsonio.BuildId
    commit: jsonio.Commit
    entry: Annotated[int, Field(ge=1)]
    manifest_sha256: jsonio.Sha256
    evidence_device: Device
    root: str
    directory: jsonio.RelativePath
    s3: S3Settings | None = None
    folder: str
    keyfile: str | None = None
    reports: str
    began: float

    def write(self, path: Path) -> None:
        """Write this to a new file that only its owner can read. Raises OSError."""
        data = jsonio.canonical(jsonio.dump_record(self))

        def put(descriptor: int) -> None:
            with os.fdopen(descriptor, "wb", closefd=False) as stream:
                stream.write(data)

        create_private(path, put)


def current(environ: Mapping[str, str] = os.environ) -> Serving | None:
    """What this process serves; None where `tensorize serve` did not start it.

    Raises StoreError for a file that cannot be read, or is none of ours.
    """
    path = environ.get(VARIABLE)
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StoreError(
            f"cannot read {path}, which says what is served: {error.strerror}; start the server "
            f"with `tensorize serve`, or unset {VARIABLE}"
        ) from error
    return jsonio.load_record(Serving, data, path)


def manifest_of(served: Serving) -> Manifest:
    """The manifest that was verified when the server was started.

    Raises ManifestError where another one lies there by now.
    """
    folder = Path(served.folder)
    found = manifest.read_unplaced(open_store(str(folder.parent)), folder.name, None)
    if found is None or found.sha256 != served.manifest_sha256:
        raise ManifestError(
            f"{folder / layout.MANIFEST} is not the manifest of build {served.build_id} of "
            f"{served.model} {served.suffix} any more; start `tensorize serve` again"
        )
    return found.manifest
