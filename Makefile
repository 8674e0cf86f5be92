# make demo     set everything up and show the whole way once
# make test     set everything up and run the tests
# make lint     check format, style and types
# make bench    measure what the distribution costs
# make docs     write docs/cli.md from the commands
# make setup    .venv with the `linkcpp` command and the patched engine in it; the others do it first
# make test-all the slow tests too, and the engine against an unpatched build
# make clean    remove .venv and all that was made here; the built engine stays in the user's cache folder
#
# PYTHON=python3.12 chooses the interpreter of a new .venv; CMAKE_ARGS passes flags to the engine's build.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/linkcpp-installed
LOG := $(VENV)/setup.log

.DEFAULT_GOAL := help
.PHONY: help setup engine demo test test-all lint bench docs clean

help:
	@sed -n 's/^# \(make [a-z-]*\) */\1\t/p' Makefile

setup: $(INSTALLED)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) is not installed"; echo "hint: apt-get install python3 python3-venv"; exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: Python 3.10 or newer is needed, and $(PYTHON) is `$(PYTHON) -V 2>&1`"; \
	  echo "hint: install a newer one and run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot make virtual environments"; echo "hint: apt-get install python3-venv"; exit 1; } >&2
	@echo "making $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null || { rm -rf $(VENV); \
	  echo "error: $(VENV) could not be made"; echo "hint: is the disk full or read-only?"; exit 1; } >&2

# Quick when the installed engine is the one that patches, shim, flags and compiler ask for: then it does nothing.
engine: $(BIN)/python
	@$(BIN)/python -m bindings.build

# The engine goes first, because it satisfies the requirement of llama-cpp-python that pip would build otherwise.
$(INSTALLED): pyproject.toml $(BIN)/python | engine
	@echo "installing Python packages"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' >$(LOG) 2>&1 || { \
	  if grep -q -i 'no space left' $(LOG); then why='the disk is full'; \
	  elif grep -q -e ConnectionError -e NameResolutionError -e TimeoutError -e ProxyError $(LOG); then \
	    why='no network, or the package index is out of reach'; \
	  else why=`grep -m1 -i '^error' $(LOG)`; fi; \
	  echo "error: the Python packages could not be installed: $$why"; \
	  echo "hint: the whole output is in $(LOG); try again with: make setup"; exit 1; } >&2
	@touch $@

demo: setup
	@$(BIN)/linkcpp demo

test: setup
	@$(BIN)/python -m pytest -q -m "not slow"

test-all: setup
	@$(BIN)/python -m pytest -q
	@$(BIN)/linkcpp engine verify

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: setup
	@$(BIN)/linkcpp bench dispatch
	@$(BIN)/linkcpp bench layer --like qwen3.5-122b
	@$(BIN)/linkcpp bench serving

docs: setup
	@$(BIN)/python -m orchestrator.cli.reference > docs/cli.md.new && mv docs/cli.md.new docs/cli.md

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find orchestrator bindings tests -name __pycache__ -prune -exec rm -rf {} +
