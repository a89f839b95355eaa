# Everything a fresh clone needs, given a Python, git and make. `make help` lists it.
#
# The environment lives in $(VENV). What is installed there is remembered in files named .installed-*, so that it is done
# once, and again when pyproject.toml or constraints.txt change.

VENV ?= .venv
PYTHON ?=
ACCELERATOR ?= $(shell $(FIND_GPU))
INSTALLER ?= $(shell command -v uv >/dev/null && echo uv || echo pip)
WORKERS ?= 0
ARGS ?=

SHELL := bash
.DEFAULT_GOAL := help
.SUFFIXES:
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: notebooks help train test test-all lint format docs setup setup-dev setup-rehearse constraints clean same-environment

# An NVIDIA GPU that can be used from here: driver and device node are present, or (as on WSL) its tool answers.
FIND_GPU = { [ -d /proc/driver/nvidia ] && ls /dev/nvidia[0-9]*; } >/dev/null 2>&1 \
	|| nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda12 || echo cpu

# Pythons to try, in this order: the usual one first, so that the environment is no surprise.
CANDIDATES = $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11)
SUPPORTED = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
VERSION = import sys; print("%d.%d" % sys.version_info[:2])

TRAIN = $(VENV)/bin/sharded-train train --config=configs/quickstart.py --workdir=runs/quickstart
# A file's tests stay together: they share what they compiled.
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS)$(if $(filter-out 0,$(WORKERS)), --dist loadfile)

ifneq ($(words $(VENV)),1)
$(error VENV is '$(VENV)'; it must be one path without spaces)
endif
ifeq ($(filter $(ACCELERATOR),cpu cuda12 cuda13),)
$(error ACCELERATOR is '$(ACCELERATOR)'; it must be cpu, cuda12 or cuda13)
endif
ifeq ($(filter $(INSTALLER),uv pip),)
$(error INSTALLER is '$(INSTALLER)'; it must be uv or pip)
endif

help:  ## this list
	@echo 'make TARGET, one of:'
	@sed -n -E 's/^([a-z-]+):.*  ## (.*)/  \1\t\2/p' Makefile | expand -t 18
	@echo 'with, if wanted:'
	@echo '  ARGS="..."          options for the command that a target runs, e.g. make test ARGS="-k mesh -x"'
	@echo '  PYTHON=python3.12   the Python to use, 3.11 to 3.13 (now: the first that fits)'
	@echo '  VENV=.venv312       the folder of the environment (now: $(VENV))'
	@echo '  ACCELERATOR=cuda13  what to train on: cpu, cuda12 or cuda13 (now: $(ACCELERATOR))'
	@echo '  INSTALLER=pip       what installs packages: uv or pip (now: $(INSTALLER))'
	@echo '  WORKERS=2           processes that run the tests (now: $(WORKERS), all in one)'

train: setup  ## train configs/quickstart.py into runs/quickstart; again: resume
	$(TRAIN) $(if $(filter cpu,$(ACCELERATOR)),--cpu-devices=8,--config.mesh.tensor=1) $(ARGS)

test: setup-dev  ## run the fast tests
	$(PYTEST) $(ARGS)

test-all: setup-dev  ## run all tests, the slow ones included
	$(PYTEST) -m "" $(ARGS)

notebooks: setup-dev $(VENV)/.installed-notebooks  ## run the notebooks anew; ARGS="01 03": some of them
	$(VENV)/bin/python notebooks/run.py $(ARGS)

lint: setup-dev  ## check style, formatting and types
	@failed=0; for check in 'ruff check' 'ruff format --check' mypy; do \
		echo "$$check"; $(VENV)/bin/$$check || failed=1; \
	done; exit $$failed

format: setup-dev  ## format the code and apply the linter's safe fixes
	$(VENV)/bin/ruff check --fix-only
	$(VENV)/bin/ruff format

docs: $(VENV)/.installed-docs  ## build the documentation into build/docs; broken links are errors
	$(VENV)/bin/python -m mkdocs build --strict --quiet $(ARGS)
	@echo 'build/docs/index.html'

setup: $(VENV)/.installed-$(ACCELERATOR)  ## install what training needs

setup-dev: $(VENV)/.installed-dev  ## install what tests and checks need

setup-rehearse: $(VENV)/.installed-rehearse  ## install what `sharded-train rehearse` compiles with; no GPU needed

