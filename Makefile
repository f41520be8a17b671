# make demo    the whole thing at work: a model that looks, draws and corrects itself
# make test    style, types and all tests
# make check   style and types alone
# make nano    train m3-nano again (one GPU)
# make clean   remove what tools left behind; .venv stays

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check nano clean

demo: .venv/.installed-all
	@$(BIN)/m3agent demo $(ARGS)

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

nano: .venv/.installed-dev
	$(BIN)/python -m training.run --out runs/nano
	$(BIN)/python -m training.run --out runs/polish --polish runs/nano/checkpoint
	cp runs/polish/checkpoint/* src/m3agent/nano/

clean:
	rm -rf build dist demo-out runs src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find src tests training benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

# The stamps are files, so that an environment that exists already costs nothing.
.venv/.installed-all: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into .venv, a minute or two, once …"
	@$(PIP) -e '.[all]'
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into .venv, with the tools for development; two minutes or so, once …"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.installed-all

$(BIN)/python:
	$(PYTHON) -m venv .venv
