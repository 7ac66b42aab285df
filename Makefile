# Two commands do everything, set-up included:  make quickstart   and   make test
.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint clean

BIN := .venv/bin
MODEL := .cache/smollm2-135m-instruct
export OMP_NUM_THREADS ?= 1
export CUDA_DEVICE_MAX_CONNECTIONS ?= 1

help:  ## Show the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup:  ## Make .venv with everything the other commands need
	@bash tools/setup_env.sh

quickstart: setup  ## Train SmolLM2-135M on additions, on two CPU ranks (about 10 minutes); results in runs/quickstart
	@$(BIN)/python tools/prepare_smollm2.py --output $(MODEL)
	@MODEL=$(MODEL) bash examples/quickstart/run.sh

lint: setup  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## Check everything and run all tests
	$(BIN)/python tools/prepare_smollm2.py --output $(MODEL)
	$(BIN)/python -m pytest --numprocesses 2

clean:  ## Remove the environment, caches and runs
	rm -rf .venv .cache runs build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
