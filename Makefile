# Everything lives in .venv; each target makes what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test check clean

demo: $(VENV)/.train  ## train on the embedded digits, then print accuracy and where to look
	$(BIN)/regard train digits

test: $(VENV)/.dev    ## the whole test suite
	$(BIN)/python -m pytest -n 2 -q

check: $(VENV)/.dev   ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.train: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/.train

clean:
	rm -rf $(VENV)
