# `make demo` and `make test` set up everything they need in $(VENV) and are fast the second time.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FAST := -n 2 -m "not slow and not exhaustive"

.PHONY: demo test slow-test exhaustive-test test-matrix rehearsals coverage mutation lint docs release-check audit-deps gpu-check \
  clean

demo: $(READY)
	$(BIN)/bandpo train --output_dir runs/demo --resume

test: $(READY)
	$(BIN)/python -m pytest $(FAST) $(TESTS)

slow-test: $(READY)
	$(BIN)/python -m pytest -m slow

exhaustive-test: $(READY)
	$(BIN)/python -m pytest -m exhaustive

# Each adapter against its framework, and the oldest and newest torch, TRL and verl, each in an environment of its own under
# build/matrix: about 20 GB the first time.
test-matrix: $(READY)
	$(BIN)/python scripts/matrix.py build/matrix

# Each recipe for verl, small, on this machine's CPU: about a minute each.
rehearsals: $(READY)
	$(BIN)/python scripts/rehearse_recipes.py build/rehearsals

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell src tests docs benchmarks scripts studies README.md CONTRIBUTING.md

# Branch coverage of the core by the tests that are about it, which must be at least 95 %.
coverage: $(READY)
	$(BIN)/python -m pytest $(FAST) tests/core --cov --cov-report=term

# Which changes to the solver and the loss no test notices; listed in docs/development.md.
mutation: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt mutmut
	$(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir build/site

# Builds twice and compares, checks what is inside, installs into an empty environment. With EXTRAS=--extras also
# resolves each extra, which depends on what the index has that day.
release-check: $(READY)
	$(BIN)/python scripts/check_release.py build/release $(EXTRAS)

# Asks the advisory database about every locked version; needs the network beyond the package index.
audit-deps: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# What only a GPU can tell, in at most 20 minutes, and the table of it in docs/benchmarks.md. In the Python at hand, not in
# $(VENV): it needs a torch for the GPU, and measures with the packages that are there. GPU_CHECK='--only speed' for a part.
gpu-check:
	PYTHONPATH=src:tests $(PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

# torch first and pinned: any later step would otherwise be free to pick another build of it.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist site
