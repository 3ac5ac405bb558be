# make demo | test | lint | format | bench. Each first makes .venv, and again whenever what it installs has changed.
# PYTHON=python3.12 picks another interpreter (3.11 or later) for a new .venv, JOBS=8 runs the tests in more processes.
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready
LINKS := build/lint

.PHONY: demo test lint format bench
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/ligermodels demo

test: $(READY)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# The packages as they are installed, in links, for the tools that cannot see that convert/ is ligermodels.convert.
	@rm -rf $(LINKS)/ligermodels $(LINKS)/benchmarks && mkdir -p $(LINKS)/ligermodels
	@ln -s "$(CURDIR)"/ligermodels/[!_]* "$(CURDIR)"/ligermodels/__*.py "$(CURDIR)"/convert $(LINKS)/ligermodels
	@ln -s "$(CURDIR)"/benchmarks $(LINKS)
	cd $(LINKS) && "$(CURDIR)"/$(BIN)/mypy --config-file "$(CURDIR)"/pyproject.toml
	cd $(LINKS) && "$(CURDIR)"/$(BIN)/lint-imports --config "$(CURDIR)"/pyproject.toml

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	@$(BIN)/python -c "import torch; torch.cuda.is_available() or exit('make bench needs a CUDA GPU; torch sees none')"
	$(BIN)/python -m benchmarks

# torch comes first, alone and by its exact pin; the rest then fits itself to the build that pip found for this machine.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt $(shell grep '^torch==' constraints.txt) setuptools
	$(BIN)/python -m pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
