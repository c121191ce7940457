# `make help` lists the targets. PYTHON and PIP_ARGS may be given: make setup PYTHON=python3.12 PIP_ARGS=--no-cache-dir
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := .venv/bin
STAMP := .venv/setup.stamp
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)

define DOWNLOADS
Making .venv (once; again only when pyproject.toml or constraints.txt change). From your Python package index:
  PyTorch   about 200 MB where pip is configured to find a CPU build; else PyPI's build,
            which brings CUDA libraries on Linux x86-64: about 3 GB
  the rest  about 145 MB: the speech libraries, tests and tools
On disk: 1.3 GB with the CPU build. `make demo` also fetches its corpus: 18.3 MB.
endef
export DOWNLOADS

.PHONY: help setup demo test test-long check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[$$()A-Za-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with everything: engine, speech, tests, tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) is missing or older than 3.11 ($$($(PYTHON) --version 2>&1 | head -n 1 || true))." >&2; \
	  echo "Install Python 3.11 or newer, or name one: make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) cannot make virtual environments." >&2; \
	  echo "On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@echo "$$DOWNLOADS"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@# torch by itself first: a changed constraint elsewhere then never fetches it again
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[speech,test,check]'
	@touch $@

demo: setup  ## recordings to word error rate, with a report, in exp/demo
	$(BIN)/antiphon demo --out exp/demo --overwrite $(DEMO_ARGS)

test: setup  ## the tests, less those marked long
	$(BIN)/python -m pytest -m 'not long' $(PYTEST_ARGS)

test-long: export ANTIPHON_NEEDS_SPIN = 1
test-long: setup  ## all tests; leaves a dated result in exp/
	@for tool in spin gcc; do command -v $$tool >/dev/null || { \
	  echo "make test-long: $$tool is missing, which checks the model of the exchange." >&2; \
	  echo "On Debian or Ubuntu: apt-get install $$tool" >&2; exit 2; }; done
	@mkdir -p exp
	@result=exp/test-long-$$(date -u +%Y-%m-%dT%H%M%SZ).txt; \
	$(BIN)/python -c 'import json; from antiphon.records import record; print(json.dumps(record("test-long")))' > $$result; \
	$(BIN)/python -m pytest -v $(PYTEST_ARGS) | tee -a $$result; \
	echo "result: $$result" >&2

check: setup  ## format, lint, strict types, import walls
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_walls.py

clean:  ## remove caches and build leftovers; .venv and exp/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
