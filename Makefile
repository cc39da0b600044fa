# Each target sets up .venv itself; the first one run makes it.
PYTHON ?= python3
BIN := .venv/bin

# Tests and benchmarks start many programs; where Python keeps no bytecode, each would compile all of it again.
unexport PYTHONDONTWRITEBYTECODE

INSTALLED := .venv/.installed
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

# Of `make fault` and `make fuzz`.
SECONDS ?= 600

.PHONY: help demo test long coverage drill gpu lint bench counted fault fuzz docs map release-check zipapp site report clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /    make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

demo: $(INSTALLED)  ## train on two ranks, strip the prefix, evaluate in one process
	$(BIN)/python examples/demo.py

test: $(INSTALLED)  ## the test suite, about eight minutes on two cores
	$(PYTEST) -n 3 -m 'not long and not lint'

long: $(INSTALLED)  ## the tests that take longest: whole runs, hangs, two machines, replays, more random examples
	$(PYTEST) -n 2 -m long
	$(PYTEST) -n 2 -m 'hypothesis and not long' --hypothesis-profile more --timeout 600

coverage: $(INSTALLED)  ## the test suite again, with the lines that no test runs
	$(PYTEST) -n 3 -m 'not long and not lint' --cov --cov-report term-missing:skip-covered

drill: $(INSTALLED)  ## runs killed in many ways, compared with undisturbed ones; a quarter of an hour
	$(BIN)/python -m tests.drill

gpu: $(INSTALLED)  ## what only a GPU can show, and the loop beside a bare one; writes docs/gpu.md
	$(BIN)/python -m tests.gpu

lint: $(INSTALLED)  ## ruff, mypy --strict, who imports whom, rooms taken away, lines of code, generated pages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.lines_of_code
	$(PYTEST) -n 0 -m lint $$(grep -rl 'mark\.lint' tests --include='test_*.py')

docs: $(INSTALLED)  ## the generated parts of docs/; tests fail when one is stale
	$(BIN)/python -m tests.core.cli.test_reference
	$(BIN)/python -m tests.core.cli.commands.test_skill
	$(BIN)/python -m tests.train.test_trainer_page
	$(BIN)/python -m tests.train.trainer.test_exactness
	$(BIN)/python -m tests.core.formats.test_format_table
	$(BIN)/python -m tests.test_architecture
	$(BIN)/python -m tests.explaining.test_messages
	$(BIN)/python -m tests.test_reference_page

map: $(INSTALLED)  ## what each file of the package is for
	@$(BIN)/python -m tests.test_architecture --map

report: $(INSTALLED)  ## the pictures of the README, docs/pictures/, and the page of one, build/report.html
	$(BIN)/python -m tests.pictures build

bench: $(INSTALLED)  ## the benchmarks, next to the usual alternatives
	$(BIN)/python -m benchmarks --record
	$(BIN)/python -m benchmarks.running_statistics

counted: $(INSTALLED)  ## system calls, bytes and memory of some commands; fails on a step back
	$(BIN)/python -m benchmarks.counted

fault: $(INSTALLED)  ## each system call, and each answer of a server, fails once; writes docs/security.md (SECONDS=600)
	$(BIN)/python -m tests.fault $(SECONDS) --write
	$(BIN)/python -m tests.fault.remote $(SECONDS) --write

fuzz: $(INSTALLED)  ## changed files of every format, compared with other libraries; writes docs/security.md
	$(BIN)/python -m tests.fuzz $(SECONDS) --write

release-check: .venv/.with-release  ## what goes out, built, installed afresh and run; left in dist/
	$(BIN)/python -m release.check

zipapp: .venv/.with-release  ## dist/ckpttool.pyz: one file, for machines with Python and without pip
	$(BIN)/python -m release.artifacts

site: .venv/.with-site  ## dist/site: the pages of docs/, searched, with the library's reference; strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:  ## remove .venv, runs and builds
	rm -rf .venv runs dist build .coverage*

# torch and torchvision in one command: installed apart, pip may pair builds that
# do not fit ("operator torchvision::nms does not exist") without a warning.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	@echo "installing torch and torchvision into .venv: about 6 GB, some minutes; then the tools of the tests"
	$(BIN)/python -m pip install --disable-pip-version-check torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@

# What an extra of pyproject.toml brings, for the targets that need it
.venv/.with-%: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
