# `make demo` and `make test` do everything on a fresh machine; `make help` lists the rest.
#   PYTHON=python3.12   the Python that .venv is made with      VENV=path     an environment of yours
#   TORCH="torch==2.15.*"  another PyTorch, in an environment of its own for each of them and each PYTHON
#   ARGS="..."          passed on to demo, bench and pytest     CXX, MAX_JOBS compiler, parallel jobs
SHELL := /bin/bash
PYTHON ?= python3
DEFAULT_TORCH := torch==2.11.*
TORCH ?= $(DEFAULT_TORCH)
# torch==2.15.* -> .venv-2.15-python3.12
VENV ?= .venv$(if $(filter-out $(DEFAULT_TORCH),$(TORCH)),-$(patsubst %.,%,$(subst *,,$(subst torch==,,$(TORCH))))-$(notdir $(PYTHON)))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
# Megatron-core 0.19 and torchtitan 0.3 both take these.
INTEGRATIONS_PYTHON ?= python3.12
INTEGRATIONS_TORCH ?= torch==2.15.*
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
LINTERS := ruff==0.15.22 clang-format==20.1.8

GPU := $(wildcard /dev/nvidia[0-9]* /dev/dxg)
NVCC := $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null)
NVCC := $(strip $(NVCC))
# A machine without a GPU compiles no CUDA unless asked (OVERLAP_CUDA=1), and then the kernels of two operand types.
ifeq ($(GPU),)
export OVERLAP_CUDA ?= 0
export OVERLAP_DTYPES ?= bf16,e4m3
endif
# CUTLASS's headers, only where something is compiled with them.
CUTLASS = $(if $(NVCC),$(if $(filter 0,$(OVERLAP_CUDA))$(CUTLASS_PATH),,$(VENV)/.cutlass))
# Tests wait for their ranks, for deadlines and compilers much of the time: several files at a time, with ranks of their own.
PARALLEL = -n $(if $(GPU),4,2) --dist loadfile

.PHONY: demo test test-gpu test-install test-integrations integrations test-long test-races test-plans test-grids pin pictures docs sanitize bench doctor build plan lint format clean distclean help

demo: build  ## the op on all GPUs, or on 2 CPU ranks: check, times, timeline
	$(PY) -m overlap_torch demo $(ARGS)

test: build  ## all tests except the long ones; GPU tests are skipped where there are too few GPUs
	$(PY) -m pytest $(PARALLEL) --timeout=900 $(ARGS)

test-gpu: build  ## only the GPU tests
	$(PY) -m pytest $(PARALLEL) -m "gpu or gpu2" --timeout=900 $(ARGS)

test-long: build  ## the tests too long for `make test`, except the races; CI runs them as well
	$(PY) -m pytest $(PARALLEL) -m "long and not races" --timeout=1800 $(ARGS)

test-integrations:  ## frameworks' own layers beside this package's, on CPU, in an environment of their own
	@$(MAKE) --no-print-directory integrations VENV=.venv-integrations PYTHON=$(INTEGRATIONS_PYTHON) \
	    TORCH="$(INTEGRATIONS_TORCH)" OVERLAP_CUDA=0

# Installed, not built into the checkout, whose libraries are for another PyTorch; bin/pytest does not look there.
integrations: $(VENV)/.torch
	$(PIP) --no-build-isolation '.[megatron,torchtitan]' numpy pytest pytest-timeout hypothesis
	PYTHONPATH= $(VENV)/bin/pytest --timeout=900 tests/integrations/test_integration_megatron*.py tests/integrations/test_integration_torchtitan*.py $(ARGS)

test-install: $(VENV)/.torch  ## wheel, source distribution and editable checkout, each in an environment of its own, on CPU
	bash scripts/try_install.sh $(PY)

test-races: build  ## thousands of calls with random delays; minutes long
	$(PY) -m pytest -m races --timeout=1800 $(ARGS)

test-grids: build  ## all tests on whole grids of parameters, of which the other targets take parts; an hour long
	OVERLAP_TEST_WHOLE_GRIDS=1 $(PY) -m pytest $(PARALLEL) -m "not races or long" --timeout=1800 $(ARGS)

