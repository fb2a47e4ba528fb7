# Each command sets up what it needs in $(VENV), once: `make demo` the least, `make test` more, `make lint` all.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
PIP := $(INSTALL) -c constraints.txt
# Files of requirements with digests name all that is to be installed. What builds a package is installed too.
LOCKED := $(INSTALL) --no-deps --no-build-isolation --require-hashes
OLD := import sys; sys.version_info < (3, 11) and sys.exit("This is Python %d.%d. Name one from 3.11 to 3.13: \
  make demo PYTHON=python3.12" % sys.version_info[:2])
DEMO := $(VENV)/.demo
TEST := $(VENV)/.test
DEV := $(VENV)/.dev
# make test WORKERS=8, make job-trl MARKED=slow, make test TESTS='-k radius -x'
WORKERS ?= 2
MARKED ?= not slow and not exhaustive
# One thread for each worker: torch would start one for each core in each of them.
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
PYTEST := $(RUN_TESTS) -m "$(MARKED)" $(TESTS)

# Where the packages are, and their sources as Python finds them where they are not installed.
BANDPO := packages/bandpo/src/bandpo
RLVET := packages/rlvet/src/rlvet
LAB := packages/bandpo-lab/src/bandpo_lab
SOURCES := packages/bandpo/src:packages/rlvet/src:packages/bandpo-lab/src
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)

