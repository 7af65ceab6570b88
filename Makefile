# Every target makes its own environment in .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/aida/backends/*.c src/aida/backends/*.h)

# Workers of the test run; one thread each, or two processes would fight for the cores.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-integrations test-gpu check format bench clean

demo: $(INSTALLED)
	$(BIN)/aida demo

test: $(INSTALLED)
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) -k interpreted

# Lightning, transformers, accelerate, DeepSpeed and torchao, in the same environment.
test-integrations: $(VENV)/.integrations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m integrations tests/integrations

$(VENV)/.integrations: $(INSTALLED)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[integrations]'
	touch $@

# Needs a CUDA device and a torch that sees it: PYTHON_GPU names the interpreter that has one.
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

$(INSTALLED): $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/aida/backends/*.so
