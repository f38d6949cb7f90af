"""Hold the scratch folder of BUILD in PARENT, and put a file into it, until stdin ends.

    python hold_scratch.py PARENT BUILD

Prints `held FOLDER`, or the error.
"""

import sys
from pathlib import Path

from tensorize_assets.core.errors import WorkerError
from tensorize_assets.core.scratch import scratch_folder


def main(parent: Path, build: str) -> None:
    try:
        with scratch_folder(parent, build) as folder:
            (folder / "half").write_text("x")
            print(f"held {folder}", flush=True)
            sys.stdin.read()
    except WorkerError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
