"""Hold a private folder until stdin ends; prints `held FOLDER`, or the error."""

import sys

from tensorize_assets.core.errors import PreflightError
from tensorize_assets.worker.access import private_folder


def main() -> None:
    try:
        with private_folder() as folder:
            (folder / "keys").write_text("x")
            print(f"held {folder}", flush=True)
            sys.stdin.read()
    except PreflightError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main()
