# cram: raw text to score report.  test: what CI runs.  ready: before a commit.  docs: the site.  notebooks: Jupyter.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
BIN := .venv/bin

.PHONY: cram test ready docs notebooks readme

cram: .venv/.installed
	$(BIN)/cramnb cram $(ARGS)

test: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/nbdev-test --n-workers 2 --timing --cell-timeout 180
	$(BIN)/python -m pytest

ready: .venv/.installed
	$(BIN)/nbdev-export
	OMP_NUM_THREADS=1 $(BIN)/nbdev-test --n-workers 2 --save
	$(BIN)/nbdev-clean
	$(BIN)/python tests/readme.py
	$(BIN)/python -m pytest

docs: .venv/.installed
	$(BIN)/nbdev-docs

notebooks: .venv/.installed
	$(BIN)/jupyter lab nbs

readme: .venv/.installed
	$(BIN)/python tests/readme.py

# torch first: the library asks for a range, and a range alone may bring a larger build than the one wanted
.venv/.installed: settings.ini setup.py pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@
