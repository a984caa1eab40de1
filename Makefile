SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help lab bench demo test test-fast test-all test-planted test-stalled gpu lessons site release format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= lab,test,site
# What is installed: this checkout, or a wheel or source distribution (make release tries both).
PACKAGE ?= -e .
# Which torch: cpu, cuda, or auto, which is cuda where there is an NVIDIA device. PyPI's torch for Linux is the CUDA build:
# with it everything is 3.0 GB to download and 5.2 GB on disk, with the CPU wheel of torch's own index 0.5 and 2.0 GB.
TORCH ?= auto
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
# make demo ARGS="--ranks 2 --steps 5"; the test targets hand ARGS to pytest
ARGS ?=
# Files of tests run side by side, three at least: a test has up to four ranks, and mostly waits for them.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell echo $$(( $(CORES) < 6 ? 3 : $(CORES) / 2 )))
# Compiled once, for all the processes that tests start, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
# What is woken takes no core from what runs. Else a sender loses its core to the rank that its message wakes, holding a lock
# for which gloo's thread asks in a busy loop. Beside other programs it is slower: not for the stalled ones.
KEEP_THE_CORE := $(shell chrt --batch 0 true 2>/dev/null && echo chrt --batch 0)
TESTS = $(KEEP_THE_CORE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Ranks compute with one thread anyway; where there are more threads than cores, they wait for each other.
test-stalled: KEEP_THE_CORE =
test test-fast test-all test-planted test-stalled: export OMP_NUM_THREADS = 1
# A kernel that starts on a busy machine, or on one that was paused, may need more than the usual minute.
NOTEBOOKS = -p tests.notebooks --nbval-lax --nbval-current-env --nbval-kernel-startup-timeout 600

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r target what; \
	    do printf '  make %-13s %s\n' "$$target" "$$what"; done
	@printf '  ARGS="..." goes to the command: make demo ARGS="--ranks 2 --steps 5"\n'
	@printf '  TORCH=cpu or TORCH=cuda says which torch the first make installs\n'

# Whether to do without CUDA. macOS has none, and its torch on PyPI is small.
WITHOUT_CUDA = [ $(TORCH) = cpu ] || { [ $(TORCH) = auto ] && [ "$$(uname)" = Linux ] && [ ! -e /proc/driver/nvidia ] && \
    ! command -v nvidia-smi >/dev/null && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
# Whether torch's index answers, within five seconds, the name server's included.
ANSWERS = import signal, urllib.request as web; signal.alarm(5); \
    web.urlopen(web.Request("$(CPU_WHEELS)/torch/", headers={"User-Agent": "make"}))

# From scratch each time, so that .venv holds what pyproject.toml declares and nothing older.
# The CPU wheel comes first and alone: pip then finds torch installed, and takes the rest from the usual index.
# The stamp comes last: a failed install is tried again.
$(STAMP): constraints.txt pyproject.toml
	@$(if $(filter $(TORCH),cpu cuda auto),,echo "TORCH=$(TORCH), but must be cpu, cuda or auto"; exit 1)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("constraints.txt needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@rm -f $@
	@$(PYTHON) -m venv --clear $(VENV)
	@if ! { $(WITHOUT_CUDA); }; then \
	    echo "torch comes from the package index (TORCH=cuda): for Linux, PyPI has the CUDA build"; \
	elif { $(BIN)/python -c '$(ANSWERS)'; } 2>/dev/null; then \
	    echo "torch's CPU wheel comes from $(CPU_WHEELS) (TORCH=cpu): 0.2 GB"; \
	    $(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt \
	        --index-url $(CPU_WHEELS) torch >$(VENV)/torch.log 2>&1 || \
	        { tail -n 20 $(VENV)/torch.log; echo "To go without that index: make TORCH=cuda ..."; exit 1; }; \
	else \
	    echo "$(CPU_WHEELS) does not answer: torch comes from the package index."; \
	    echo "If that is PyPI, it is the CUDA build: 2.5 GB more to download, 3.2 GB more on disk."; \
	fi
	@echo "building $(VENV), a minute or two, and as long as the download takes:"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $(PACKAGE)'[$(EXTRAS)]' 2>&1 | \
	    tee $(VENV)/install.log | while read -r line; do case $$line in \
	        Collecting*|Processing*) printf . ;; \
	        'Installing collected'*) printf ' installing' ;; \
	        'Successfully installed'*) printf ', done\n' ;; \
	    esac; done || { printf ' failed\n'; tail -n 20 $(VENV)/install.log; exit 1; }
	@touch $@

lab: $(STAMP) ## open the lessons in JupyterLab, on your own copies in work/
	@$(BIN)/zerolab lab $(ARGS)

bench: $(STAMP) ## step times and peaks beside torch and DeepSpeed
	@$(BIN)/zerolab bench $(ARGS)

demo: $(STAMP) ## train a small GPT at every stage and compare
	@$(BIN)/zerolab demo $(ARGS)

# Lint, and then the tests with mypy beside them: what it says comes last.
checked = $(BIN)/ruff check . && $(BIN)/ruff format --check . && { \
    $(BIN)/mypy >$(VENV)/mypy.log 2>&1 & mypy=$$!; trap "kill $$mypy 2>/dev/null || :" EXIT; status=0; \
    $(TESTS) $(1) || status=$$?; wait $$mypy || status=$$?; cat $(VENV)/mypy.log; exit $$status; }

test: $(STAMP) ## lint, types, every room's tests and each lesson: 11 minutes
	$(call checked,$(NOTEBOOKS) -m 'not exhaustive' $(or $(ARGS),--ignore tests/integrations tests lessons))

test-fast: $(STAMP) ## what an edit breaks first: 2 minutes
	$(call checked,-p no:nbval -m 'not exhaustive and not slow' $(or $(ARGS),--ignore tests/integrations))

# SHARE=3: of what `make test` leaves out a third, drawn by the commit.
test-all: $(STAMP) ## everything, other people's systems and both folders of lessons too: 45 minutes
	$(call checked,$(NOTEBOOKS) $(if $(SHARE),--share $(SHARE)) $(or $(ARGS),tests lessons solutions))
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-planted ARGS="--sample 5")

