# make run     set up, make the tiny model that RECIPE trains, run RECIPE (the main job)
# make model   make the tiny models of the CPU recipes
# make test    set up, run unit and functional tests
# make test-gpu  run the tests that need a GPU on a machine that has one; elsewhere list them with what each needs
# The default stack is that of 3.11; another version only where it is asked for, or 3.11 is missing.
ifndef PYTHON
PYTHON := $(shell python3.11 -c '' >/dev/null 2>&1 && echo python3.11 || echo python3)
endif
# One environment for each Python version, so that PYTHON=python3.12 leaves the default one alone.
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= $(if $(filter 3.11,$(PYTHON_VERSION)),.venv,.venv-$(PYTHON_VERSION))
BIN := $(VENV)/bin
RECIPE ?= examples/configs/recipes/llm/grpo-tiny-moe-cpu.yaml
ARGS ?=

.PHONY: help setup model run test test-unit test-functional test-gpu lint docs bench clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup:
	@tools/setup_env.sh $(PYTHON) $(VENV)

model: setup
	@$(BIN)/python tools/make_tiny_moe.py --all

run: setup
	@$(BIN)/python tools/make_tiny_moe.py --recipe $(RECIPE)
	$(BIN)/nemo-rl-moe run $(RECIPE) $(ARGS)

# Tests train the mixture of experts only; a dense model with random weights is theirs to make.
test: setup
	@$(BIN)/python tools/make_tiny_moe.py
	$(BIN)/python -m pytest $(ARGS)

test-unit: setup
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-functional: setup
	@$(BIN)/python tools/make_tiny_moe.py
	$(BIN)/python -m pytest tests/functional $(ARGS)

# Where there is a GPU, PYTHON or python3 is the GPU stack's (docker/install_gpu_stack.sh): setup would install the CPU's.
test-gpu:
	@for python in $(PYTHON) python3; do \
	  if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    exec $$python -m pytest -m gpu -rs tests $(ARGS); \
	  fi; \
	done; \
	$(MAKE) --no-print-directory setup && $(BIN)/python -m pytest -m gpu -rs tests $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python tools/make_config_docs.py
	$(BIN)/python tools/make_metrics_docs.py

bench: setup
	@$(BIN)/python tools/make_tiny_moe.py
	$(BIN)/python tools/bench_loop.py $(ARGS)

clean:
	rm -rf .venv .venv-* .build runs models
