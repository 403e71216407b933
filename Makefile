# `make run` sets up .venv and runs the main job; `make test` sets up and tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BACKENDS ?= jax tensorflow torch
# Tests compile the same functions in many processes, and optimizing machine
# code takes longer than it saves.
COMPILING := JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/jax_cache \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 \
	JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.PHONY: run test lint

run: $(VENV)/.installed
	$(BIN)/keras-vit22b probe

# Each backend in a process of its own; those not installed are left out.
test: $(VENV)/.test-installed
	@for backend in $(BACKENDS); do \
		if $(BIN)/python -c "import $$backend" 2>/dev/null; then \
			echo "== $$backend =="; \
			KERAS_BACKEND=$$backend JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 \
				$(COMPILING) $(BIN)/python -m pytest --numprocesses 2 || exit 1; \
		else echo "== $$backend is not installed =="; fi; \
	done

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "Python 3.11 or later is needed: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test-installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test,tpu-check]"
	@touch $@ $(VENV)/.installed