test-planted: $(STAMP) ## plant defects in a copy, and see which test of make test notices each
	$(BIN)/python -m tests.planted $(ARGS)

# Any selection: make test-stalled ARGS="tests/comm". With --seed N before make it is the same again.
test-stalled: $(STAMP) ## tests on a machine that stops for 5 to 40 seconds at any moment, with two busy processes
	$(BIN)/python -m tests.stalled $(TESTS) $(NOTEBOOKS) -m 'not exhaustive' $(or $(ARGS),--ignore tests/integrations tests lessons)

# Builds nothing, so that it runs without a network: the first of .venv and python3 that sees a device is
# taken, with the package from here. Only files with a gpu test are collected: the others may import what
# that python lacks. Without pytest-timeout its setting would be a warning.
gpu: ## the tests that need a CUDA device, and what it shows as tables
	@files=$$(grep -rlE --include='test_*.py' '(mark\.|@)gpu\b' tests) || { echo "no test is marked gpu"; exit 1; }; \
	for python in $(BIN)/python $(PYTHON); do \
	    if $$python -c 'import torch; torch.cuda.is_available() or exit(1)' 2>/dev/null; then \
	        export PYTHONPATH="$(CURDIR)"; status=0; \
	        $$python -m pytest -W ignore::pytest.PytestConfigWarning -m gpu $$files $(ARGS) || status=1; \
	        $$python -m zerolab.apps.gpu || status=1; \
	        exit $$status; \
	    fi; \
	done; \
	echo "skipped: no torch that sees a CUDA device in $(BIN)/python or $(PYTHON)"

# FORCE=1 runs also those whose source and package are as they were.
lessons: $(STAMP) ## build the notebooks that changed (FORCE=1: all)
	@$(BIN)/python -m zerolab.lab.build $(if $(FORCE),--force) $(ARGS)

site: $(STAMP) ## the website, into build/site
	@$(BIN)/python docs/site/build.py $(ARGS)

release: $(STAMP) ## check all that a release needs, and build it into dist/: 5 minutes
	@$(BIN)/python .ci/release.py

format: $(STAMP) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove build output and caches, not .venv or work/
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find zerolab tests -name __pycache__ -prune -exec rm -rf {} +
