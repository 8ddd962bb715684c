# Needs make and a Python of 3.10 or later (PYTHON=python3.12 make verify), nothing else: the rest is installed in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
OLD_TRITON := .triton36

export OMP_NUM_THREADS ?= 1

.PHONY: verify test check compile clean

# The main job: 4 CPU ranks give what one rank gives, forward and backward.
verify: $(INSTALLED)
	$(BIN)/ringattn verify --nproc 4

test: $(INSTALLED)
	$(BIN)/pytest -n 2

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Every shipped kernel configuration, for cards that need not be here, with both versions of Triton that matter.
compile: $(INSTALLED) $(OLD_TRITON)
	$(BIN)/pytest -n 2 -m compile
	PYTHONPATH=$(OLD_TRITON) $(BIN)/pytest -n 2 -m compile

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ringattn needs Python 3.10 or later: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,bench,interpret]'
	touch $@

$(OLD_TRITON): $(INSTALLED)
	$(BIN)/pip install --quiet --no-deps --target $@ triton==3.6.0
	touch $@

clean:
	rm -rf $(VENV) $(OLD_TRITON)
