"""Load an encrypted file on a host without libsodium; the error goes to OUT.

python no_sodium.py OUT
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Nothing(ModuleType):
    """What `libnacl` does where it finds no libsodium: it raises OSError as it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name == "nacl":
            raise OSError("Could not locate nacl lib")
        raise AttributeError(name)


sys.modules["libnacl"] = Nothing("libnacl")

from vllm.model_executor.model_loader.tensorizer import TensorizerConfig  # noqa: E402

from tensorize_assets.vllm_plugin.loader import arguments_of  # noqa: E402


def main(out: Path) -> None:
    keyfile = out.with_name("key")
    keyfile.write_bytes(bytes(32))
    config = TensorizerConfig(tensorizer_uri="/x/model.tensors", encryption_keyfile=str(keyfile))
    try:
        arguments_of(config)
    except ValueError as error:
        out.write_text(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
