"""Arguments for tensorizer, held against the release that is installed, before any work."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from tensorizer import TensorDeserializer, TensorSerializer

from tensorize_assets.core.catalog import (
    REFUSED_DESERIALIZATION_ARGUMENTS,
    REFUSED_SERIALIZATION_ARGUMENTS,
    did_you_mean,
)
from tensorize_assets.core.errors import PreflightError


def check_serialization(given: Mapping[str, Any], where: str) -> None:
    """Raises PreflightError for an argument that TensorSerializer does not take, or we do not."""
    _check(given, TensorSerializer, REFUSED_SERIALIZATION_ARGUMENTS, where)


def check_deserialization(given: Mapping[str, Any], where: str) -> None:
    """Raises PreflightError for an argument that TensorDeserializer does not take, or we do not."""
    _check(given, TensorDeserializer, REFUSED_DESERIALIZATION_ARGUMENTS, where)


def _check(
    given: Mapping[str, Any], taker: type[Any], refused: Mapping[str, str], where: str
) -> None:
    known = [name for name in inspect.signature(taker).parameters if name not in refused]
    for name in given:
        if name in refused:
            raise PreflightError(f"{where}: argument {name}: {refused[name]}")
        if name not in known:
            raise PreflightError(
                f"{where}: {taker.__name__} of the installed tensorizer {version('tensorizer')} "
                f"has no argument {name}{did_you_mean(name, known)} (arguments: {', '.join(known)})"
            )
