# Every target makes its own environment in .venv first. Needed beforehand: make, a C++ compiler, Python 3.10 or newer.
#   make demo   train, kill a worker under three launchers, resume, compare bit by bit; writes out/demo/
#   make quick  between two of those, a minute: lint of what changed, unit tests, 20 drawn runs that are killed
#   make test   lint, types and every test but the long campaigns, in JOBS processes; a quarter of an hour on two cores
#   make soak   the long campaigns of kills, all examples of properties        make bench  throughput, recovery, storage, quality after faults; an hour
#   make docs   the site, into build/site; built from docs/ and the docstrings, and nothing is downloaded
#   make wheel  with both compiled parts, into dist/; needs nvcc, and runs with the drivers that its CUDA version runs with
#   make versions   killed runs under the lowest versions that pyproject.toml declares, and under the newest there are
#   make sanitize   the tests of compiled code against builds with the address and the thread sanitizer
# PYTHON picks the interpreter that .venv is made from; PYTEST_ARGS goes to pytest (-k name, -x, --durations=20).
# JOBS=0 runs tests in pytest's own process, one after another, as a debugger wants it.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# S3 servers for the tests, apart because they pin other versions.
SERVERS := $(VENV)/servers
PIP := $(BIN)/python -m pip --disable-pip-version-check

# One thread per process: a rank is a process here, and two ranks on two cores must not fight over them.
export OMP_NUM_THREADS := 1

# Bytecode is kept whatever the environment says: else every process of a run compiles the package, and every run all tests.
unexport PYTHONDONTWRITEBYTECODE

# `callbacks` is checked as lightning_moe_ckpt/callbacks, a link: under both names it would be two modules.
TYPES := $(BIN)/mypy --strict lightning_moe_ckpt benchmarks tests examples

library = $$($${CXX:-g++} -print-file-name=$(1))
SANITIZED_TESTS := $(addprefix tests/native/test_,compiled.py digest.py memory.py gradient.py adam.py replan.py device_check.py)
SANITIZED_TESTS += $(addprefix tests/native/test_,emulated_kernels.py emulated_engine.py)
emulated = MOE_CKPT_EMULATED=$$($(BIN)/python tests/native/emulator/build.py --sanitize $(1))
SANITIZED := -p no:cacheprovider --hypothesis-profile=sanitized -k 'not forked and not other_builds' $(SANITIZED_TESTS)

.DEFAULT_GOAL := test
.PHONY: demo quick test lint style soak bench sanitize versions docs wheel clean distclean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Each process takes ten seconds to begin.
quick: JOBS ?= 2
QUICK := $(addprefix tests/,policies recovery session planning snapshot journal process test_layering.py test_public_api.py campaign/test_configurations.py)
quick: $(STAMP)
	git diff --name-only --diff-filter=d HEAD -- '*.py' | xargs -r $(BIN)/ruff check --force-exclude
	MOE_CKPT_ROWS=20 $(BIN)/pytest -q -n $(JOBS) --dist worksteal $(QUICK) $(PYTEST_ARGS)

# mypy takes one core for a minute when its cache is empty, and pytest does not have two to do at every moment: side by side.
# Three on two cores: for a tenth of the time tests wait for timers, servers and other processes.
test: JOBS ?= 3
test: style $(SERVERS)/.stamp
	@mkdir -p build; $(TYPES) >build/types.log 2>&1 & types=$$!; \
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS); status=$$?; \
	wait $$types || { cat build/types.log; exit 1; }; exit $$status

lint: style
	$(TYPES)

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

soak: $(STAMP) $(SERVERS)/.stamp
	$(BIN)/pytest -m "soak or hypothesis" -s $(PYTEST_ARGS)

# The sanitizer's own library has to come first in the process. Python and torch never give all memory back, and torch
# is not instrumented: leaks are not looked for, and races only where our code takes part (ext/sanitizers/thread.supp). A
# forked child of a process with threads is beyond what sanitizers support, and a test of other builds of torch starts
# processes without them.
sanitize: $(STAMP)
	$(BIN)/python ext/build_native.py --sanitize address --out build/address
	$(call emulated,address) LD_PRELOAD="$(call library,libasan.so) $(call library,libstdc++.so.6)" MOE_CKPT_NATIVE_PATH=$(CURDIR)/build/address \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/pytest $(SANITIZED) $(PYTEST_ARGS)
	$(BIN)/python ext/build_native.py --sanitize thread --out build/thread
	$(call emulated,thread) LD_PRELOAD="$(call library,libtsan.so) $(call library,libstdc++.so.6)" MOE_CKPT_NATIVE_PATH=$(CURDIR)/build/thread \
	  TSAN_OPTIONS=suppressions=$(CURDIR)/ext/sanitizers/thread.supp:exitcode=66 \
	  $(BIN)/pytest $(SANITIZED) $(PYTEST_ARGS)

# Compiled in place, as for .venv: that depends on no version. The lowest versions have wheels up to Python 3.11.
versions: $(STAMP)
	$(PYTHON) -m venv --clear $(VENV)/lowest
	$(VENV)/lowest/bin/python -m pip --disable-pip-version-check install --quiet "setuptools>=77" -r tests/versions/lowest.txt
	$(VENV)/lowest/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	$(VENV)/lowest/bin/python tests/versions/exactness.py
	$(PYTHON) -m venv --clear $(VENV)/newest
	$(VENV)/newest/bin/python -m pip --disable-pip-version-check install --quiet "setuptools>=77" "lightning<3" $$(sed -n 's/==.*//p' tests/versions/lowest.txt)
	$(VENV)/newest/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e .
	$(VENV)/newest/bin/python tests/versions/exactness.py

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file .ci/mkdocs.yml
	@echo "build/site is built. Its search needs http: $(BIN)/python -m http.server -d build/site 8000, then port 8000 of localhost in a browser"

wheel: $(STAMP)
	MOE_CKPT_NATIVE=1 MOE_CKPT_CUDA=1 $(BIN)/python -m build --no-isolation --wheel

bench: $(STAMP)
	$(BIN)/moe-ckpt bench all
	$(BIN)/python -m benchmarks all

clean:
	rm -rf build dist out *.egg-info lightning_moe_ckpt/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Compiles the extension in place. Without build isolation it and the wheel test use the setuptools pinned in constraints.txt.
# LitGPT comes without what it asks for: its bounds exclude versions that others here need, and its modules need none of it.
# DeepSpeed, whose layers run on a CPU, is built without its kernels, and comes with what its layers import.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard ext/build_*.py) $(wildcard ext/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version) if sys.version_info < (3, 10) else None'
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt setuptools torch
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev,cli,examples]'
	$(PIP) install --quiet -c constraints.txt --no-deps litgpt
	DS_BUILD_OPS=0 $(PIP) install --quiet -c constraints.txt --no-deps --no-build-isolation deepspeed einops hjson msgpack py-cpuinfo
	@touch $@

$(SERVERS)/.stamp: tests/servers/requirements.txt $(STAMP)
	@test -x $(SERVERS)/bin/python || $(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	@touch $@
