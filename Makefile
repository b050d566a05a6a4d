# Each target sets itself up: the first one run makes .venv, the next ones start at once.

# The first interpreter that is there, is a supported version, and can make environments.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
# PyPI's torch brings gigabytes of CUDA; without a GPU the CPU build does, from this index where it can be reached.
# TORCH_INDEX= takes the torch that pip is configured to find.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
READY := $(VENV)/.ready
READY_ALL := $(VENV)/.ready-all
SKIPPED := build/skipped
DEMO_DB := build/demo.db
DEMO := fusion examples.residual_norms:Training --inputs examples.residual_norms:inputs --train --device cpu --db $(DEMO_DB)

.DEFAULT_GOAL := help
.PHONY: help venv demo quick test test-all lint cycles types format wheel docs figures clean

help:
	@echo "make demo    tune a training step on this CPU, time it, run it from the database (under 10 minutes)"
	@echo "make quick   unit tests, and some of the other layers: the inner loop"
	@echo "make test    the test suite; no GPU needed"
	@echo "make test-all  all cases of the suite, with models of other libraries, Triton, JAX and a browser, which it installs"
	@echo "make lint    ruff (rules and format), and make cycles"
	@echo "make cycles  who imports whom: layers, and no circle"
	@echo "make types   mypy --strict on autotune/, tests/support/ and the suites"
	@echo "make format  let ruff format what it may"
	@echo "make wheel   build dist/*.whl"
	@echo "make docs    build/docs: the documentation as a site, every link checked"
	@echo "make figures  the tables and the picture of documents, from benchmarks/results and docs/decisions"
	@echo "make clean   remove what these targets made"

venv: $(READY)

# torch goes first and alone: resolved together with the rest, pip may take the CUDA build.
$(VENV)/.torch:
	@test -n "$(PYTHON)" || { echo "autotune needs Python 3.11 to 3.14 with venv; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch $(TORCH) into $(VENV)"; index="$(TORCH_INDEX)"; \
	$(BIN)/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10)' "$$index" 2>/dev/null \
		|| index=; \
	$(PIP) $${index:+--extra-index-url "$$index"} torch==$(TORCH)
	@touch $@

$(READY): pyproject.toml $(VENV)/.torch
	@echo "Installing autotune and its dependencies into $(VENV)"
	@$(PIP) --editable ".[dev]"
	@touch $@

# timm needs torchvision. The resolver finds the release for this torch; where there is none yet, the newest one serves,
# of which nothing but Python is used (benchmarks/real/vision.py).
$(READY_ALL): pyproject.toml $(READY)
	@echo "Installing what optional tests need into $(VENV)"; \
	torch="torch==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')"; \
	$(PIP) --editable ".[test-all]" "$$torch" && { \
		$(PIP) --editable ".[bench]" "torchvision>=0.26" "$$torch" \
		|| { echo "No torchvision is for $$torch: the newest one is taken"; $(PIP) --no-deps timm torchvision liger-kernel diffusers; }; }
	@touch $@

demo: $(READY)
	@mkdir -p $(dir $(DEMO_DB))
	$(BIN)/autotune search $(DEMO) --timeout 240
	$(BIN)/autotune compare $(DEMO)
	$(BIN)/python examples/residual_norms.py --device cpu --db $(DEMO_DB)

# Tests of kernels with three cases or more run the third of them that is the commit's; THIRD= runs all.
THIRD := --third

# Processes of tests import the package again and again, and find it compiled.
test test-all quick: export PYTHONDONTWRITEBYTECODE :=

# What is timed needs the machine for itself; the rest runs file by file in two processes a core, since tests wait for
# processes of their own. The layers whose files take longest go first, so that none is left at the end.
JOBS ?= $(shell nproc | awk '{ n = $$1 * 2; print n < 12 ? n : 12 }')
ALONE := tests/unit/measure/test_timer.py tests/process/measure/test_quiet.py tests/process/measure/test_worker.py
LAYERS := tests/endtoend tests/simulated tests/compile tests/process \
	tests/unit/ir $(filter-out tests/unit/ir,$(wildcard tests/unit/[a-z]*))

quick: $(READY)
	$(BIN)/python -m pytest --sample -n $(JOBS) --dist loadfile $(filter-out tests/endtoend,$(LAYERS))

test: $(READY)
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) $(PYTEST_ARGS)
else
	@failed=0; set -x; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=60 $(PYTEST_OPTIONS) $(THIRD) \
		$(LAYERS) $(ALONE:%=--ignore=%) || failed=1; \
	$(BIN)/python -m pytest $(PYTEST_OPTIONS) $(ALONE) || failed=1; \
	exit $$failed
endif

# STRICT=--strict: a skipped test is a failure, unless it needs a GPU.
test-all: $(READY_ALL)
	@$(BIN)/python -m tests.support.programs
	@rm -f $(SKIPPED); failed=0; \
	$(MAKE) --no-print-directory test PYTEST_OPTIONS=--skipped=$(SKIPPED) || failed=1; \
	$(BIN)/python -m tests.support.skipped $(SKIPPED) $(STRICT) || failed=1; \
	exit $$failed

lint: $(READY) cycles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Layers and doors are contracts in pyproject.toml; import circles are looked for by a test.
cycles: $(READY)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/unit/test_imports.py -k circle

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(READY)
	$(BIN)/mypy

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# After a new result file: its tables and its picture. After a new decision: its row.
figures: $(READY)
	$(BIN)/python -m benchmarks.table --update README.md --update docs/explanation/benchmarks.md
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python scripts/docs_pages.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