constraints:  ## pin anew what pyproject.toml asks for (needs uv; ARGS=--upgrade for newer versions)
	uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras --strip-extras --no-annotate \
		--no-emit-index-url --custom-compile-command "make constraints" --output-file constraints.txt --quiet $(ARGS)

clean:  ## remove the environment and caches, but no run
	@if [ -e $(VENV)/.made ]; then rm -rf $(VENV); echo 'removed $(VENV)'; fi
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

# --- the environment -------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@for candidate in $(CANDIDATES); do \
		"$$candidate" -c '$(SUPPORTED)' 2>/dev/null && found=$$("$$candidate" -c 'import sys; print(sys.executable)') && break; \
	done; \
	if [ -z "$$found" ]; then \
		echo 'make: no Python 3.11, 3.12 or 3.13 found (tried: $(CANDIDATES)).' >&2; \
		echo 'Install one, or name one: make PYTHON=/path/to/python3.12 ...' >&2; exit 1; \
	fi; \
	if [ -e $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ]; then \
		echo 'make: $(VENV) exists and is not a Python environment; choose another folder: make VENV=... ...' >&2; exit 1; \
	fi; \
	echo "Making an environment in $(VENV) with Python $$("$$found" -c '$(VERSION)') ($$found)"; \
	if [ $(INSTALLER) = uv ]; then \
		uv venv --quiet --allow-existing --seed --python "$$found" $(VENV) || exit 1; \
	elif "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
		"$$found" -m venv $(VENV) || exit 1; \
	else \
		echo "make: $$found cannot make environments: it lacks venv or ensurepip." >&2; \
		echo "On Debian and Ubuntu: apt-get install python$$("$$found" -c '$(VERSION)')-venv" >&2; \
		echo 'Elsewhere: have uv on the PATH, or name another Python: make PYTHON=... ...' >&2; exit 1; \
	fi; \
	pwd > $@

# .installed-cpu is the package alone, .installed-EXTRA the package with that extra. Tests compile for GPUs as well, with
# the plugin that there is: two of them in one environment would be in each other's way.
extras = $(if $(filter dev,$1),dev$(comma)docs$(if $(wildcard $(VENV)/.installed-cuda13),,$(comma)rehearse),$1)
comma := ,
$(VENV)/.installed-%: $(VENV)/.made pyproject.toml constraints.txt | same-environment
	@echo 'Installing sharded-train for $* and the packages it needs, as pinned in constraints.txt, with $(INSTALLER):'
	@echo '$(if $(filter cuda%,$*),3 to 5 GB to download the first time: several minutes.,about $(if $(filter dev rehearse,$*),450,250) MB to download the first time: one to three minutes.)'
	@SECONDS=0; set -o pipefail; what='.$(if $(filter cpu,$*),,[$(call extras,$*)])'; \
	progress='s/^ *((Downloading|Using cached) .*[0-9] MB\).*)/  \1/p; s/^Installing collected.*/  Installing them/p'; \
	if [ $(INSTALLER) = uv ]; then \
		uv pip install --python $(VENV)/bin/python --compile-bytecode --constraint constraints.txt --editable "$$what"; \
	else \
		$(VENV)/bin/python -m pip install --progress-bar off --disable-pip-version-check --constraint constraints.txt \
			--editable "$$what" 2>&1 | tee $(VENV)/install.log | sed -u -n -E "$$progress" \
			|| { tail -n 20 $(VENV)/install.log >&2; false; }; \
	fi || { echo 'make: installing failed, for the reason above; when it is mended, run the same command again.' >&2; exit 1; }; \
	echo "Installed in $$SECONDS s."
	@touch $@

# An environment holds the paths of the clone that it was made in and one Python: a moved or copied clone would quietly run
# the code of the old one.
same-environment: | $(VENV)/.made
	@if [ "$$(cat $(VENV)/.made)" != "$$(pwd)" ]; then \
		echo "make: $(VENV) was made for $$(cat $(VENV)/.made), not for $$(pwd); 'make clean' first." >&2; exit 1; \
	fi
	@if [ -n '$(PYTHON)' ] && [ "$$('$(PYTHON)' -c '$(VERSION)')" != "$$($(VENV)/bin/python -c '$(VERSION)')" ]; then \
		echo 'make: $(VENV) has another Python than $(PYTHON); "make clean" first, or choose another folder: VENV=...' >&2; exit 1; \
	fi
