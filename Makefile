# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two processes; a file's tests stay in one, so that what they share (a server, an oracle) is made once.
TWO := -n 2 --dist loadfile
# Else each of the hundreds of processes that tests start would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE
SANITIZERS := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: demo test test-all test-changed test-mutants test-clients test-emulated test-sanitized test-gpu \
  test-reliability lint docs bench-gpu bench-honesty embedded-model clean

demo: $(VENV)/.installed
	$(BIN)/ridgeline generate --prompt "$$(printf 'def read_file(path):\n    \042\042\042Return')" --max-tokens 64 --temperature 0

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest $(TWO) -m "not slow"

# The tests of the packages that differ from main.
test-changed: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(TWO) -m "not slow" $$(git diff --name-only $$(git merge-base HEAD main) \
	  | sed -nE 's#^(src/ridgeline|tests)/([a-z_]+)/.*#tests/\2#p' | sort -u | xargs -r ls -d 2>/dev/null)

# Everything, and once more what is not slow where the folders are full of a user's things.
test-all: $(VENV)/.installed-dev lint test-sanitized
	$(BIN)/python -m pytest -n 2 --hypothesis-profile explore -m "not alone"
	$(BIN)/python -m pytest -m alone
	RIDGELINE_TEST_FOLDERS=full $(BIN)/python -m pytest $(TWO) -m "not slow"

# The 40 items of docs/reliability.md at their full counts, or ITEMS of them: item by item, hours in all.
test-reliability: $(VENV)/.installed-dev
	$(BIN)/python -m tests.reliability.catalogue $(ITEMS)

# Small changes of a package that no test notices (CONTRIBUTING.md); without PACKAGE, docs/mutants.md.
test-mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants $(PACKAGE) $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

test-clients: $(VENV)/.installed-dev
	$(BIN)/python tests/clients/run.py

# The levels of the CPU kernels that this processor lacks, on emulated ones (docs/cpu.md).
test-emulated: $(VENV)/.installed-dev
	$(BIN)/python tests/emulated/run.py $(EMULATED)

# The CPU kernels with the address and undefined-behaviour sanitizers, through their C API, and with
# AMX in plain C++. Takes some minutes, most of them for the compiler.
test-sanitized:
	cmake -S . -B build/sanitized -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="$(SANITIZERS)" \
	  -DRL_EMULATED_AMX=ON
	cmake --build build/sanitized
	$(CXX) -std=c++17 $(SANITIZERS) -o build/sanitized/levels csrc/tests/*.cpp -ldl -pthread
	build/sanitized/levels build/sanitized/csrc/cpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/lint_names.py

# The documentation as a site, in build/site.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt mkdocs-material
	$(BIN)/mkdocs build --quiet --strict

# On a machine with a GPU: the checks need nothing but PYTHON with torch, triton and numpy, the tests
# of kernels pytest as well, those of the engine all it imports; what cannot run is left out. Tests
# run after checks that fail, too, and eight at a time where there is pytest-xdist: most of the time
# is that of compilers.
test-gpu:
	@failed=0; \
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu --check || failed=1; \
	if PYTHONPATH=src $(PYTHON) -c "import sys; from importlib.util import find_spec; \
	  from ridgeline.kernels.gpu import missing_for_gpu; \
	  sys.exit(find_spec('pytest') is None or missing_for_gpu() is not None)"; then \
	  several=$$($(PYTHON) -c "import xdist" 2>/dev/null && echo "-n 8"); \
	  export PYTHONPATH=src:.; \
	  $(PYTHON) -m pytest $$several tests/kernels/triton --ignore tests/kernels/triton/test_compiles.py || failed=1; \
	  if $(PYTHON) -c "import llguidance, msgspec, safetensors, tokenizers, zmq" 2>/dev/null; then \
	    $(PYTHON) -m pytest tests/engine/test_cuda_engine.py || failed=1; fi; \
	fi; exit $$failed

# On a machine with a GPU; needs nothing but PYTHON with torch, triton and numpy.
bench-gpu:
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu

bench-honesty: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.honesty

embedded-model: $(VENV)/.installed-dev
	$(BIN)/python -m recipes.embedded --docs docs

# To try it: no torch, and of the kernels only those that this machine prefers.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): packages come, and this machine's kernels are compiled. A minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --config-settings=cmake.define.RL_LEVELS=native --editable ".[server]"
	touch $@

# Everything, the kernels of all levels as well.
$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@echo "Installing into $(VENV): packages come, torch too, and kernels of all levels are compiled. Some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
