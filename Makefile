# The project's commands. Each makes the virtual environment it needs; running one again reuses it.
#   make demo       train a small GPT with 2 processes
#   make demo NAME=pipeline, NAME=moe   the same GPT as a pipeline, and with experts; each checked against one process
#   make demo NAME=lora   LoRA on a small Llama with transformers' Trainer, peft and ZeRO stage 3
#   make test       the whole test suite
#   make check      ruff, mypy, style tests (the pre-commit hooks)
#   make wheel      build the wheel into dist/
#   make campaign   list what runs long on purpose; NAME=... runs one, ARGS="--help" tells its parameters
#   make upstream-patches UPSTREAM=0.19.6   this project's fixes as patches for an upstream release, or for the checkout
#                   at a path, each proved (docs/fixes/README.md); ARGS="--only NAME ..." tests some of them,
#                   ARGS=--branch leaves a branch per fix in the checkout
# Overridable: PYTHON (interpreter that makes the environment), VENV (where), NPROC (processes of the demo),
# DEMO_DEVICE (accelerator of the demo), DEMO_ARGS (its flags), TESTS (what `make test` runs), PYTEST_ARGS (flags for
# it), ARGS (those of a campaign), PIP_ARGS (flags for pip, such as an index with the build of torch that you want).

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
# The demo is sized for two CPU cores; two processes need two devices on anything else.
DEMO_DEVICE ?= cpu
DEMO_ARGS ?=
TESTS ?= tests/unit tests/style
PYTEST_ARGS ?=
PIP_ARGS ?=
# Given on the command line only: some shells have a NAME in their environment.
NAME :=
UPSTREAM :=
ARGS ?=

BIN := $(VENV)/bin
CONSTRAINTS := requirements/requirements-ci.txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS)
# One thread per process: tests and demo start several processes, which would otherwise fight for the cores. All of them
# import the package, so bytecode is kept even where the environment says otherwise.
RUN = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PATH="$(abspath $(BIN)):$$PATH"

.PHONY: demo test check wheel campaign upstream-patches install clean

# Remove a stamp whose recipe failed half way, so that the next run does not trust it.
.DELETE_ON_ERROR:

$(VENV)/.stamp-torch: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than 3.10; set PYTHON to a newer interpreter" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and pinned, so that no other package's requirement can choose another build of it
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) setuptools wheel
	touch $@

$(VENV)/.stamp-install: $(VENV)/.stamp-torch setup.py pyproject.toml version.txt $(wildcard requirements/*.txt)
	$(PIP_INSTALL) --no-build-isolation -e .
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-install
	$(PIP_INSTALL) -r requirements/requirements-dev.txt
	touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-install
	$(PIP_INSTALL) matplotlib
	touch $@

$(VENV)/.stamp-lora: $(VENV)/.stamp-demo
	$(PIP_INSTALL) -r requirements/requirements-transformers.txt peft
	touch $@

install: $(VENV)/.stamp-install

demo: $(VENV)/.stamp-$(or $(filter lora,$(NAME)),demo)
	$(RUN) DS_ACCELERATOR=$(DEMO_DEVICE) deepspeed --num_gpus $(NPROC) examples/$(or $(NAME),train)_gpt.py $(DEMO_ARGS)

test: $(VENV)/.stamp-dev
	$(RUN) python -m pytest $(TESTS) $(PYTEST_ARGS)

# The list needs no environment.
campaign: $(if $(NAME),$(VENV)/.stamp-dev)
	$(if $(NAME),$(RUN) python,$(PYTHON)) tests/campaigns $(NAME) $(ARGS)

# An environment of its own: upstream's package has this one's name, and requirements that this one lacks.
UPSTREAM_VENV = $(VENV)-upstream
$(UPSTREAM_VENV)/.stamp: $(CONSTRAINTS) requirements/requirements-upstream.txt
	test -x $(UPSTREAM_VENV)/bin/python || $(PYTHON) -m venv $(UPSTREAM_VENV)
	$(subst $(BIN),$(UPSTREAM_VENV)/bin,$(PIP_INSTALL)) torch==2.13.0
	$(subst $(BIN),$(UPSTREAM_VENV)/bin,$(PIP_INSTALL)) -r requirements/requirements-upstream.txt
	touch $@

upstream-patches: $(UPSTREAM_VENV)/.stamp
	@test -n "$(UPSTREAM)" || { echo "say which release or checkout: make upstream-patches UPSTREAM=0.19.6" >&2; exit 1; }
	PYTHONPATH= $(UPSTREAM_VENV)/bin/python scripts/upstream "$(UPSTREAM)" $(ARGS)

# pre-commit wants a git checkout; the hooks themselves are local and need no network.
check: $(VENV)/.stamp-dev
	$(RUN) pre-commit run --all-files --show-diff-on-failure

# A fresh build folder: files that a former build copied there would end up in the wheel too.
wheel: $(VENV)/.stamp-torch
	rm -rf build
	mkdir -p dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) $(UPSTREAM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
