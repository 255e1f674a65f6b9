# The project's commands. Each makes the virtual environment it needs; running one again reuses it.
#   make demo       train a small GPT with 2 processes
#   make demo-pipeline, make demo-moe   the same GPT as a pipeline, and with experts; each checked against one process
#   make test       the whole test suite
#   make check      ruff, mypy, style tests (the pre-commit hooks)
#   make contract   every combination of the contract suite (long)
#   make reshard-matrix   checkpoints of every division of ranks loaded into every other (minutes)
#   make corrupt-checkpoints   hundreds of bit flips in every file of checkpoints, and how many loading found (minutes)
#   make kill-checkpoints   200 runs killed while they save, and whether the next one lost more than that save (minutes)
#   make zombies    50 random failing or interrupted launches, and how many left no process
#   make multinode  the launcher on real hosts, made of network namespaces (root; skips what is not installed)
#   make elastic    nodes of an elastic job go and come, compared bit by bit with launches one by one
#   make mutations  faults put into the library on purpose, and what the checks say about each
#   make wheel      build the wheel into dist/
# Overridable: PYTHON (interpreter that makes the environment), VENV (where), NPROC (processes of the demo),
# DEMO_DEVICE (accelerator of the demo), DEMO_ARGS (its flags), TESTS (what `make test` runs), PYTEST_ARGS (flags for
# it), PIP_ARGS (flags for pip, such as an index with the build of torch that you want).

PYTHON ?= python3
VENV ?= .venv
NPROC ?= 2
# The demo is sized for two CPU cores; two processes need two devices on anything else.
DEMO_DEVICE ?= cpu
DEMO_ARGS ?=
TESTS ?= tests/unit tests/style
PYTEST_ARGS ?=
PIP_ARGS ?=

BIN := $(VENV)/bin
CONSTRAINTS := requirements/requirements-ci.txt
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c $(CONSTRAINTS)
# One thread per process: tests and demo start several processes, which would otherwise fight for the cores.
RUN = OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH"

MUTATION_TABLE := build/mutations.txt
ZOMBIE_ARGS ?=
# Random bit flips of each file, beside those at its start, middle and end.
CORRUPTIONS ?= 200
RESHARD_TABLE := build/reshard-matrix.txt

.PHONY: demo demo-pipeline demo-moe test check contract multinode reshard-matrix corrupt-checkpoints kill-checkpoints zombies elastic mutations wheel install clean

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

install: $(VENV)/.stamp-install

demo: $(VENV)/.stamp-demo
	$(RUN) DS_ACCELERATOR=$(DEMO_DEVICE) deepspeed --num_gpus $(NPROC) examples/train_gpt.py $(DEMO_ARGS)

demo-pipeline: $(VENV)/.stamp-install
	$(RUN) DS_ACCELERATOR=$(DEMO_DEVICE) deepspeed --num_gpus $(NPROC) examples/pipeline_gpt.py $(DEMO_ARGS)

demo-moe: $(VENV)/.stamp-install
	$(RUN) DS_ACCELERATOR=$(DEMO_DEVICE) deepspeed --num_gpus $(NPROC) examples/moe_gpt.py $(DEMO_ARGS)

test: $(VENV)/.stamp-dev
	$(RUN) python -m pytest $(TESTS) $(PYTEST_ARGS)

# pdsh, MPI and Slurm come from the system; each test that lacks its tool says so.
multinode: $(VENV)/.stamp-dev
	$(RUN) python -m pytest tests/multinode $(PYTEST_ARGS)

contract: $(VENV)/.stamp-dev
	$(RUN) python -m pytest tests/unit -m contract $(PYTEST_ARGS)

# The table is printed also when a combination failed: the test says which.
reshard-matrix: $(VENV)/.stamp-dev
	mkdir -p $(dir $(RESHARD_TABLE))
	rm -f $(RESHARD_TABLE)
	DS_RESHARD_MATRIX=$(abspath $(RESHARD_TABLE)) $(RUN) python -m pytest tests/unit/v1/checkpoint/test_matrix.py $(PYTEST_ARGS); \
	  status=$$?; cat $(RESHARD_TABLE); exit $$status

corrupt-checkpoints: $(VENV)/.stamp-dev
	DS_CORRUPTIONS=$(CORRUPTIONS) $(RUN) python -m pytest -s tests/unit/v1/checkpoint/test_corruption.py $(PYTEST_ARGS)

# The table is printed also when a fault was missed: it says which.
kill-checkpoints: $(VENV)/.stamp-dev
	PYTHONPATH=tests $(RUN) python -m unit.v1.checkpoint.kills $(KILL_ARGS)

zombies: $(VENV)/.stamp-dev
	rm -rf build/zombies
	$(BIN)/python tests/unit/launcher/zombies.py --folder build/zombies $(ZOMBIE_ARGS)

elastic: $(VENV)/.stamp-dev
	ELASTIC_CAMPAIGN=1 $(RUN) python -m pytest tests/unit/elasticity/test_elastic_training.py $(PYTEST_ARGS)

mutations: $(VENV)/.stamp-dev
	mkdir -p $(dir $(MUTATION_TABLE))
	rm -f $(MUTATION_TABLE)
	DS_MUTATION_TABLE=$(abspath $(MUTATION_TABLE)) $(RUN) python -m pytest tests/unit/verify/test_mutations.py $(PYTEST_ARGS); \
	  status=$$?; cat $(MUTATION_TABLE); exit $$status

# pre-commit wants a git checkout; the hooks themselves are local and need no network.
check: $(VENV)/.stamp-dev
	$(RUN) pre-commit run --all-files --show-diff-on-failure

# A fresh build folder: files that a former build copied there would end up in the wheel too.
wheel: $(VENV)/.stamp-torch
	rm -rf build
	mkdir -p dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
