# One command per chore, the same for people and CI. `make` alone prints this list.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
# what Python compiles is kept, whatever the caller's shell says: else each of a test's processes compiles torch again
export PYTHONDONTWRITEBYTECODE :=
READY  := $(VENV)/.ready
# two more than there are processors: tests that start processes wait much
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) + 2)')
TORCH  ?= 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

.DEFAULT_GOAL := help
.PHONY: help setup peers demo test fuzz test-slow test-integrations test-versions judge test-triton test-gpu check types format docs readme bench study clean

help: ## print the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gossamer needs Python 3.11 or later (make PYTHON=python3.12)")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(READY) ## make the virtual environment and install everything into it

peers: $(READY) ## install what gossamer bench can put beside gossamer
	$(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,peers]'

demo: $(READY) ## train a GPT on 4 emulated hosts at 200 Mbit/s: DDP, then gossamer (about 3 minutes)
	$(RUN) -m benchmarks.demo

test: $(READY) ## run the tests: on all processors, file by file, then the ones that measure time
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m 'not slow and not alone' --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --quiet
	$(RUN) -m pytest -m 'not slow and alone'

fuzz: $(READY) ## draw models, loops and algorithms from seeds and check what must hold of all (10 minutes; ARGS="--seed 7 --cases 1")
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(RUN) -m fuzz $(ARGS)

test-slow: $(READY) ## run the tests that take minutes
	$(RUN) -m pytest -m slow

test-integrations: $(READY) ## test gossamer.integrations with the real libraries (installs them: 400 MB)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev,integrations]'
	$(RUN) -m pytest tests/integrations tests/optim/test_optimizers_of_today.py -rs

test-versions: ## run tests with each torch from 2.9 on and each Python from 3.11 on (installs them: several GB; TORCH="2.9.1" PYTHONS=python3.12)
	$(PYTHON) tests/versions.py --torch $(TORCH) --python $(PYTHONS)

judge: $(READY) ## run torch's own tests of DDP and Accelerate's scripts on gossamer's classes (ARGS=NAME for one)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt expecttest accelerate
	PYTHONPATH=tests $(RUN) -m judge $(ARGS)

test-triton: $(READY) ## check the GPU's kernels in Triton's interpreter (installs triton: 290 MB)
	$(RUN) -m pip install --quiet --disable-pip-version-check triton
	$(RUN) -m pytest tests/codecs/test_kernels.py -k triton

test-gpu: ## run the tests that need an NVIDIA GPU, with the torch that $(PYTHON) has (one with CUDA; NCCL's need two)
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu -rs

check: $(READY) ## lint, formatting and types; warnings are errors
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

types: $(READY) ## check that types of the public surface are known without inference (installs pyright, which downloads itself)
	$(RUN) -m pip install --quiet --disable-pip-version-check pyright
	PATH=$(abspath $(VENV))/bin:$$PATH $(RUN) -m tests.typed_surface

format: $(READY) ## format the code and mend what can be mended
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(READY) ## build the documentation as a site in out/site; warnings are errors
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

readme: $(READY) ## run the demo, and keep its table and picture, and put all committed tables into the pages
	$(RUN) -m benchmarks.demo --save-to docs/assets
	$(RUN) -m benchmarks.studies.pages

bench: $(READY) ## measure what is missing of a suite of benchmarks/suites.toml: make bench SUITE=speed
	$(VENV)/bin/gossamer bench --suite $(or $(SUITE),$(error name a suite: make bench SUITE=speed))
	$(RUN) -m benchmarks.studies.pages

study: $(READY) ## run a study of benchmarks/studies: make study NAME=kernels ARGS='--rounds 5'
	$(RUN) -m benchmarks.studies.$(or $(NAME),$(error name a study: make study NAME=kernels)) $(ARGS)
	$(RUN) -m benchmarks.studies.pages

clean: ## remove what was built, and out/ with what was measured and not saved elsewhere
	rm -rf $(VENV) out build dist .mypy_cache .ruff_cache src/*.egg-info
