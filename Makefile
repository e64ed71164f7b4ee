# `make demo` and `make test` work on a fresh clone: they create .venv, install the pinned versions and run.
# Needs Python >= 3.11 with venv, and make. Nothing is installed outside the virtual environment.

PYTHON ?= python3
VENV ?= .venv
# Extra arguments for pip when it installs torch, such as an index that holds CPU builds.
TORCH_ARGS ?=
# Test processes; each imports torch, so more than eight cost more than they bring.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -gt 8 ] && n=8; echo $$n)
PYTEST_ARGS ?=
DEMO_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed
# The one pin that is read from the file: torch is installed first and alone, so that no other package picks its version.
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
# One thread a process, since the processes already fill the cores; and a test that reaches for a model hub fails.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format docs conformance clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'
	@echo
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) TORCH_ARGS= PYTEST_ARGS= DEMO_ARGS="

install: $(STAMP)  ## Create the virtual environment and install what constraints.txt pins

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.11 is needed for the pinned versions, this is " + sys.version.split()[0] + "; choose another one with PYTHON=...") if sys.version_info < (3, 11) else None'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt $(TORCH_ARGS) $(TORCH)
	$(PIP) install -c constraints.txt hatchling editables
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[test,docs]'
	@touch $@

demo: $(STAMP)  ## Draw emoji uncached and cached, side by side, with figures
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/cachekit demo $(DEMO_ARGS)

test: $(STAMP)  ## Run the tests
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

lint: $(STAMP)  ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)  ## Rewrite the sources in the project's format and apply the safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)  ## Build the documentation site into site/; any warning fails
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

conformance: $(STAMP)  ## Every contract for every strategy on every denoiser, and the table in docs/ (long)
	$(TEST_ENV) $(PY) -m pytest -n $(JOBS) -m "" tests/conformance $(PYTEST_ARGS)
	$(TEST_ENV) $(PY) -m tests.conformance.table docs/conformance.md

clean:  ## Remove the virtual environment, caches and build outputs
	rm -rf $(VENV) .venv-ci build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
