# make demo   draws built-in scenes, cuts a photograph, and prints where the pictures are
# make test   formatting, lint, types and all tests
# make bench  every solver we know, side by side (see benchmarks/)
#
# Each sets up .venv first. With a Python that is not called python3: make PYTHON=python3.12 test

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test bench format clean

demo: .venv/ready
	$(BIN)/python examples/scene_families.py --out out/demo
	$(BIN)/python examples/relaxed_and_exact.py --out out/demo

test: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2

bench: .venv/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/solvers.py

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else \
	    f"cutslots needs Python 3.11 to 3.13, and $(PYTHON) is {v.major}.{v.minor}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv out
