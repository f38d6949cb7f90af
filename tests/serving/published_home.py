"""A home with builds of every kind that is served, made by the real chain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tensorize_assets.core import sealing
from tensorize_assets.demo.hub_server import LocalHub, folder_files

# The helpers of the chain's tests; pytest does not put their folder on the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "assets"))

from chain_home import MODEL, Home, with_value

ADAPTER = "poet"
ADAPTERS_SCRIPT = Path(__file__).parents[1] / "worker" / "scripts" / "tiny_adapters.py"


class Published(NamedTuple):
    """A home, and the source of what it published: both commits of the model, and the adapter.

    v1: the first commit in plaintext, then the second both ways, with the adapter. v1-tp2: the
    second commit at TP=2, encrypted only.
    """

    home: Home
    first: Path
    second: Path
    adapter: Path

    @property
    def root(self) -> Path:
        return self.home.store.root


def publish(folder: Path, tiny_models: Path) -> Published:
    """Build and publish everything in `folder`, with real engines."""
    adapters = folder / "adapters"
    subprocess.run(
        [sys.executable, str(ADAPTERS_SCRIPT), str(tiny_models), str(adapters)],
        check=True,
        capture_output=True,
    )
    files = folder_files(tiny_models / "llama")
    weights = (tiny_models / "llama" / "model.safetensors").read_bytes()
    other = {**files, "model.safetensors": with_value(weights, "model.norm.weight", 0x4100)}
    listed = [{"name": ADAPTER, "repo": f"tiny/{ADAPTER}", "revision": "main"}]
    with LocalHub() as hub:
        hub.commit(MODEL, files)
        hub.commit(f"tiny/{ADAPTER}", folder_files(adapters / ADAPTER))
        home = Home(folder / "home", hub.endpoint)
        home.write_catalog({MODEL: {"v1": {}}})
        own = sealing.generate_private_key(home.folder / "keys" / "private.key")
        assert {} == home.run().failures
        hub.commit(MODEL, other)
        home.write_catalog(
            {
                MODEL: {
                    "v1": {"adapters": listed, "encryption": "both"},
                    "v1-tp2": {"tensor_parallel_size": 2, "encryption": "only"},
                }
            },
            recipients={"home": own.public_key},
        )
        assert {} == home.run().failures
        assert {} == home.run(suffix="v1-tp2").failures
    second = _snapshot(folder / "second", other)
    return Published(home, tiny_models / "llama", second, adapters / ADAPTER)


def _snapshot(folder: Path, files: dict[str, bytes | Path]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        (folder / name).write_bytes(data)
    return folder
