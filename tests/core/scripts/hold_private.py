"""Hold a private folder until stdin ends: python hold_private.py [memory].

Prints `held FOLDER`, or the error.
"""

import sys

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.core.scratch import private_folder


def main() -> None:
    try:
        with private_folder(in_memory="memory" in sys.argv) as folder:
            (folder / "keys").write_text("x")
            print(f"held {folder}", flush=True)
            sys.stdin.read()
    except PreflightError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
