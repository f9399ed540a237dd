# Everything works on a fresh clone: each target first sets up what it needs, once, in .venv.
# `make help` lists the targets.

# The Python to build .venv with: 3.11 or newer.
PYTHON ?= python3

# What pip is asked for as PyTorch; options may follow, such as an index of builds without CUDA:
#   make demo TORCH="torch==2.13.0 --index-url ..."
TORCH ?= torch==2.13.0

# More arguments for pytest, such as PYTEST_ARGS="-k layout -x", or "-n 4" with many cores. With two
# there is nothing to gain: the adapter's tests run in groups of processes of their own.
PYTEST_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input install -qq
# Whatever PyTorch the first step brought, later steps may not replace it.
PINS := -c requirements/constraints.txt -c $(VENV)/torch-pin.txt

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

# ------------------------------------------------------------------------------ set-up
# A virtual environment knows its own path and its Python: moved, or made by another Python, it is
# made again. Changed requirements are installed into the one that is there.

identity := $(CURDIR) $(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>&1)
ifneq ($(shell cat $(VENV)/identity 2>/dev/null),$(identity))
.PHONY: $(VENV)/identity
endif

$(VENV)/identity:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'tierstore needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@echo '== set-up: $(VENV) ($(shell $(PYTHON) --version 2>&1))'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@echo '$(identity)' > $@

$(VENV)/torch-pin.txt: $(VENV)/identity
	@echo '== set-up: $(firstword $(TORCH)) (the largest download)'
	@$(PIP) $(TORCH)
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $@

# setuptools comes first, so that tierstore is built by the pinned one and not in an environment of
# its own that pip would have to download.
$(VENV)/demo.done: $(VENV)/torch-pin.txt pyproject.toml requirements/constraints.txt
	@echo '== set-up: tierstore, Megatron-core, zarr'
	@$(PIP) $(PINS) setuptools
	@$(PIP) $(PINS) --no-build-isolation --editable '.[megatron,demo]'
	@touch $@

$(VENV)/test.done: $(VENV)/demo.done
	@echo '== set-up: pytest, hypothesis, import-linter'
	@$(PIP) $(PINS) --no-build-isolation --editable '.[megatron,demo,test]'
	@touch $@

$(VENV)/dev.done: $(VENV)/test.done
	@echo '== set-up: ruff, mypy'
	@$(PIP) $(PINS) --no-build-isolation --editable '.[megatron,demo,test,dev]'
	@touch $@

# Python 3.11 gets Megatron-core 0.16 by ordinary means, since newer ones ask for 3.12. They run on
# 3.11 all the same, so the tests run a newer one too, from a folder of its own. On 3.12 the newer
# one is the installed one.
NEWER_MEGATRON := 0.19.2
newer_megatron_dir := $(VENV)/megatron-core-$(NEWER_MEGATRON)
old_python := $(filter 3.11.%,$(identity))
megatron_dirs := $(if $(old_python),:$(CURDIR)/$(newer_megatron_dir))

$(newer_megatron_dir)/.done: $(VENV)/identity
	@echo '== set-up: Megatron-core $(NEWER_MEGATRON), beside the installed one'
	@rm -rf $(@D)
	@$(PIP) --no-deps --ignore-requires-python --python-version 3.12 --only-binary=:all: \
	  --target $(@D) megatron-core==$(NEWER_MEGATRON)
	@touch $@

# ----------------------------------------------------------------------------- targets

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(VENV)/demo.done ## train a small GPT with its state on each tier, and compare to the bit
	$(PY) -m examples.demo

pytest := $(PY) -m pytest
# A run of its own, since it imports every file that it is given: of the tests, helpers that patch
# torch too. pytest ends with 5 where there is no doctest at all.
doctest := $(PY) -m pytest --doctest-modules tierstore
fast := -m 'not slow and not megatron'

.PHONY: test
test: $(VENV)/test.done $(if $(old_python),$(newer_megatron_dir)/.done) ## all tests, against each Megatron-core
	TIERSTORE_MEGATRON_PATHS='$(megatron_dirs)' $(pytest) $(PYTEST_ARGS)
	$(doctest) || [ $$? -eq 5 ]

.PHONY: test-fast
test-fast: $(VENV)/test.done ## the tests that take seconds
	$(pytest) $(fast) $(PYTEST_ARGS)

# The variable and not `python -O`: pytest-xdist's workers and the tests' children inherit it.
.PHONY: test-optimized
test-optimized: $(VENV)/test.done ## the same under `python -O`: no check may live in an assert
	PYTHONOPTIMIZE=1 $(pytest) $(fast) $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/dev.done ## formatting, lint, types, direction of imports, list of packages
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) -m pytest -q tests/test_packaging.py -k 'package_list or test_link'

.PHONY: docs
docs: $(VENV)/demo.done ## write the pages that are made from the code
	$(PY) -c 'from tierstore.adapters.megatron.options import page; print(page(), end="")' \
	  > docs/OPTIONS.md

.PHONY: format
format: $(VENV)/dev.done ## let ruff format and mend what it safely can
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix

.PHONY: clean
clean: ## remove what the other targets made, .venv too
	rm -rf $(VENV) .demo build dist *.egg-info .*_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
