# make demo | demo-all | demo-ui | test | matrix | faults | lint | types | walls | ui | up | bench      (Python 3.11 and make are enough)
PYTHON ?= python3.11
VENV ?= .venv
DAGSTER_HOME ?= $(CURDIR)/dagster_home
# Alerts link to it (DAGSTER_WEBSERVER_URL, if it is another).
UI_PORT ?= 3000
# Where the demo keeps its artifacts: s3 (SeaweedFS, started and stopped by the demo) or disk.
ROOT ?= s3
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
PINS := requirements/cpu.txt
# Apart from the rest: awscrt changes what boto3 does by its mere presence.
CLIENTS := $(abspath $(VENV))/bench-clients
# A new set of pins is a new stamp; an unchanged one makes a second set-up do nothing.
STAMP := $(VENV)/.pins-$(firstword $(shell cat $(PINS) pyproject.toml scripts/setup.sh | sha256sum))

# Two processes of tests, each with at most one engine at a time; a file's tests share its fixtures,
# and tests/conftest.py says which files go first. The log of a CI tells where the time went.
TWO := -n 2 --dist loadfile --no-loadscope-reorder $(if $(TENSORIZE_ASSETS_CI),--durations=15)
# The other release of vLLM that is supported, in an environment of its own.
OTHER_VLLM := 0.32
OTHER_VENV := $(VENV)-vllm-$(OTHER_VLLM)
# What it runs: all that stands on vLLM or transformers. Files are encrypted with torch and tensorizer
# alone, whose pins are the same: `make test` has shown it.
ON_VLLM := tests/worker tests/vllm_plugin tests/serving \
	--ignore=tests/worker/test_encrypt.py --ignore=tests/worker/test_encrypt_shard.py

.PHONY: demo demo-all demo-ui test matrix-setup matrix faults lint types walls ui up bench setup lock clean
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
	@$(PY) -m pytest -q $(TWO) $(ARGS)

matrix-setup:
	@$(MAKE) --no-print-directory setup VENV=$(OTHER_VENV) PINS=requirements/cpu-$(OTHER_VLLM).txt

matrix: matrix-setup
	@echo "matrix: worker, plugin and server, on vLLM $(OTHER_VLLM)"
	@$(OTHER_VENV)/bin/python -m pytest -q $(TWO) $(ON_VLLM) $(ARGS)

faults: setup
	@echo "faults: every fault at every phase, for docs/faults.md; then each defence taken out"
	@rm -f .fault-cells
	@$(PY) -m pytest -q $(TWO) -m "fault or long" --fault-cells .fault-cells tests $(ARGS); \
		tried=$$?; $(PY) tests/fault_table.py .fault-cells docs/faults.md; exit $$tried
	@$(PY) scripts/defences.py --jobs 2

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup
	@$(BIN)/pyright --pythonpath $(PY)

walls: setup
	@$(BIN)/lint-imports

ui: setup
	@echo "ui: Dagster on http://127.0.0.1:$(UI_PORT) over $(DAGSTER_HOME)"
	@DAGSTER_HOME="$(abspath $(DAGSTER_HOME))" DAGSTER_WEBSERVER_URL="$${DAGSTER_WEBSERVER_URL:-http://127.0.0.1:$(UI_PORT)}" \
		$(BIN)/dagster dev --host 127.0.0.1 --port $(UI_PORT) --log-level warning --workspace dagster_home/workspace.yaml

demo-ui: setup
	@echo "demo-ui: a local Hub, S3 and Dagster, whose sensors build what is pushed (Ctrl-C ends it)"
	@$(BIN)/tensorize demo --ui --directory demo --root $(ROOT) --port $(UI_PORT)

up:
	@echo "up: Postgres, an S3 server, the code location, webserver and daemon in Docker"
	@sh deploy/secrets.sh
	@docker compose up --build --detach --wait
	@echo "up: Dagster is at http://127.0.0.1:3000, or at the UI_PORT of .env"

bench: setup
	@echo "bench: tensorizing against vLLM's own script, memory, re-runs, import time"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(CLIENTS) -r requirements/bench.txt
	@CLIENTS=$(CLIENTS) $(PY) -m bench

lock:
	@PYTHON="$(PYTHON)" bash scripts/lock.sh

clean:
	rm -rf demo .pytest_cache .ruff_cache
