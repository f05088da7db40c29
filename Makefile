# Works on a machine with only Python (3.10 or newer) and make. Every target is idempotent.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo test test-all check bench clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)           ## train the shipped model with GRPO, on this machine, without network
	$(BIN)/covey demo

test: $(STAMP)           ## the quick tests (minutes)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)       ## the slow ones too
	$(BIN)/python -m pytest -m "not gpu"

check: $(STAMP)          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)          ## rollout speed side by side (small), and what a few presets learn
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/rollout.py --size 10m --repeats 3
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python benchmarks/algorithms.py --seeds 1 --presets grpo dapo dr_grpo ppo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
