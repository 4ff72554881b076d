# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SANITIZERS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: demo test test-all test-clients test-emulated test-sanitized test-gpu lint bench-gpu \
  bench-honesty embedded-model clean

demo: $(VENV)/.installed
	$(BIN)/ridgeline generate --prompt "def fibonacci(n):" --max-tokens 64 --temperature 0

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest -n 2 --hypothesis-profile explore

test-clients: $(VENV)/.installed-dev
	$(BIN)/python tests/clients/run.py

# The levels of the CPU kernels that this processor lacks, on emulated ones (docs/cpu.md).
test-emulated: $(VENV)/.installed-dev
	$(BIN)/python tests/emulated/run.py $(EMULATED)

# The CPU kernels with the address and undefined-behaviour sanitizers, through their C API. Takes a
# few minutes, most of them for the compiler.
test-sanitized:
	cmake -S . -B build/sanitized -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="$(SANITIZERS)"
	cmake --build build/sanitized
	$(CXX) -std=c++17 $(SANITIZERS) -o build/sanitized/levels csrc/tests/*.cpp -ldl -pthread
	build/sanitized/levels build/sanitized/csrc/cpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# On a machine with a GPU: the checks need nothing but PYTHON with torch, triton and numpy, the tests
# need the development tools as well, and are left out where those are missing.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m ridgeline.bench.gpu --check
	if PYTHONPATH=src $(PYTHON) -c "import sys, pytest, safetensors, tokenizers; \
	  from ridgeline.kernels.gpu import missing_for_gpu; sys.exit(missing_for_gpu() is not None)"; then \
	  PYTHONPATH=src:. $(PYTHON) -m pytest tests/kernels/triton tests/executors/test_gpu.py tests/engine/test_cuda_engine.py; fi

# On a machine with a GPU; needs nothing but PYTHON with torch, triton and numpy.
bench-gpu:
	PYTHONPATH=src $(PYTHON) -m ridgeline.bench.gpu

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
