"""What these tests share: a store on a disk and one in S3, and a repo with files of all kinds."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tensorize_assets.core.local_store import LocalStore
from tensorize_assets.core.s3 import S3Access
from tensorize_assets.core.store import Store, open_store
from tensorize_assets.demo.hub_server import LocalHub

# Helpers of other folders' tests; pytest does not put them on the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "assets"))
sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

from chain_home import weights

MODEL = "tiny/llama"


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A root on a disk, and one in S3."""
    if request.param == "disk":
        return LocalStore(tmp_path / "root")
    access: S3Access = request.getfixturevalue("s3_access")
    return open_store(request.getfixturevalue("s3_root"), access)


@pytest.fixture
def files() -> dict[str, bytes | Path]:
    """A repo: two files of weights, and small ones, two of them with the same content."""
    content = random.Random(0).randbytes
    return {
        "config.json": b'{"num_attention_heads": 4, "num_key_value_heads": 4}',
        "model-00001-of-00002.safetensors": weights(content(300_000)),
        "model-00002-of-00002.safetensors": weights(content(200_000)),
        "tokenizer.json": b'{"tokenizer": 1}',
        "special/tokenizer.json": b'{"tokenizer": 1}',
    }


@pytest.fixture
def model_hub(hub: LocalHub, files: dict[str, bytes | Path]) -> LocalHub:
    """A Hub that has the repo at its first commit."""
    hub.commit(MODEL, files)
    return hub
