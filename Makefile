# Everything runs in .venv, which the first target that needs it makes from nothing and later ones reuse.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MINUTES ?= 35
LOCK := uv pip compile -q --generate-hashes --no-emit-index-url --no-annotate --no-header --python-version 3.11

.DEFAULT_GOAL := help

.PHONY: help
help:  ## Show these targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/cpu.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/cpu.txt -e '.[all,docs,dev]'
	@touch $@

.PHONY: setup
setup: $(STAMP)  ## Make the virtual environment (done by the other targets when needed).

.PHONY: demo
demo: $(STAMP)  ## The whole flow on built-in data: a trained model, a table, a plot, a page.
	HF_HUB_OFFLINE=1 $(BIN)/dexter demo --out demo

.PHONY: test
test: $(STAMP)  ## All tests but the slow ones.
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'not slow'

.PHONY: test-ci
test-ci: $(STAMP)  ## All tests but the slow ones for which too little of MINUTES (35) is left; says which.
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -p tests.budget --minutes $(MINUTES)

.PHONY: test-all
test-all: $(STAMP)  ## Every test; DEXTER_TEST_SCALE=1 repeats as often as docs/reliability.md says (default 0.1).
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.PHONY: test-gpu
test-gpu: $(STAMP)  ## The tests that need a CUDA device; writes gpu-report.json (without one: says so).
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.gpu

.PHONY: check
check: $(STAMP)  ## Lint, types, the tests of the architecture, and the audit of the locked versions.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_layers.py
	$(BIN)/python constraints/audit.py

.PHONY: docs
docs: $(STAMP)  ## The documentation as a site, in site/ (no network needed to build or to read it).
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.PHONY: lock
lock:  ## Write the lock files anew (needs uv); that of development without the packages of CUDA.
	$(LOCK) --extra serve --extra pgvector pyproject.toml > constraints/serve.lock
	$(LOCK) -c constraints/cpu.txt --all-extras pyproject.toml \
		| awk '/^[a-z0-9]/ {keep = !/^(nvidia|triton|cuda)/} keep' > constraints/dev.lock

.PHONY: format
format: $(STAMP)  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP)  ## The benchmark of the losses (the others: see bench/README.md).
	$(BIN)/python bench/losses.py

.PHONY: clean
clean:  ## Remove the virtual environment and everything made.
	rm -rf $(VENV) demo runs site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
