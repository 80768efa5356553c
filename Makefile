# Everything a user needs: Python 3.11 or newer, and make. Each target installs what it needs.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Programs that tests and the demo start read compiled files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test style lint proto bench results soak gpu clean
install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "homeswarm needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@# Compiled once, and not by each of a run's processes at the same time.
	$(BIN)/python -c 'import bootstrap.program.hosting, peer.program.life, swarm.local.transformers_library as library; library.transformers.LlamaModel'
	@touch $(STAMP)

demo: install
	$(BIN)/swarm demo $(DEMO)

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

proto: install
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. swarm/proto/*.proto

# Types are checked beside the tests. TESTS may name some.
TYPES := $(VENV)/types.txt
test: install style
	@nice -n 10 $(BIN)/mypy > $(TYPES) 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -m 'not soak' --numprocesses auto --dist loadfile $(TESTS); tests=$$?; \
	wait $$types; types=$$?; cat $(TYPES); test $$tests -eq 0 -a $$types -eq 0

# Of tests with many cases some are drawn, and it says with which seed; ALL=1 runs all.
soak: install
	$(BIN)/python -m pytest -m soak --timeout 3600 --numprocesses auto --dist loadfile $(if $(ALL),--all-cases) $(TESTS)

MIXED := tests/kernels/gpu tests/swarm/model/test_wire.py tests/swarm/model/test_devices.py tests/swarm/optim/test_local_window.py \
         tests/peer/sim/test_mixed_devices.py tests/peer/audit/test_newcomers.py
# On a machine with an NVIDIA GPU: the kernels' bits, swarms of CPU and GPU peers, and what share of its arithmetic it spends.
gpu: install
	$(BIN)/python -m pip install --quiet --editable '.[dev,gpu]'
	TEST_DEVICE=cuda:0 $(BIN)/python -m pytest -m "" -k "gpu or cuda" $(MIXED)
	$(BIN)/python -m benchmarks.gpu

bench: install
	$(BIN)/python -m benchmarks.training_throughput

# Goes on where it was broken off. NAMES may name some of docs/results.json, AT_MOST=3 leaves out what takes longer than
# 3 minutes; `python -m benchmarks.results --help` has the rest.
results: install
	$(BIN)/python -m benchmarks.results $(if $(AT_MOST),--at-most $(AT_MOST)) $(NAMES)

clean:
	rm -rf $(VENV)
