# Every target sets up what it needs in .venv; Python >= 3.11, make and git are enough.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# two test processes of one thread each beat one process of two threads
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES)

.PHONY: run test test-all check format bench docs figures clean

run: $(READY)  ## the operation on a small example, with its vital signs
	$(BIN)/python examples/vitals.py

test: $(READY)  ## everything but the exhaustive grids
	$(PYTEST) -m "not exhaustive"

test-all: $(READY)  ## with the exhaustive grids
	$(PYTEST)

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## ours, torch's SDPA, eager, eager with statistics: interleaved, as ratios
	$(BIN)/attemper bench

docs: $(READY)  ## docs/reference.md from the docstrings
	$(BIN)/python scripts/reference.py

figures: $(READY)  ## what docs/ shows of the lab: figures, numbers.md, the claims
	$(BIN)/python scripts/figures.py

clean:
	rm -rf .venv build src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attemper needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Run make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
