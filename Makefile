# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: bench-honesty demo test test-all lint embedded-model clean

demo: $(VENV)/.installed
	$(BIN)/ridgeline generate --prompt "def fibonacci(n):" --max-tokens 64 --temperature 0

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2

test-clients: $(VENV)/.installed-dev
	$(BIN)/python tests/clients/run.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench-honesty: $(VENV)/.installed-dev
	$(BIN)/python -m ridgeline.bench.honesty

embedded-model: $(VENV)/.installed-dev
	$(BIN)/python -m ridgeline.compress.embedded

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
