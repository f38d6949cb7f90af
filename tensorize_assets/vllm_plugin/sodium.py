"""libsodium for tensorizer, which takes the system's: where there is none, PyNaCl's own."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType
from typing import Any

from nacl import (
    _sodium,  # pyright: ignore[reportAttributeAccessIssue] - compiled
    bindings,
)

_CONSTANTS = (
    "crypto_secretbox_KEYBYTES",
    "crypto_secretbox_MACBYTES",
    "crypto_secretbox_NONCEBYTES",
    "crypto_secretbox_ZEROBYTES",
)


def provide() -> None:
    """Have tensorizer find libsodium, also when it was imported and has not found it.

    tensorizer calls libsodium through the package `libnacl`, which looks for a shared library of
    the system and fails without one. PyNaCl's wheel has libsodium inside its own module, with every
    function that tensorizer 2.10.1 takes (tensorizer/_crypt/_encryption.py), though not with all
    that libnacl asks for when it is imported.
    """
    try:
        import libnacl  # noqa: F401 - importing it is the test
    except OSError:
        stand_in: Any = ModuleType("libnacl")
        stand_in.nacl = ctypes.CDLL(_sodium.__file__)
        for name in _CONSTANTS:
            setattr(stand_in, name, getattr(bindings, name))
        sys.modules["libnacl"] = stand_in
        if looked := sys.modules.get("tensorizer._crypt"):
            importlib.reload(looked)
