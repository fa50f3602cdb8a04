# One command per task; each makes the environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# where it is set, each start of a daemon, an engine or a command compiles all it imports again: 0.3 s
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test kernels test-tiers test-aarch64 test-vm test-image chaos check bench gpu gpu-dry gpu-wheels install uninstall clean

help:
	@echo "make demo    one daemon, three models, one memory budget: chats, evictions, a killed engine (a minute or two the first time)"
	@echo "make test    the test suite"
	@echo "make test-tiers    the same, once for each kind of processor that this one can stand for: a quarter of an hour each"
	@echo "sudo make test-aarch64   kernels, models and a daemon on an emulated aarch64 processor; docs/aarch64.md"
	@echo "sudo make test-vm   the systemd units in an emulated machine that boots Debian; docs/vm.md"
	@echo "make test-image     builds the image of Containerfile with this machine's podman or docker and tries it; docs/install.md"
	@echo "make chaos SECONDS=600   a node under load while its processes, disks and clients fail; SEED=N repeats an order"
	@echo "make check   ruff, mypy, architecture and docs tests"
	@echo "make gpu ONLY=correctness, ONLY=speed, ONLY=system   tests and figures of docs/gpu.md, on a machine with a CUDA device,"
	@echo "             nine minutes each at most; OUT=folder for the results"
	@echo "make gpu-dry    the same scripts, interpreted on the CPU at tiny sizes; make gpu-wheels gets what an offline machine may lack"
	@echo "sudo make install     the service: /opt/hearthd, systemd units, /etc/hearthd; see docs/operations.md"
	@echo "sudo make uninstall   takes it away; settings and models stay"
	@echo "make bench   the figures of docs/performance.md, measured on this machine"

# The demo needs only what runs the daemon; the tests need more. Each stamp depends on what it was made from.
$(VENV)/.run: pyproject.toml constraints.txt demo/setup.sh
	@sh demo/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt demo/setup.sh
	@sh demo/setup.sh "$(PYTHON)" "$(VENV)" test
	@touch $(VENV)/.run $@

demo: $(VENV)/.run
	@echo "\$$ $(BIN)/python -m engine.warm .demo/cache float32   # compiles the CPU kernels: half a minute the first time"
	@$(BIN)/python -m engine.warm .demo/cache float32
	@$(BIN)/python -m demo.run $(if $(MODEL),--model '$(MODEL)')

# So many processes take the test files one after the other: TESTS_AT_ONCE=0 runs all in one, as `$(BIN)/python -m pytest` does.
# Two more than the two cores of a small machine, because tests of whole nodes mostly wait.
TESTS_AT_ONCE ?= 4

# Tests of the project's rules are a part of `make check`, too: `make check test` runs them once.
RULES := tests/test_architecture.py tests/test_docs.py
ONCE = $(if $(filter check,$(MAKECMDGOALS)),$(RULES:%=--ignore=%))

# Tests that run make are not to find this one's flags.
test: kernels
	@echo "$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder $(ONCE)"
	@MAKEFLAGS= HEARTHD_TEST_KERNELS=compiled $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder $(ONCE)

kernels: $(VENV)/.test
	@echo "\$$ $(BIN)/python -m tests.kernel_cache   # compiles the CPU kernels: a minute the first time"
	@$(BIN)/python -m tests.kernel_cache

# Features of the processor that are taken away (engine/host/processor.py); the tests print what they skip for it.
TIERS ?= -amx -avx512bf16 -avx512vnni -avx512

test-tiers: $(VENV)/.test
	@for tier in $(TIERS); do echo "HEARTHD_CPU_FEATURES=$$tier"; HEARTHD_CPU_FEATURES=$$tier $(MAKE) test || exit 1; done

# Not part of `make test`: it needs root and four Debian packages, and takes half an hour and more.
test-aarch64:
	@$(PYTHON) -m tests.aarch64.run $(PARTS) $(if $(PROCESSOR),--processor $(PROCESSOR))

# Not part of `make test`: it needs root and two Debian packages, and takes half an hour.
test-vm:
	@$(PYTHON) -m tests.vm.run $(PARTS)

# Not part of `make test`: it needs a container engine. BUILD_FLAGS and RUN_FLAGS go to its build and its runs: another index, say.
test-image: $(VENV)/.test
	@$(BIN)/python -m tests.image.run --engine='$(ENGINE)' --build-flags='$(BUILD_FLAGS)' --run-flags='$(RUN_FLAGS)'

# Each fault that it finds is printed with what was done; the last line is a JSON object. RUNNER=null computes nothing.
SECONDS ?= 60
RUNNER ?= torch

chaos: $(VENV)/.test
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) --runner $(RUNNER) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(RULES)

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.run

# On a CUDA machine, offline: its own python with torch and triton, and of .wheels (see gpu-wheels) only what that python lacks.
# One process, so that one clock counts all it does. ONLY: correctness, speed or system, or names of their parts with commas between
# (benchmarks/gpu_parts.py).
OUT ?= .gpu-results
GPU_PYTHON ?= python3
WHEELS := .wheels

gpu:
	@$(GPU_PYTHON) -m benchmarks.gpu --wheels $(WHEELS) --out "$(OUT)" $(if $(ONLY),--only $(ONLY))

gpu-dry: $(VENV)/.test
	@$(BIN)/python -m benchmarks.gpu --tiny --out "$(OUT)" $(if $(ONLY),--only $(ONLY))

gpu-wheels:
	@$(PYTHON) -m benchmarks.gpu_wheels --get $(WHEELS)

install:
	@PYTHON="$(PYTHON)" PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" sh systemd/install.sh install

uninstall:
	@PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" sh systemd/install.sh uninstall

clean:
	rm -rf $(VENV) .demo .cache .wheels .gpu-results .aarch64 .vm
