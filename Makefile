# Everything sets itself up: `make train` and `make test` work on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DISTRIBUTIONS := ./core $(sort $(wildcard ./plugins/*/*))
SOURCES := conftest.py core plugins tests examples benchmarks
export MYPYPATH := core/src:$(subst $(eval) ,:,$(wildcard plugins/*/*/src))
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

ENGINES := .venv-engines
SGLANG := .venv-sglang
DIST := dist
INSTALL := pip install --quiet --disable-pip-version-check

.PHONY: train train-async test fuzz check format docs wheels clean setup study setup-engines test-engines matrix

$(VENV)/.ready: requirements/run.txt requirements/dev.txt $(wildcard core/pyproject.toml plugins/*/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements/run.txt -r requirements/dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(addprefix -e ,$(DISTRIBUTIONS))
	touch $@

setup: $(VENV)/.ready  ## the virtual environment with every distribution of the repository

train: $(VENV)/.ready  ## the main job: FrozenLake from random weights
	$(BIN)/turnwise train examples/frozen_lake.yaml $(ARGS)

train-async: $(VENV)/.ready  ## the main job with the next batch played while the trainer trains
	$(BIN)/turnwise train examples/frozen_lake_async.yaml $(ARGS)

test: $(VENV)/.ready  ## all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not matrix" $(ARGS)

fuzz: $(VENV)/.ready  ## the property tests with 1,000 random examples each, others every time (make test: the same 100)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "hypothesis and not matrix" --hypothesis-profile explore $(ARGS)

# DeepSpeed, Megatron Core, Ray and vLLM live in one environment, SGLang with its own pins in another. Installed without dependencies: the
# requirements are complete, and some engines ask for CUDA-linked packages that do not import on a CPU.
$(ENGINES)/.ready: requirements/engines.txt requirements/vision.txt $(wildcard core/pyproject.toml plugins/*/*/pyproject.toml)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/$(INSTALL) --no-deps -r requirements/engines.txt
	$(ENGINES)/bin/$(INSTALL) --no-deps --upgrade --target $(ENGINES)/share/torchvision -r requirements/vision.txt
	$(ENGINES)/bin/$(INSTALL) --no-deps --no-build-isolation $(addprefix -e ,$(DISTRIBUTIONS))
	touch $@

$(SGLANG)/.ready: requirements/sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/$(INSTALL) --no-deps -r requirements/sglang.txt
	touch $@

setup-engines: $(ENGINES)/.ready $(SGLANG)/.ready  ## the two environments of the real engines

test-engines: setup-engines  ## every test of the engines, and the table of what ran (half an hour; ARGS=--short: what CI runs)
	TURNWISE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(ENGINES)/bin/python tests/engines.py $(ARGS)

matrix: setup-engines  ## one YAML through every combination of engines; writes benchmarks/results/matrix.md (an hour)
	TURNWISE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python $(ENGINES)/bin/python benchmarks/matrix.py --write $(ARGS)

check: $(VENV)/.ready  ## lint, format, types, import rules, generated docs
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy core/src $(wildcard plugins/*/*/src)
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.ready  ## let ruff write the files
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(VENV)/.ready  ## write the generated pages: the configuration reference, the table of plugins, the picture of the core
	$(BIN)/python docs/generate.py

wheels: $(VENV)/.ready  ## every distribution as a wheel in dist/: pip install --find-links dist NAME
	rm -f $(DIST)/turnwise*.whl
	$(BIN)/$(INSTALL:install=wheel) --no-deps --no-build-isolation --wheel-dir $(DIST) $(DISTRIBUTIONS)

study: $(VENV)/.ready  ## every cut and estimator on FrozenLake, and Sokoban: about an hour, resumable (ARGS=--write, ARGS=--main-job)
	$(BIN)/python benchmarks/study.py $(ARGS)

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) $(ENGINES) $(SGLANG) runs build dist .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
