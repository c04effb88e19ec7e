# make train: environment, install, the example on all GPUs or two CPU ranks. make test: environment, install, the tests.
# Nothing else is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# the proof is a package of this repository, not of the installed one
RUN := PYTHONPATH=. $(BIN)/python

.PHONY: train test check lint types layers proof clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

train: $(READY)
	$(BIN)/python examples/train_clip_moe.py

test: $(READY)
	$(BIN)/python -m pytest

check: lint types layers

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# static checkers do not see the mapped kernels package: they run on an installed copy
types: $(READY)
	rm -rf build .mypy_cache/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .mypy_cache/installed .
	rm -rf build  # what pip leaves here would go into the next wheel
	cd .mypy_cache/installed && $(abspath $(BIN))/mypy --config-file $(abspath pyproject.toml) -p lightning_moeclip

layers: $(READY)
	$(BIN)/python -m pytest -q tests/test_layers.py

# every long bar: writes tests/benchmarks/results/*.csv with the commit it was measured on; one of them looks at
# TensorBoard with Debian's chromium, which has to be there (apt-get install chromium)
proof: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[proof]"
	$(RUN) -m tests.proof; code=$$?; $(RUN) -m tests.proof.readme; exit $$code

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
