"""Write pins, each with the SHA-256 of every file that pip may choose for it: REPORT PINS.

REPORT is what `pip install --report` wrote. Another Linux takes another wheel of a release, by its
processor and its C library; which there are is asked of PyPI. Called by lock.sh.
"""

import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pip._vendor.packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from pip._vendor.packaging.version import InvalidVersion

# Left out on purpose: see scripts/setup.sh.
SKIP = {"torchvision", "torchaudio", "torchcodec", "triton", "tensorize-assets"}
# Installed apart: copies of PyTorch's index have files of their own.
NO_HASH = {"torch"}
_INDEX = "https://pypi.org/simple/{}/"
_JSON = {"Accept": "application/vnd.pypi.simple.v1+json"}
_PYTHON = ("py3", "py2.py3", "py311", "cp311")
_PLATFORMS = ("any", "manylinux", "linux_")


def hashes(name: str, version: str, own: str) -> list[str]:
    """The SHA-256 of each file of a release that could be installed; at least `own`."""
    try:
        request = urllib.request.Request(_INDEX.format(name), headers=_JSON)
        with urllib.request.urlopen(request, timeout=60) as answer:
            files = json.load(answer)["files"]
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        # Of another index alone.
        return [own]
    found = {file["hashes"]["sha256"] for file in files if fits(file["filename"], version)}
    return sorted(found | {own})


def fits(filename: str, version: str) -> bool:
    """Whether a file is of this version, and for Python 3.11 on Linux."""
    try:
        if not filename.endswith(".whl"):
            return str(parse_sdist_filename(filename)[1]) == version
        _, of, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidVersion, InvalidWheelFilename):
        return False
    return str(of) == version and any(
        tag.platform.startswith(_PLATFORMS) and (tag.interpreter in _PYTHON or tag.abi == "abi3")
        for tag in tags
    )


def line(pin: dict) -> str:
    """`name==version`, and the hashes."""
    name = pin["metadata"]["name"].lower().replace("_", "-")
    version = pin["metadata"]["version"]
    if name in NO_HASH:
        return f"{name}=={version}"
    own = pin["download_info"]["archive_info"]["hashes"]["sha256"]
    every = hashes(name, version, own)
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in every)])


def main(report: Path, pins: Path) -> None:
    installs = json.loads(report.read_text())["install"]
    wanted = [
        one for one in installs if one["metadata"]["name"].lower().replace("_", "-") not in SKIP
    ]
    with ThreadPoolExecutor(8) as pool:
        lines = sorted(pool.map(line, wanted))
    header = "# Made by `make lock` from pyproject.toml; edit that instead.\n"
    pins.write_text(header + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
