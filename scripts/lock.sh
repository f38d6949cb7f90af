#!/usr/bin/env bash
# Resolve pyproject.toml anew and write the pins. Takes a minute; downloads no packages.
set -euo pipefail
command -v "$PYTHON" >/dev/null || PYTHON=python3
out=requirements/cpu.txt
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$PYTHON" -m pip install --quiet --dry-run --ignore-installed --report "$report" \
    '.[cpu,demo,dev]' 'setuptools==77.0.3' >/dev/null
"$PYTHON" - "$report" "$out" <<'PY'
import json, sys

# Left out on purpose: see scripts/setup.sh.
SKIP = {"torchvision", "torchaudio", "torchcodec", "triton", "tensorize-assets"}
installs = json.load(open(sys.argv[1]))["install"]
pins = {i["metadata"]["name"].lower().replace("_", "-"): i["metadata"]["version"] for i in installs}
lines = [f"{name}=={pins[name]}" for name in sorted(pins) if name not in SKIP]
header = "# Made by `make lock` from pyproject.toml; edit that instead.\n"
open(sys.argv[2], "w").write(header + "\n".join(lines) + "\n")
PY