test-plans: build  ## the steps of all the planner's candidates, on all ranks, are proved; minutes long
	$(PY) -m tests.steps_proof

pin: build  ## pins the traces of calls, as they are now
	$(PY) -m tests.recorder --pin

pictures: build  ## the documents' timelines, from the plans as they are now
	$(PY) docs/pictures.py

docs: build $(VENV)/.docs  ## the pages and the reference as HTML, in build/docs; warnings are errors
	$(PY) -m sphinx -W --keep-going -q -b html docs build/docs
	@echo build/docs/index.html

sanitize: build  ## compute-sanitizer over each kernel, on one GPU
	PATH="$(abspath $(VENV))/bin:$$PATH" bash scripts/sanitize.sh

bench: build  ## the benchmark: `make bench ARGS="--help"`
	$(PY) -m overlap_torch bench $(ARGS)

doctor: build  ## says what was found on this machine, and which fast paths are on
	$(PY) -m overlap_torch doctor

build: $(VENV)/.torch $(CUTLASS)  ## compile what has changed, into the checkout
	@$(PY) setup.py --quiet build_ext --inplace
	@$(MAKE) --silent --no-print-directory $(VENV)/.package

plan:  ## only the planner's module, for the Python given by PY=...; needs a C++ compiler and ninja
	$(PY) setup.py build_plan

lint: $(VENV)/.linters  ## checks ruff, clang-format, and that comments begin with their subjects; CI runs it
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs $(VENV)/bin/clang-format --dry-run -Werror
	$(PY) tools/prose.py

format: $(VENV)/.linters  ## lets ruff and clang-format rewrite
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' | xargs $(VENV)/bin/clang-format -i

clean:  ## removes what was built
	rm -rf build dist *.egg-info overlap_torch/*.so overlap_torch/_plan.pyi overlap_torch/_build.json tests/*.so

distclean: clean  ## removes the environment, too
	rm -rf .venv .venv-*

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 20

# One line names all that a fresh Debian or Ubuntu lacks, before anything is downloaded.
$(PY):
	@missing=; \
	command -v $(firstword $(CXX)) >/dev/null || missing+=" build-essential"; \
	$(PYTHON) -c '' 2>/dev/null \
	    || { echo "$(PYTHON) is missing, or does not start (make PYTHON=...): apt-get install python3 python3-venv python3-dev$$missing"; exit 1; }; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "$(PYTHON) is $$($(PYTHON) -V): 3.10 or newer is needed (make PYTHON=...)"; exit 1; }; \
	name=$$($(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing+=" $$name-venv"; \
	$(PYTHON) -c 'import os, sysconfig as s; open(os.path.join(s.get_paths()["include"], "Python.h"))' 2>/dev/null \
	    || missing+=" $$name-dev"; \
	[ -z "$$missing" ] || { echo "Missing on this machine; run: sudo apt-get install -y$$missing"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Where there is neither GPU nor nvcc, torch's CPU build does, a tenth of the download, if its index
# answers; everywhere else torch comes from PyPI with the CUDA that it was built for.
$(VENV)/.torch: | $(PY)
	@index=; \
	if [ -z "$(GPU)$(if $(filter 0,$(OVERLAP_CUDA)),,$(NVCC))" ] && $(PY) -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' \
	    $(CPU_INDEX)/torch/ 2>/dev/null; then index="--index-url $(CPU_INDEX)"; fi; \
	echo "Installing $(TORCH) into $(VENV) ($${index:-some gigabytes, with its CUDA}); this takes minutes ..."; \
	$(PIP) $$index "$(TORCH)"
	$(PIP) "setuptools>=77,<82" wheel ninja pybind11 pybind11-stubgen
	@touch $@

$(VENV)/.cutlass: | $(VENV)/.torch
	$(PIP) --no-deps nvidia-cutlass==4.2.0.0
	@touch $@

# Makes the checkout importable from everywhere, and installs what demo and tests need.
$(VENV)/.package: pyproject.toml
	$(PIP) --no-build-isolation --editable '.[demo,test]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.torch
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

$(VENV)/.linters: Makefile | $(PY)
	$(PIP) $(LINTERS)
	@touch $@
