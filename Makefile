# `make demo` on a fresh machine needs Python 3.11 or newer and nothing else. `make help` lists the rest.
VENV   ?= .venv
# The first Python on the path that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# By this exact pin and before anything else: a version range pulls gigabytes of CUDA packages on some machines.
TORCH  ?= torch==2.13.0
PEER   ?= none

BIN  = $(VENV)/bin
PIP  = $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
CORE = $(VENV)/.installed
DEV  = $(VENV)/.installed-dev
# Tests start many interpreters, each of which would compile our modules again if bytecode were not kept.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(REPORT)
BROWSER = $(VENV)/.installed-browser

.DEFAULT_GOAL := help
.PHONY: help demo episodes test check lint format slow chaos gpu vllm launchers view everything bench docs install clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(CORE)  ## install, then train a small model to add on a CPU (two minutes on two cores)
	$(BIN)/rollcall train --fresh

episodes: $(CORE)  ## install, then train the same model in an environment of two turns (two minutes on two cores)
	$(BIN)/rollcall train examples/hidden_number.yaml --fresh

# Two processes, each with whole files: what a file's tests share is made once.
test: $(DEV)  ## the tests, without the slow ones and those that need vLLM or a browser (four minutes on two cores)
	$(PYTEST) -q --numprocesses 2 --dist loadfile

check: lint test  ## linter, imports, types and tests

lint: $(DEV)  ## linter, imports and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)  ## let ruff format the tree
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

slow: $(DEV)  ## the long tests, without `make chaos`, two at a time (an hour on two cores)
	$(PYTEST) -q -rfEs -m "slow and not vllm" --ignore=tests/chaos --numprocesses 2 --dist loadfile --no-loadscope-reorder

chaos: $(DEV)  ## every fault on lab hosts, three labs at a time; ends with a table (about an hour on two cores)
	$(PYTEST) -v -m chaos tests/chaos --numprocesses 3 --maxschedchunk 1

gpu: $(DEV)  ## the tests that need a CUDA device
	$(PYTEST) -q -m gpu

vllm: $(DEV)  ## the tests of the vLLM engine, in the environment of `scripts/setup_peers.sh .peers vllm`
	ROLLCALL_VLLM_PYTHON=$${ROLLCALL_VLLM_PYTHON:-.peers/vllm/bin/python} $(PYTEST) -q -rs -m vllm

launchers: $(DEV)  ## SkyPilot's and dstack's own parsers read what `rollcall launch` renders; SkyPilot runs it on the lab's Slurm (scripts/setup_peers.sh .peers skypilot dstack)
	$(PYTEST) -q -rs -m launchers

view: $(BROWSER)  ## the page in a Chromium (Debian: apt install chromium)
	$(PYTEST) -q -rs -m view

everything: $(DEV)  ## all suites above with what they need, and a table of them for docs/log.md (hours; continues where it was interrupted)
	$(BIN)/python scripts/everything.py

bench: $(DEV)  ## the CPU benchmarks; with PEER=1 against peers (scripts/setup_peers.sh first)
	$(BIN)/python -m benchmarks.grpo_step $(if $(filter none,$(PEER)),--peer none)
	$(BIN)/python -m benchmarks.rollout $(if $(filter none,$(PEER)),--peer none)

docs: $(DEV)  ## write docs/configuration.md and docs/metrics.md again
	$(BIN)/python scripts/write_configuration.py
	$(BIN)/python scripts/write_metrics.py

install: $(CORE)  ## only install

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the path; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# A stamp per set of packages: the next make installs nothing unless pyproject.toml changes.
$(CORE): pyproject.toml | $(BIN)/python
	@echo "installing $(TORCH) (the largest download; minutes on a slow line)"
	@$(PIP) install "$(TORCH)"
	@echo "installing rollcall and what it needs"
	@$(PIP) install "$(TORCH)" --editable ".[view]"
	@touch $@

$(DEV): pyproject.toml | $(CORE)
	@echo "installing what the tests need"
	@$(PIP) install "$(TORCH)" --editable ".[dev,view]"
	@$(PIP) install "$(TORCH)" --editable ".[gym]" 2>/dev/null || echo "reasoning-gym is left out, it needs a C compiler; its tests skip themselves"
	@touch $@

$(BROWSER): pyproject.toml | $(DEV)
	@echo "installing what drives a browser"
	@$(PIP) install "$(TORCH)" --editable ".[dev,view,browser]"
	@touch $@
