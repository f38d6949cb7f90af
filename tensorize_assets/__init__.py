"""Dagster assets that turn Hugging Face models into verified tensors for vLLM.

For other Dagster projects: `build_defs` in Python, the component `TensorizedModels` in YAML.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorize_assets.component import TensorizedModels
    from tensorize_assets.definitions import build_defs

__all__ = ["TensorizedModels", "build_defs"]

__version__ = "0.1.0"

_LAZY = {
    "TensorizedModels": "tensorize_assets.component",
    "build_defs": "tensorize_assets.definitions",
}


def __getattr__(name: str) -> Any:
    # Not imported above: the worker and vLLM's own processes import this package without Dagster.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    # `dg` looks here for components.
    return sorted({*globals(), *_LAZY})
