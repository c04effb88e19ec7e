# make train: environment, install, the example on all GPUs or two CPU ranks. make test: environment, install, the tests.
# Nothing else is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the proof is a package of this repository, not of the installed one
RUN := PYTHONPATH=. $(BIN)/python
PIP := -m pip install --quiet --disable-pip-version-check
# the oldest Triton that is promised; the newest is in constraints.txt
OLD_TRITON := 3.6.0
OLD_VENV := .venv-triton36
OLD_READY := $(OLD_VENV)/.ready
# open_clip, transformers, timm and DeepSpeed, in versions that work together
INTEROP_VENV := .venv-interop
INTEROP_READY := $(INTEROP_VENV)/.ready
INTEROP := HF_HUB_OFFLINE=1 PYTHONPATH=. PATH=$(abspath $(INTEROP_VENV))/bin:$$PATH \
	TORCH_EXTENSIONS_DIR=$(abspath $(INTEROP_VENV))/torch_extensions $(INTEROP_VENV)/bin/python

.PHONY: train test suite second-root roots interpreted compiled check lint types layers proof interop \
	kernel-resources clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt torch
	$(BIN)/python $(PIP) -c constraints.txt -e ".[dev]"
	touch $@

train: $(READY)
	$(BIN)/python examples/train_clip_moe.py

test: suite
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target interpreted compiled second-root

# whole files at a time: tests of one file share launches; a test that launches ranks takes several cores itself
suite: $(READY)
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile

# a process has one of Lightning's two roots, here the other one: what tells most of each part
second-root: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p pytorch_lightning @tests/second_root.txt

# every test under the other root
roots: $(READY)
	$(BIN)/python -m pytest -p pytorch_lightning --numprocesses=auto --maxprocesses=4 --dist=loadfile

# Triton's kernels on the CPU, and compiled for GPUs that are not here: a process can do one of both
interpreted: $(READY)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/interpreted

compiled: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/kernels/compiled

check: lint types layers

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# static checkers do not see the mapped kernels package: they run on an installed copy
types: $(READY)
	rm -rf build .mypy_cache/installed
	$(BIN)/python $(PIP) --no-deps --target .mypy_cache/installed .
	rm -rf build  # what pip leaves here would go into the next wheel
	cd .mypy_cache/installed && $(abspath $(BIN))/mypy --config-file $(abspath pyproject.toml) -p lightning_moeclip

layers: $(READY)
	$(BIN)/python -m pytest -q tests/test_layers.py

# every long bar: writes tests/benchmarks/results/*.csv with the commit it was measured on; one of them looks at
# TensorBoard with Debian's chromium, which has to be there (apt-get install chromium)
proof: $(READY) kernel-resources roots interop
	$(BIN)/python $(PIP) -c constraints.txt -e ".[proof]"
	$(RUN) -m tests.proof; code=$$?; $(RUN) -m tests.proof.readme; exit $$code

$(OLD_READY): Makefile constraints.txt
	test -x $(OLD_VENV)/bin/python || $(PYTHON) -m venv $(OLD_VENV)
	$(OLD_VENV)/bin/python $(PIP) -c constraints.txt torch numpy typing-extensions pytest pytest-timeout
	$(OLD_VENV)/bin/python $(PIP) triton==$(OLD_TRITON)
	touch $@

# registers, spills, shared memory of every kernel with the oldest and the newest Triton, and its tests with the oldest;
# writes a CSV and the table of tests/benchmarks/README.md
kernel-resources: $(READY) $(OLD_READY)
	TRITON_INTERPRET=1 $(OLD_VENV)/bin/python -m pytest tests/kernels/interpreted
	PYTHONPATH=. $(OLD_VENV)/bin/python -m tests.benchmarks.kernel_resources
	$(RUN) -m tests.benchmarks.kernel_resources

# DeepSpeed compiles when it first meets a process group on a CPU: once here, where nothing ends it half-way, which would
# leave a lock on which every later run hangs
$(INTEROP_READY): Makefile constraints-interop.txt
	test -x $(INTEROP_VENV)/bin/python || $(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_VENV)/bin/python $(PIP) -c constraints-interop.txt torch torchvision
	$(INTEROP_VENV)/bin/python $(PIP) -c constraints-interop.txt open_clip_torch transformers timm deepspeed lightning \
		torchmetrics tensorboard numpy fsspec typing-extensions pytest pytest-timeout
	$(INTEROP) -m tests.interop.compile_deepspeed
	touch $@

# the recorded layouts against the live models, and the real packages trained under the strategy
interop: $(INTEROP_READY)
	$(INTEROP) -m pytest tests/interop

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
