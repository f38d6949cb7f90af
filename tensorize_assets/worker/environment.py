"""Process settings that must stand before vLLM is imported."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from tensorize_assets import __version__
from tensorize_assets.core import releases

# Our entry point among `vllm.general_plugins`.
_PLUGIN = "tensorize_assets"

_SETTINGS = {
    # The engine stays in this process at TP=1: half the start-up time, and one process to watch.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Ranks share the cores they are given; vLLM's own binding wants a NUMA node for each rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Everything the worker reads is a local folder; a request to the Hub would be a mistake.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Ranks talk over loopback, also on hosts whose name resolves elsewhere.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def prepare() -> None:
    """Apply the settings; what the user has set stays."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    # A user who names the plugins of a server did not mean to take the worker's loader away.
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and _PLUGIN not in named.split(","):
        os.environ["VLLM_PLUGINS"] = ",".join(filter(None, (named, _PLUGIN)))


def versions() -> dict[str, str]:
    """What a build is made with: whole versions, with local parts. Imports none of it."""
    vllm = releases.installed()
    return {
        "vllm": version(vllm.distribution) if vllm else "none",
        "torch": version("torch"),
        "tensorizer": version("tensorizer"),
        "tensorize_assets": __version__,
        "python": platform.python_version(),
    }
