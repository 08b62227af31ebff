# make demo: install, then train the shipped model in minutes.  make test, make check, make chaos: for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# where torch comes from, when not from pip's own index: https://download.pytorch.org/whl/cpu or …/cu130
TORCH_INDEX ?=
TORCH := torch>=2.9,<2.14

.PHONY: install demo test check chaos clean

install: $(VENV)/.installed

# reasoning-gym comes without its dependencies: two of them want a C compiler, the rest are in pyproject.toml
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) '$(TORCH)' --index-url $(TORCH_INDEX))
	$(PIP) -e .
	$(PIP) --no-deps reasoning-gym==0.1.25
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

demo: install
	$(BIN)/baton train recipes/quickstart.toml --overwrite

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ten thousand bad days of a simulated run, every law checked at every event; CI's tests draw a fixed sample
DAYS ?= 10000
chaos: $(VENV)/.installed
	$(BIN)/python -m baton.simulator.chaos $(DAYS)

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache
