# make demo   evaluate the checkpoints of this package, train a small model, evaluate it; write HTML reports
# make test   formatting, lint, types, import order, all tests
# make test-cuda JOBS=8   only the tests that need a CUDA device, failures at once
# make bench  the speed of all solvers and slot modules (see benchmarks/)
# make docs   the documentation as a site, for reading offline
# make wheel  build the packages, install them into an empty environment and try them
# make soak   damaged files, killed runs, full disks
# make mutants MODULE=cutslots/training/losses.py   the changes to a module that no test notices
#
# Each sets up .venv first. If your Python is not called python3: make PYTHON=python3.12 test

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-cuda bench soak mutants docs format wheel clean

# Another seed: make demo SEED=1
SEED ?= 0

demo: .venv/ready
	$(BIN)/cutslots evaluate plain-128 --data plain --num-images 16 --out out/plain
	$(BIN)/cutslots evaluate textured-128 --data textured --num-images 16 --out out/textured
	@echo "the checkpoints of this package: see out/plain/report.html and out/textured/report.html"
	@echo "now training a small model, which takes minutes"
	$(BIN)/cutslots train tiny --seed $(SEED) --out out/demo-$(SEED)
	$(BIN)/cutslots evaluate out/demo-$(SEED) --data plain:2-5 --num-images 320
	@echo "open out/demo-$(SEED)/evaluation/report.html in a browser"

test: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest -n 2 --dist worksteal --durations 20

# Processes; test-cuda and mutants
JOBS ?= 2

test-cuda: .venv/dev
	$(BIN)/pytest -n $(JOBS) --only-cuda

bench: .venv/dev
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/solvers.py
	$(BIN)/python benchmarks/slots.py
	$(BIN)/python benchmarks/min_cut.py

# Damaged files, SIGKILL, full disks. For longer: make soak MOMENTS=500 MINUTES=60
MOMENTS ?= 50
MINUTES ?= 5

soak: .venv/dev
	$(BIN)/python -m tests.soak --moments $(MOMENTS) --minutes $(MINUTES)

# Mutation tests of one module, or several in quotes. Run again after adding tests: it takes only the survivors.
MODULE ?= cutslots/training/losses.py

mutants: .venv/dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	$(BIN)/python -m tests.mutants $(MODULE) --jobs $(JOBS)
	@echo "the survivors are listed in out/mutants"

docs: .venv/ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open out/docs/index.html in a browser"

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel:
	rm -rf out/dist out/installed out/smoke
	$(PYTHON) -m venv out/installed
	out/installed/bin/pip install -q --disable-pip-version-check build
	out/installed/bin/python -m build -q --outdir out/dist .
	out/installed/bin/pip install -q --disable-pip-version-check -c constraints.txt out/dist/*.whl
	mkdir -p out/smoke
	cd out/smoke && ../installed/bin/python -P ../../.ci/smoke.py .
	@ls out/dist/*

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else \
	    f"cutslots needs Python 3.11 to 3.13, and $(PYTHON) is {v.major}.{v.minor}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/ready
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv out
