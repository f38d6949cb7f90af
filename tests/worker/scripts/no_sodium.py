"""Read an encrypted file on a host without libsodium: python no_sodium.py OUT."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import sys
from pathlib import Path
from typing import Any

OPENED, FOUND = ctypes.CDLL.__init__, ctypes.util.find_library


def absent(self: Any, name: Any, *arguments: Any, **options: Any) -> None:
    if name and "libsodium" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    OPENED(self, name, *arguments, **options)


ctypes.CDLL.__init__ = absent  # type: ignore[method-assign]
ctypes.util.find_library = lambda name: None if name == "sodium" else FOUND(name)

import torch  # noqa: E402
from tensorizer import (  # noqa: E402
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
    _crypt,
)

from tensorize_assets.vllm_plugin import sodium  # noqa: E402


def main(out: Path) -> None:
    before = bool(_crypt.available)
    sodium.provide()
    key, file = bytes(range(32)), str(out.with_name("x.tensors"))
    written = {"a": torch.arange(1_000_000.0), "b": torch.ones(3)}
    serializer = TensorSerializer(file, encryption=EncryptionParams(key=key))
    serializer.write_state_dict(written)
    serializer.close()
    decryption = DecryptionParams.from_key(key)
    with TensorDeserializer(file, device="cpu", encryption=decryption, verify_hash=True) as read:
        same = all(torch.equal(read[name], tensor) for name, tensor in written.items())
    out.write_text(json.dumps({"before": before, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
