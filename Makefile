# Each target does all of its own set-up; the first one run makes .venv.
PYTHON ?= python3
BIN := .venv/bin

# Tests and benchmarks start many programs; where Python keeps no bytecode, each would compile all of it anew.
unexport PYTHONDONTWRITEBYTECODE

INSTALLED := .venv/.installed

.PHONY: demo test lint bench fault fuzz docs clean long

# Of `make fault` and `make fuzz`.
SECONDS ?= 600

demo: $(INSTALLED)
	$(BIN)/python examples/demo.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m 'not long'

# Whole runs of the trainer: the commands of its page, hangs, two machines, replays, restarts.
long: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m long

# Fifteen minutes on an idle machine of two cores: 50 kills. `make test` has two of them.
drill: $(INSTALLED)
	$(BIN)/python -m tests.drill

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.running_statistics

# Let every system call of the commands that write fail; write the table of what held into docs/security.md.
fault: $(INSTALLED)
	$(BIN)/python -m tests.fault $(SECONDS) --write

# Change files of every format and compare with torch, safetensors and zipfile; write both tables.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz $(SECONDS) --write

# What the program says of itself: its help, the table of formats, the tables of files. Tests fail when one is stale.
docs: $(INSTALLED)
	$(BIN)/python -m tests.cli.test_reference
	$(BIN)/python -m tests.train.test_trainer_page
	$(BIN)/python -m tests.train.trainer.test_exactness
	$(BIN)/python -m tests.formats.test_format_table
	$(BIN)/python -m tests.test_architecture

clean:
	rm -rf .venv runs dist build

# torch and torchvision in one command: installed apart, pip may pair builds that
# do not fit ("operator torchvision::nms does not exist") without a warning.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[train,dev]'
	touch $@
