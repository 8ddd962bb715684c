# Needs make and a Python of 3.10 or later (PYTHON=python3.12 make verify), nothing else: the rest is installed in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

export OMP_NUM_THREADS ?= 1

.PHONY: verify test faults check compile clean

# The main job: 4 CPU ranks give what one rank gives, forward and backward.
verify: $(INSTALLED)
	$(BIN)/ringattn verify --nproc 4

test: $(INSTALLED)
	$(BIN)/pytest -n 2

# Every fault of every kind, on four real ranks: none may be silent, hang or leave its culprit unnamed.
faults: $(INSTALLED)
	$(BIN)/python tests/faults/table.py

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Every shipped kernel configuration, for cards that need not be here, with the oldest and the newest Triton in use.
compile: $(INSTALLED)
	$(BIN)/python tests/compile_kernels.py --triton 3.7.1
	$(BIN)/python tests/compile_kernels.py --triton 3.6.0

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ringattn needs Python 3.10 or later: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench,interpret]'
	touch $@

clean:
	rm -rf $(VENV) build
