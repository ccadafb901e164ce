# Two commands do everything on a machine that has Python 3.11+ and make:
#   make compare   set up, then compare the strategies on this machine
#   make test      set up, then run every check and test
# While you work on the code, `make check` answers in two minutes.
# The environment lives in .venv and is made again only when what it is made from changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2# tests at a time: each may start several ranks
TIER := $(BIN)/python tests/tier.py --workers $(WORKERS)

.PHONY: help setup compare check test test-cluster test-deep lint format site soak clean

help:
	@echo "make compare   measure the data-parallel strategies on this machine (about three minutes)"
	@echo "make check     lint, types and the quick tests: every few minutes"
	@echo "make test      lint, types and every test that a newcomer should see pass (15 minutes)"
	@echo "make test-deep the long matrices, hosts, every documented command, outside architectures"
	@echo "               (over an hour; QUARTER=0 to 3 runs a quarter, as CI does)"
	@echo "make test-cluster  the tests with a real Slurm, MPI and Ray, which it installs if you are root"
	@echo "make setup     only create $(VENV) and install"
	@echo "make lint      only ruff and mypy"
	@echo "make format    let ruff put right what it can"
	@echo "make soak      54 runs, disturbed at random, must end as the undisturbed (15 minutes at most)"
	@echo "make site      build the book and all pages into site/"
	@echo "make clean     remove $(VENV), caches and runs/"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) found; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}; name another: make PYTHON=python3.12")'
	@echo "creating $(VENV) and installing shardlab into it (once; PyTorch is large)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "ready: $(BIN)/shardlab"

compare: $(READY)
	$(BIN)/shardlab compare

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: $(READY) lint
	$(TIER) check

test: $(READY) lint
	$(TIER) test

# Slurm, munge and Open MPI from Debian's packages, Ray and Kubeflow's models from PyPI; tests of
# what is not there are skipped.
test-cluster: $(READY)
	@sh tests/cluster/install.sh $(BIN)/python
	$(TIER) cluster

# torchvision, without its dependencies, lies outside the environment, where transformers would use it.
# tests/outside/outsiders.py finds it.
test-deep: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --no-deps --upgrade --target $(VENV)/deep torchvision
	$(TIER) deep $(if $(QUARTER),--quarter $(QUARTER))

site: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d site/.doctrees docs site
	@echo "open site/index.html"

soak: $(READY)
	$(BIN)/python benchmarks/soak.py --out runs/soak

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
