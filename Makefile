# Everything a person or a pipeline runs. `make` alone explains; nothing here needs root.
#
#   make up MODEL=<folder or Hugging Face id> DEVICE=auto|cpu|cuda ARGS="--port 9000"
#   QUIRE_GATEWAY_API_KEYS=secret make up          any setting of any service by its variable

.DEFAULT_GOAL := help
CHECKS := check-units check-models check-types check-conformance check-rules
.PHONY: help up down test check $(CHECKS) install measure verify-results figures fmt
SHELL := /bin/bash

# `:=` so that variables of the same name in the environment mean nothing; `make up MODEL=x` still wins.
MODEL :=
DEVICE := auto
PYTHON :=
NAME :=
ARGS :=

# Random tests draw anew with every commit, and a run of one commit repeats, as far as the same modules are imported
# by then (hypothesis draws some of their constants too); SEED=random draws at every run.
SEED := $(shell printf '%d' "0x$$(git rev-parse --short=7 HEAD 2> /dev/null | cut -c -7)" 2> /dev/null)
FIXED := $(filter-out random,$(SEED))
PYTEST = $(if $(FIXED),TEST_SEED=$(FIXED)) $(PY) -m pytest $(if $(FIXED),--hypothesis-seed=$(FIXED))
# The quick tests draw a quarter of the examples of a random test; `make test` draws all.
QUICK = TEST_EXAMPLES=0.25 $(PYTEST) -q -m "not slow"

# Two modules at a time: most tests wait. ARGS="-n 0": one after the other.
BESIDE := -n 2 --dist loadfile --no-loadscope-reorder

# Machines for building often forbid bytecode: each of many processes would then compile vLLM anew (14 CPU-seconds).
export PYTHONDONTWRITEBYTECODE :=

BOOTSTRAP := deploy/local/bootstrap.sh
VENV := .venv/bin
PY := $(VENV)/python
INSTALL_FLAGS := --device "$(DEVICE)" --python "$(PYTHON)"

help: ## this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  MODEL=folder or Hugging Face id   DEVICE=auto|cpu|cuda   PYTHON=/path/to/python3.11"
	@echo "  ARGS=\"...\" goes to the command behind the target; QUIRE_* variables set everything else"

up: ## install what is missing, start the cluster, wait until it serves
	@$(BOOTSTRAP) engine $(INSTALL_FLAGS)
	@$(VENV)/quire up $(if $(MODEL),--model "$(MODEL)") $(if $(filter-out auto,$(DEVICE)),--device "$(DEVICE)") $(ARGS)

down: ## stop everything
	@if [ -x $(VENV)/quire ]; then $(VENV)/quire down $(ARGS); else echo "nothing is installed, so nothing runs"; fi

install: ## install everything, for tests too
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)

test: ## the whole test suite
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	@$(PYTEST) $(BESIDE) $(ARGS)

check: ## format, lint, types, import rules, the quick tests, result files: a good two minutes
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 $(CHECKS)

# Two at a time, longest first: each takes 5 to 80 s of one core. What is marked slow is left to `make test`.
check-units:
	$(QUICK) tests/unit

check-types:
	$(VENV)/pyright

check-models:
	$(QUICK) tests/property

check-conformance:
	$(QUICK) tests/conformance tests/tidy shared/kernels

check-rules:
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/lint-imports
	$(PY) -m loadtest.verify_results

measure: ## NAME=x: measure again and write loadtest/results/x.json
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	@$(PY) -m loadtest.measure $(NAME) $(ARGS)

verify-results: ## recompute every quoted figure from its samples
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	@$(PY) -m loadtest.verify_results $(ARGS)

figures: ## redraw the figures from the result files
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	@$(PY) -m loadtest.figures $(ARGS)

fmt: ## format and fix what can be fixed
	@$(BOOTSTRAP) dev $(INSTALL_FLAGS)
	$(VENV)/ruff format .
	$(VENV)/ruff check --fix .
