"""How a request gets into its pod."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData, PipesParams, encode_param

from tensorize_assets.core.errors import PreflightError

# Linux takes no variable of more than 128 KiB, and etcd no object of more than 1.5 MiB.
_LARGEST_VARIABLE = 96 << 10
_LARGEST_REQUEST = 1 << 20
_FILE = "TENSORIZE_ASSETS_FILE"
_PART = "TENSORIZE_ASSETS_REQUEST_"


class RequestInjector(dg.PipesContextInjector):
    """Puts the request into the pod's environment.

    A large one, such as the tensor list of 126 layers, goes in several variables, which the
    container's shell puts together in the file that Pipes reads.
    """

    unpack = (
        f'"$1" -c \'import base64, os, zlib; name = "{_PART}"; '
        'parts = [os.environ[name + str(at)] for at in range(int(os.environ[name + "PARTS"]))]; '
        f'open(os.environ["{_FILE}"], "wb").write('
        'zlib.decompress(base64.b64decode("".join(parts))))\' || exit; '
        f"for name in $(env | sed -n 's/^\\({_PART}[^=]*\\)=.*/\\1/p'); do "
        'unset "$name"; done; '
    )

    def __init__(self, file: str | None) -> None:
        self.parts: dict[str, str] = {}
        self._file = file

    @staticmethod
    def is_large(extras: Mapping[str, Any]) -> bool:
        """Whether a request with these takes more than one variable."""
        return len(encode_param(extras)) > _LARGEST_VARIABLE

    @contextmanager
    def inject_context(self, context_data: PipesContextData) -> Generator[PipesParams]:
        if self._file is None:
            yield {"data": context_data}
            return
        packed = base64.b64encode(zlib.compress(json.dumps(context_data).encode())).decode()
        if len(packed) > _LARGEST_REQUEST:
            raise PreflightError(
                f"the request takes {len(packed)} bytes, packed, of which a pod's spec holds "
                f"{_LARGEST_REQUEST}: build this model with `launcher: subprocess` or `ray`"
            )
        size = _LARGEST_VARIABLE
        parts = [packed[at : at + size] for at in range(0, len(packed), size)]
        self.parts |= {f"{_PART}{at}": part for at, part in enumerate(parts)}
        self.parts |= {f"{_PART}PARTS": str(len(parts)), _FILE: self._file}
        yield {"path": self._file}

    def no_messages_debug_text(self) -> str:
        return "The worker finds its request in the environment of its container."
