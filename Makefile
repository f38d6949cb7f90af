# make demo | demo-all | test | lint | types | walls | ui | bench      (Python 3.11 and make are enough)
PYTHON ?= python3.11
VENV ?= .venv
DAGSTER_HOME ?= $(CURDIR)/dagster_home
# Where the demo keeps its artifacts: s3 (SeaweedFS, started and stopped by the demo) or disk.
ROOT ?= s3
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PINS := requirements/cpu.txt
# Apart from the rest: awscrt changes what boto3 does by its mere presence.
CLIENTS := $(abspath $(VENV))/bench-clients
# A new set of pins is a new stamp; an unchanged one makes a second set-up do nothing.
STAMP := $(VENV)/.pins-$(firstword $(shell cat $(PINS) pyproject.toml scripts/setup.sh | sha256sum))

.PHONY: demo demo-all test lint types walls ui bench setup lock clean
.DEFAULT_GOAL := demo

setup: $(STAMP)

$(STAMP):
	@PYTHON="$(PYTHON)" VENV="$(VENV)" PINS="$(PINS)" bash scripts/setup.sh
	@touch $@

demo: setup
	@echo "demo: SmolLM2-135M-Instruct from a local Hub to a published artifact (TP=1, root: $(ROOT))"
	@$(BIN)/tensorize demo --directory demo --root $(ROOT)

demo-all: setup
	@echo "demo-all: SmolLM2-135M-Instruct at TP=1 and TP=3 (root: $(ROOT))"
	@$(BIN)/tensorize demo --directory demo --root $(ROOT) --all

test: setup
	@echo "test: unit tests, local servers, and real vLLM engines on the CPU"
	@$(PY) -m pytest -q $(ARGS)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/pyright --pythonpath $(PY)

walls: setup
	@$(BIN)/lint-imports

ui: setup
	@echo "ui: Dagster on http://127.0.0.1:3000 over $(DAGSTER_HOME)"
	@DAGSTER_HOME="$(abspath $(DAGSTER_HOME))" $(BIN)/tensorize catalog sync
	@DAGSTER_HOME="$(abspath $(DAGSTER_HOME))" $(BIN)/dagster dev --host 127.0.0.1 --module-name tensorize_assets.definitions

bench: setup
	@echo "bench: tensorizing against vLLM's own script, memory, re-runs, import time"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(CLIENTS) -r requirements/bench.txt
	@CLIENTS=$(CLIENTS) $(PY) -m bench

lock:
	@PYTHON="$(PYTHON)" bash scripts/lock.sh

clean:
	rm -rf demo .pytest_cache .ruff_cache