# The jobs of continuous integration that run tests, and the folders of each. No test is in two of them.
PATHS_core := packages/bandpo/tests/core $(BANDPO)/core $(filter-out $(BANDPO)/__init__.py,$(wildcard $(BANDPO)/*.py))
# The callback of trainers needs transformers, so its examples run with those of TRL.
CALLBACK := $(BANDPO)/watch/trainer_callback.py
PATHS_audit := $(foreach part,audit certificate replay watch,packages/bandpo/tests/$(part)) \
  $(foreach part,audit certificate replay testing,$(BANDPO)/$(part)) $(filter-out $(CALLBACK),$(wildcard $(BANDPO)/watch/*.py))
PATHS_rlvet := packages/rlvet/tests $(RLVET)
PATHS_docs := tests/test_browser_doctor.py
PATHS_commands := $(filter-out $(PATHS_docs),$(wildcard tests/test_*.py)) $(BANDPO)/cli
# In an environment with Triton, which interprets the kernels on the CPU and compiles them for a card.
PATHS_kernels := packages/bandpo/tests/kernels
PATHS_trl := $(wildcard packages/bandpo/tests/integrations/test_trl*.py) $(BANDPO)/integrations/trl $(CALLBACK)
PATHS_verl := $(wildcard packages/bandpo/tests/integrations/test_verl*.py) $(BANDPO)/integrations/verl
# The modules of SkyRL and Tinker need these frameworks, which the environment has not.
PATHS_frameworks := packages/bandpo/tests/framework_examples $(filter-out $(PATHS_trl) $(PATHS_verl) %/__init__.py %/skyrl.py %/tinker.py,\
  $(wildcard packages/bandpo/tests/integrations/test_*.py $(BANDPO)/integrations/*.py))
PATHS_training := packages/bandpo-lab/tests/commands $(LAB)/cli $(wildcard $(LAB)/*.py) \
  $(foreach part,training output,packages/bandpo-lab/tests/$(part) $(LAB)/$(part))
PATHS_evaluation := $(foreach part,evals data tasks files models,packages/bandpo-lab/tests/$(part) $(LAB)/$(part))
PATHS_recipes := packages/bandpo-lab/tests/recipes packages/bandpo-lab/tests/cluster $(LAB)/cluster
PATHS_rehearsal := packages/bandpo-lab/tests/rehearsal $(LAB)/rehearsal
PATHS_studies := $(foreach part,study toy,packages/bandpo-lab/tests/$(part) $(LAB)/$(part)) research/tests research/studies
TEST_JOBS := core recipes trl training commands studies rlvet audit evaluation verl kernels rehearsal frameworks
# The longest first, so that all cores end together, and beside them those that mostly wait.
LONG := core recipes trl
SHORT := rehearsal frameworks
JOBS := $(addprefix job-,$(LONG)) docs release-check $(addprefix job-,$(filter-out $(LONG) $(SHORT),$(TEST_JOBS))) lint \
  $(addprefix job-,$(SHORT))
# Where Python must not keep what it compiled, each process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo setup test $(addprefix job-,$(TEST_JOBS)) list-jobs list-paths slow-test nightly test-matrix conformance keys rehearsals \
  figures node-rehearsal coverage mutation lint docs release-check audit-deps gpu-check first-hour lock clean

demo: $(DEMO)
	@echo "Training a small network with five clip rules, about a minute on two cores. After Ctrl-C, make demo goes on."
	@$(BIN)/bandpo-lab compare --output_dir runs/demo
	@echo "next: . $(BIN)/activate, then rlvet diagnose runs/demo/FixedClip-0.2-seed-0, bandpo audit with the same folder, README.md"

setup: $(DEV)

# bandpo without its integrations of frameworks, rlvet, and the commands. No framework is imported to collect these tests.
test: $(TEST)
	@echo "Testing bandpo without frameworks, rlvet and the commands: a minute or two on two cores."
	$(PYTEST) $(PATHS_core) $(PATHS_audit) $(PATHS_rlvet) $(PATHS_commands)

# One job of continuous integration: make job-trl, and so on.
$(addprefix job-,$(TEST_JOBS)): job-%: $(DEV)
	$(PYTEST) $(PATHS_$*)

# Triton for the tests of the kernels, and JAX for those of bandpo.portable, in a folder of their own: torch's builds for CUDA
# bring Triton, and those for the CPU take no part of it. Without them in $(VENV), set-up takes no longer, and torch finds the
# same packages.
TRITON := build/triton
JAX := jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 opt_einsum==3.4.0
job-kernels: $(TRITON)/.installed
job-kernels: export PYTHONPATH = $(TRITON)

$(TRITON)/.installed: constraints.txt | $(DEV)
	$(PIP) --no-deps --upgrade --target $(TRITON) triton $(JAX)
	touch $@

# The names of the jobs that .ci/run and the workflow run.
list-jobs:
	@printf '%s\n' $(JOBS)

# The folders of each job, a line each, for the test that every test is in one of them.
list-paths:
	@$(foreach job,$(TEST_JOBS) docs,echo $(job) $(PATHS_$(job));)

# What trains, compiles, starts processes or brings up Ray, of all jobs.
slow-test: $(DEV)
	$(RUN_TESTS) -m slow $(TESTS)

# The branch coverage of the core, which must be at least 95 %.
coverage: export PYTHONPATH = $(TRITON)
coverage: $(DEV) $(TRITON)/.installed
	$(RUN_TESTS) -m "not exhaustive" $(PATHS_core) $(PATHS_kernels) --cov --cov-report=term

# What takes hours and seldom fails: the oracle's whole grid, kills and full disks, a Ray cluster, each recipe, mutants.
nightly: rehearsals node-rehearsal mutation coverage
	$(RUN_TESTS) -m exhaustive
	$(BIN)/python scripts/fuzz.py --cases 10000000 --output build/fuzz.json

# Each adapter against its framework, and the oldest and newest torch, TRL and verl, each in an environment of its own under
# build/matrix: about 27 GB the first time.
test-matrix: $(DEMO)
	$(BIN)/python scripts/matrix.py build/matrix

# The atlas of losses, the nearest method of each that a framework ships: docs/atlas.md. Environments under build/conformance.
# CONFORMANCE='--newest build/drift.md' compares the newest releases, and writes what changed.
conformance: $(DEMO)
	$(BIN)/python scripts/conformance.py build/conformance $(CONFORMANCE)

# The lines of code that prove the table of logged keys, in the newest commit of each framework. Clones under build/clones.
keys: $(DEMO)
	$(BIN)/python scripts/key_table.py --clones build/clones

# What pages show of the committed studies: the pictures, the reports, and the tables of research/reports/rules-compared.md.
# With more threads a sum has another order, and one number of a report another last digit.
figures: export OMP_NUM_THREADS = 1
figures: $(DEV)
	PYTHONPATH=research $(BIN)/python scripts/pictures.py docs/figures research/reports/figures
	PYTHONPATH=research $(BIN)/python scripts/map_page.py research/results/optimizers research/reports/optimizers/map.md
	PYTHONPATH=research $(BIN)/python -m studies.smollm2_report research/results/smollm2/runs.jsonl.gz research/reports/smollm2/report.md
	PYTHONPATH=research $(BIN)/python -m studies.staleness_report research/results/staleness/runs.jsonl.gz research/reports/staleness/report.md
	PYTHONPATH=research $(BIN)/python -m studies.async_trainer research/results/async-trainer --report research/reports/async-trainer/report.md
	PYTHONPATH=research $(BIN)/python -m studies.gate research/results/gate/rows.jsonl --report research/reports/gate/report.md
	PYTHONPATH=research $(BIN)/python -m studies.paper_setting research/results/paper-setting/rows.jsonl.gz --report research/reports/paper-setting/report.md
	PYTHONPATH=research $(BIN)/python -m studies.control research/results/control/rows.jsonl.gz --report research/reports/control/report.md
	PYTHONPATH=research $(BIN)/python -m studies.transfer research/results/transfer/rows.jsonl.gz --report research/reports/control/network.md
	PYTHONPATH=research $(BIN)/python -m studies.control_axis research/results/control/axis.jsonl.gz --report research/reports/control/axis.md
	PYTHONPATH=research $(BIN)/python -m studies.network_ledger research/results/network-ledger/records.jsonl.gz --rows research/results/paper-setting/rows.jsonl.gz --report research/reports/network-ledger.md
	PYTHONPATH=research $(BIN)/python scripts/when_tables.py

# Each recipe for verl, small, on this machine's CPU: about a minute each.
rehearsals: $(DEV)
	$(BIN)/python scripts/rehearse_recipes.py build/rehearsals

# The main recipe, small, in the environment for verl of docs/install.md, without vLLM. NODE_TORCH names a CPU build of its torch,
# as a file or otherwise; torch's usual build for Linux brings 5 GB of CUDA.
NODE := build/node
NODE_LOCK := $(LAB)/recipes/gpu.txt
NODE_TORCH ?= torch
node-rehearsal: $(NODE)/.installed
	$(NODE)/bin/bandpo-lab rehearse --stand-in -- +paper/model=qwen2.5-3b-instruct +paper/rule=band-kl +paper=recommended

$(NODE)/.installed: $(NODE_LOCK) $(PROJECTS)
	python3.12 -m venv $(NODE)
	$(NODE)/bin/python -m pip install --quiet -c $(NODE_LOCK) $(NODE_TORCH)
	$(NODE)/bin/python -m pip install --quiet -c $(NODE_LOCK) -e packages/rlvet -e 'packages/bandpo[verl]' \
	  -e 'packages/bandpo-lab[verl]'
	touch $@

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell packages examples tests docs upstream benchmarks scripts research README.md CHANGELOG.md CONTRIBUTING.md MAINTAINING.md SECURITY.md
	$(BIN)/zizmor --offline --quiet .

# Which changes to the solver and the loss no test notices; listed in CONTRIBUTING.md.
mutation: $(DEV)
	$(BIN)/python scripts/mutants.py build/mutants $(MUTATION)

# Takes npm, for the page that diagnoses a log in the browser; its tests take Chromium, and those that start it are slow.
# mkdocs without --quiet: it would hide warnings from the strict mode that counts them.
docs: $(DEV)
	$(BIN)/python scripts/fetch_pyodide.py build/pyodide
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --site-dir build/site
	$(PYTEST) -rs $(PATHS_docs)

# Builds twice and compares, checks what is inside, installs into an empty environment. With RELEASE='--extras --tested' also
# installs each extra, which depends on what the index has that day.
release-check: $(DEV)
	$(BIN)/python scripts/check_release.py build/release $(RELEASE)

# Asks the advisory database about every locked version; needs the network beyond the package index.
audit-deps: $(DEV)
	$(PIP) pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# What only a GPU can tell, in at most 16 minutes, and the table of it in research/reports/benchmarks.md. In the Python at hand, not in
# $(VENV): it needs a torch for the GPU, and measures with the packages that are there. GPU_CHECK='--only losses' for a part.
gpu-check:
	PYTHONPATH=$(SOURCES):tests $(PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

# One GPU: gpu-check, then a 1.5B model by four rules with two seeds, each judged: docs/paper.md. In the Python at hand, as
# gpu-check. FIRST_HOUR=--dry-run prints the plan, FIRST_HOUR=--rehearse goes through it on a CPU.
first-hour:
	PYTHONPATH=$(SOURCES):scripts $(PYTHON) scripts/first_hour.py $(FIRST_HOUR)

# Resolves anew for Python 3.11 to 3.13 and every platform. What is pinned stays, unless LOCK='--upgrade-package NAME' or
# LOCK=--upgrade says otherwise.
lock:
	test -x build/lock/bin/uv || $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet uv
	$(PYTHON) scripts/lock.py build/lock/bin/uv $(LOCK)

# torch is pinned by its version alone: a machine may have a build of its own, such as one for the CPU, with another digest.
# What it requires is here by then, but for the CUDA libraries of its usual build for Linux. Modules are compiled when they
# are first imported, which most never are.
$(DEMO): $(PROJECTS) constraints.txt locks/build.txt locks/demo.txt
	@test -x $(BIN)/python || $(PYTHON) -c '$(OLD)'
	@echo "1/4 Making $(VENV) and installing the tools that build packages"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(LOCKED) -r locks/build.txt
	@echo "2/4 Installing torch and $$(grep -c '^[a-z]' locks/demo.txt) packages, of which torch alone may be 200 MB to 3 GB: a minute or more"
	@$(PIP) --no-deps torch & torch=$$!; $(LOCKED) -r locks/demo.txt && wait $$torch
	@echo "3/4 Installing what torch requires here"
	@$(PIP) torch
	@echo "4/4 Installing rlvet, bandpo and bandpo-lab from this clone"
	@$(INSTALL) --no-deps --no-build-isolation -e packages/rlvet -e packages/bandpo -e packages/bandpo-lab
	@touch $@

$(TEST): $(DEMO) locks/test.txt
	@echo "Installing $$(grep -c '^[a-z]' locks/test.txt) packages that the tests need"
	@$(LOCKED) -r locks/test.txt
	@touch $@

$(DEV): $(TEST) locks/dev.txt
	@echo "Installing $$(grep -c '^[a-z]' locks/dev.txt) packages that every test, the checks of code and the site need: some minutes"
	@$(LOCKED) -r locks/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist site
