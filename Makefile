# Every target makes the environment .venv and installs what it needs, and no more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LAB := $(VENV)/.lab
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/aida/backends/*.c src/aida/backends/*.h)

# Processes of the test run. Each uses one thread, or they would compete for the cores.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-integrations test-sharding test-asan test-gpu check format bench docs clean

demo: $(LAB)
	$(BIN)/aida demo

test: $(INSTALLED)
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) -k interpreted

# Tests with the libraries people train with and with JAX, in the same environment.
test-integrations: $(VENV)/.integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m integrations tests/integrations

# All tests of sharded parameters and runs, also those that take minutes.
test-sharding: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'sharding or not sharding' tests/sharding tests/test_lab_sharded.py

$(VENV)/.integrations: $(INSTALLED)
	DS_BUILD_OPS=0 $(PIP) install --quiet --constraint constraints.txt --editable '.[integrations]'
	$(PIP) install --quiet --no-deps 'timm>=1.0.31' # it requires torchvision, which has no build for CPUs in the index
	touch $@

# Builds the C kernel with AddressSanitizer, which ends the process at the first bad access, and runs its tests.
ASAN := build/asan
test-asan: $(INSTALLED)
	CFLAGS='-fsanitize=address -fno-omit-frame-pointer' \
	    $(BIN)/python setup.py --quiet build --build-base $(ASAN) --build-lib $(ASAN)/lib
	PYTHONPATH=$(ASAN)/lib LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 $(PYTEST) \
	    -k 'not reference and not foreach' tests/test_cpu_backend.py tests/test_memory_safety.py \
	    tests/test_between_steps.py tests/test_changed_models.py tests/test_moved_state.py tests/test_scales.py \
	    tests/test_low_precision.py

# Needs a CUDA device. PYTHON_GPU is the interpreter whose torch sees it.
PYTHON_GPU ?= $(PYTHON)
test-gpu:
	PYTHONPATH=src:benchmarks $(PYTHON_GPU) -m pytest -m gpu

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/step_time.py

# The documentation site. A warning ends it; -E reads every page again, or warnings of unchanged pages would be missed.
docs: $(VENV)/.docs
	rm -rf build/site
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs -d build/doctrees . build/site
	@echo "open build/site/index.html"

$(VENV)/.docs: $(LAB)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The package with torch and the extra lab: enough for every command but aida search. pip shows its progress.
$(LAB): $(SOURCES)
	@echo "Creating the environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the packages of the lab into $(VENV). This is needed once and takes a few minutes."
	@$(PIP) install --constraint constraints.txt --editable '.[lab]'
	@touch $@

$(INSTALLED): $(LAB)
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/aida/backends/*.so
