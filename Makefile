# One command each; needs Python 3.11 or later and make, everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := src tests examples benchmarks
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast services check format bench clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

demo: $(VENV)/.installed ## install into .venv and run the demo
	@$(BIN)/dalsegno demo

test: $(VENV)/.installed-dev ## the whole suite
	@$(PYTEST) -q -n $(WORKERS) --dist worksteal

test-fast: $(VENV)/.installed-dev ## the tests that need no other process, in under two minutes
	@$(PYTEST) -q -n $(WORKERS) --dist worksteal -m "not slow"

services: $(VENV)/.installed-dev ## a PostgreSQL and a Kafka for development, until Ctrl-C
	@$(BIN)/python -m tests.services

check: $(VENV)/.installed-dev ## format, lint, types, direction of imports, documentation
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy
	@$(PYTEST) -q -n $(WORKERS) --dist worksteal tests/test_imports.py tests/test_docs.py

format: $(VENV)/.installed-dev ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/.installed-dev ## every script of benchmarks/
	@set -e; for script in benchmarks/[a-z]*.py; do \
	    if [ ! -e "$$script" ]; then echo "No script in benchmarks/." >&2; exit 1; fi; \
	    echo "== $$script"; $(BIN)/python -m "benchmarks.$$(basename "$$script" .py)"; \
	done

clean: ## remove .venv, caches and built files
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# An interrupted installation leaves no stamp, so the next one starts with a clean environment.
$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "There is no '$(PYTHON)'. Install Python 3.11 or later, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Dal Segno needs Python 3.11 or later, '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." \
	         "Name a later one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its module venv or ensurepip is missing." \
	         "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.created
	@echo "Installing dalsegno into $(VENV) ..."
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.created
	@echo "Installing dalsegno and the tools of its tests into $(VENV) ..."
	@$(PIP_INSTALL) --editable ".[dev]"
	@touch $@ $(VENV)/.installed
