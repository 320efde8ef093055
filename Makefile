# Every target sets up what it needs in .venv; Python >= 3.11, make and git are enough.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
RUNS := .venv/runs
# two test processes of one thread each beat one process of two threads; where no compiled module may be kept, each of the
# processes that they start compiles attemper again, and collecting the tests takes 25 s of processor time in place of 12
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist loadgroup

.PHONY: run test test-all matrix triton transformers third-party snapshots browser check format native fuzz sanitize hostile bench docs figures clean

run: $(RUNS)  ## a scan of the embedded model, with and without its scale, and the report
	$(BIN)/attemper scan --deep --token it --what-if none -o attemper-report.html --force

test: $(READY) browser  ## everything but the exhaustive grids
	$(PYTEST) -m "not exhaustive"

test-all: $(READY) browser  ## with the exhaustive grids
	$(PYTEST)

SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ATTEMPER_CPU_VARIANT=avx512 \
	ATTEMPER_CPU_VARIANT=avx2 ATTEMPER_CPU_VARIANT=portable ATTEMPER_TEST_SEED=7 ATTEMPER_TEST_SEED=99 ATTEMPER_TEST_SEED=4242

NUMERIC := $(addprefix tests/,kernels definition citizenship scores modules scale watch scan lab explain)

# another Python: make matrix PYTHON=python3.13 in a fresh clone, or make matrix BIN=…/bin READY= with an environment at hand
matrix: $(READY)  ## the numeric tests as other processors, libraries and seeds would run them, and what failed, at the end
	@failed=; for setting in $(SETTINGS); do echo "== $$setting"; \
		env $$setting $(PYTEST) -q -m "not exhaustive" $(NUMERIC) || failed="$$failed $$setting"; done; \
	if [ -n "$$failed" ]; then echo "failed under:$$failed"; exit 1; fi; echo "passed under: $(SETTINGS)"

# triton 3.6 and the numpy that its interpreter needs, in an environment of their own that reads the other's torch
TRITON := .venv-triton/bin/python
triton: $(READY)  ## the Triton kernels without a GPU: compiled for Ampere and Hopper, and run by Triton's interpreter
	@test -x $(TRITON) || { $(PYTHON) -m venv .venv-triton && .venv-triton/bin/pip install -q "triton==3.6.0" "numpy<2.4" && \
		$(BIN)/python -c "import site; print(site.getsitepackages()[0]); print('$(CURDIR)/src')" > $$($(TRITON) -c "import site; print(site.getsitepackages()[0])")/torch.pth; }
	$(TRITON) -W ignore scripts/gpu_compile.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON) -W ignore -m pytest -q -n $(CORES) tests/gpu

transformers: $(READY)  ## tests/versions on every supported minor version of transformers, each in an environment of its own
	$(BIN)/python scripts/transformers_versions.py

# each package without what it depends on, so that none brings another torch; one that cannot be installed fails its models, not the rest
THIRD := .venv-third/bin/python
third-party: .venv-third/ready  ## small models of other people's packages, watched and clipped, beside a logger of their own
	$(THIRD) -W ignore scripts/third_party.py

.venv-third/ready: $(READY) tests/third_party/requirements.txt
	$(PYTHON) -m venv .venv-third
	$(BIN)/python -c "import site; print(site.getsitepackages()[0]); print('$(CURDIR)/src')" > $$($(THIRD) -c "import site; print(site.getsitepackages()[0])")/torch.pth
	-grep -v '^#' tests/third_party/requirements.txt | xargs -n 1 .venv-third/bin/pip install -q --disable-pip-version-check --no-deps
	touch $@

snapshots: $(READY)  ## the sentences of errors, tests/*/sentences.json, from the source; read the difference
	ATTEMPER_SNAPSHOTS=write OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(addsuffix test_errors.py,$(dir $(wildcard tests/*/sentences.json)))

browser:  ## a Chromium for the tests of the report and the page, and axe-core, where they can be had; never fails
	@scripts/browser.sh
	@scripts/axe.sh

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

native: $(READY)  ## the C library of kernels/cpu again, in place
	$(BIN)/python setup.py -q build_ext --inplace

fuzz: $(READY) native  ## random calls: of the native kernel against the definition, of every kernel against a second one
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --cases 10000
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz_anew.py --cases 5000

sanitize: $(READY)  ## the native kernel's tests with AddressSanitizer and UBSan
	scripts/sanitize.sh -n $(CORES)

hostile: $(READY)  ## every command under full disks, closed streams, signals and absurd numbers
	OMP_NUM_THREADS=1 $(BIN)/python scripts/hostile.py

bench: $(READY)  ## ours, torch's SDPA, eager, eager with statistics: interleaved, as ratios
	$(BIN)/attemper bench

docs: $(READY)  ## docs/reference.md and the file tree from the docstrings, the output of the pages' blocks, the pictures
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/tree.py
	$(BIN)/python scripts/blocks.py
	$(BIN)/python scripts/screenshots.py

figures: $(READY)  ## what docs/ shows of the lab: figures, numbers.md, the claims, notes.md
	$(BIN)/python scripts/figures.py
	$(BIN)/python scripts/notes.py

clean:
	rm -rf .venv build src/*.egg-info src/attemper/kernels/cpu/c/*.so

# a scan needs a fraction of what developing does, and is the first thing that people run; modules are compiled when imported
$(RUNS): pyproject.toml constraints.txt setup.py $(wildcard src/attemper/kernels/cpu/c/*.[ch] src/attemper/kernels/cpu/c/*/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attemper needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Run make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo]'
	touch $@

$(READY): $(RUNS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@
