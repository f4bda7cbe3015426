# Everything sets itself up: `make train` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := ./core $(sort $(wildcard ./plugins/*/*))
SOURCES := core plugins tests examples benchmarks
export MYPYPATH := core/src:$(subst $(eval) ,:,$(wildcard plugins/*/*/src))
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: train test check format docs clean setup study

$(VENV)/.ready: requirements/run.txt requirements/dev.txt $(wildcard core/pyproject.toml plugins/*/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/run.txt -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(addprefix -e ,$(DISTRIBUTIONS))
	touch $@

setup: $(VENV)/.ready  ## the virtual environment with every distribution of the repository

train: $(VENV)/.ready  ## the main job: FrozenLake from random weights
	$(BIN)/turnwise train examples/frozen_lake.yaml $(ARGS)

test: $(VENV)/.ready  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.ready  ## lint, format, types, import rules, generated docs
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy core/src $(wildcard plugins/*/*/src)
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.ready  ## let ruff write the files
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(VENV)/.ready  ## write the generated pages: the configuration reference and the table of plugins
	$(BIN)/python docs/generate.py

study: $(VENV)/.ready  ## three seeds of the main job, one after the other; writes benchmarks/results/frozen_lake.md
	$(BIN)/python benchmarks/study.py $(ARGS)

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
