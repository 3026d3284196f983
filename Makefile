# cram: raw text to score report.  test: what CI runs.  ready: before a commit.  docs: the site.
# notebooks: Jupyter.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
WORKERS ?= 2
BIN := .venv/bin

.PHONY: cram test ready docs notebooks readme

cram: .venv/.installed
	$(BIN)/cramnb cram $(ARGS)

# each notebook runs once, as a test, its folded solutions included
test: .venv/.installed
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 15 $(ARGS)

ready: .venv/.installed
	$(BIN)/nbdev-export
	$(BIN)/python tests/minutes.py
	OMP_NUM_THREADS=1 $(BIN)/nbdev-test --n-workers $(WORKERS) --save --cell-timeout 180
	$(BIN)/nbdev-clean
	$(BIN)/python tests/readme.py
	$(MAKE) test

docs: .venv/.installed
	@command -v quarto >/dev/null || { echo "make docs needs Quarto 1.8 or newer on the PATH: \
https://quarto.org/docs/get-started/" >&2; exit 1; }
	$(BIN)/nbdev-docs
	$(BIN)/python tests/twins.py _docs

notebooks: .venv/.installed
	$(BIN)/jupyter lab nbs

readme: .venv/.installed
	$(BIN)/python tests/minutes.py
	$(BIN)/nbdev-test nbs/index.ipynb --save
	$(BIN)/nbdev-clean
	$(BIN)/python tests/readme.py

# torch first: the library asks for a range, and a range alone may bring a larger build than wanted
.venv/.installed: settings.ini setup.py pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@
