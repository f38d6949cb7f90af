"""What `tensorize serve` leaves for vLLM's processes, for the builds of real_builds.py."""

import time
from pathlib import Path

from tensorize_assets.core import manifest
from tensorize_assets.core.s3 import S3Settings
from tensorize_assets.core.serving import Serving
from tensorize_assets.core.store import open_store


def serving(
    folder: Path, root: str, into: Path, keyfile: Path | None = None, s3: S3Settings | None = None
) -> Serving:
    """A build whose manifest is in `folder`, below `root`; its file is `into`/serving.json."""
    found = manifest.read_unplaced(open_store(str(folder.parent)), folder.name, None)
    assert found
    reports = into / "reports"
    reports.mkdir(parents=True)
    served = Serving(
        model=found.manifest.model,
        suffix=found.manifest.suffix,
        build_id=found.manifest.build_id,
        commit=found.manifest.snapshot.commit,
        entry=1,
        manifest_sha256=found.sha256,
        evidence_device="cpu",
        root=root,
        directory=f"vllm/tiny/{folder.name}",
        s3=s3,
        folder=str(folder),
        keyfile=str(keyfile) if keyfile else None,
        reports=str(reports),
        began=time.time(),
    )
    served.write(into / "serving.json")
    return served
