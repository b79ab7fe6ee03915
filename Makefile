# Every target makes its own environment in .venv first. Needed beforehand: make, a C++ compiler, Python 3.10 or newer.
#   make demo   train, kill a worker, resume, compare bit by bit; writes out/demo/
#   make test   lint, types and every test but the long campaigns; the last line is pytest's summary
#   make soak   the long campaigns of kills        make bench  throughput and planner figures
# PYTHON picks the interpreter that .venv is made from; PYTEST_ARGS goes to pytest (-k name, -x, --durations=20).

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: a rank is a process here, and two ranks on two cores must not fight over them.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := test
.PHONY: demo test lint soak bench clean distclean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/pytest $(PYTEST_ARGS)

# `callbacks` is checked as lightning_moe_ckpt/callbacks, a link: under both names it would be two modules.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lightning_moe_ckpt tests examples

soak: $(STAMP)
	$(BIN)/pytest -m soak -s $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/moe-ckpt bench all

clean:
	rm -rf build dist out *.egg-info lightning_moe_ckpt/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Compiles the extension in place. Without build isolation it and the wheel test use the setuptools pinned in constraints.txt.
# LitGPT comes without what it asks for: its bounds exclude versions that others here need, and its modules need none of it.
$(STAMP): pyproject.toml constraints.txt setup.py ext/build_native.py $(wildcard ext/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version) if sys.version_info < (3, 10) else None'
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt setuptools torch
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev,cli,examples]'
	$(PIP) install --quiet -c constraints.txt --no-deps litgpt
	@touch $@
