# `make demo` and `make test` do all set-up on a fresh machine; everything runs from .venv, or one beside it.
PY ?= python3
BIN := .venv/bin
READY := .venv/.ready
RECIPE ?= recipes/tiny.yaml

BENCHES := bench-memory bench-backup bench-sync bench-rollout bench-update bench-switch bench-vllm bench-losses bench-gate

.PHONY: setup demo test test-newest test-oldest test-ci test-all lint docs dist environment plans soak test-gpu test-gpus $(BENCHES) clean

# Byte code is made when a module is first imported: compiling all of site-packages takes longer than installing it. Where
# the environment forbids it, each of a hundred processes would compile torch and sympy anew.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/pip install -q --no-compile
# Three workers on two cores: many tests wait for processes that they start.
PYTEST = $(BIN)/python -m pytest -n 3 --no-loadscope-reorder
EVERYTHING := -e '.[all,optim,trackers,split,dev]'
OTHERS = --no-deps --upgrade --target $(@D)/others trl verl torchtitan
CPU_TORCH := torch==2.13.0
LIMITS := .venv/constraints.txt
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard memsaver/native/*.[ch])

setup: $(READY)

# What running takes. torch first and by name: the CPU build here; the project's own dependencies then pull no other.
.venv/.run: $(SOURCES)
	@echo "set-up 1 of 2: torch into .venv (200 MB, once)"
	$(PY) -m venv .venv
	sed 's/^torch==.*/$(CPU_TORCH)/' constraints.txt > $(LIMITS)
	$(PIP) $(CPU_TORCH)
	@echo "set-up 2 of 2: memsaver, its C shim, transformers, matplotlib (about 100 MB, once)"
	$(PIP) -c $(LIMITS) -e '.[cuda,models,plots]'
	touch $@

# And what tests take.
$(READY): .venv/.run
	@echo "set-up: ray, bitsandbytes, pytest, hypothesis, ruff, mypy (about 150 MB, once)"
	$(PIP) -c $(LIMITS) $(EVERYTHING)
	@echo "set-up: sources of other trainers, whose contracts are checked (4 MB)"
	$(PIP) -c $(LIMITS) $(OTHERS)
	touch $@

# .venv-newest: the newest of everything, whatever pip's configuration caps. .venv-oldest: the oldest that pyproject.toml
# allows. 6 GB each: torch for CUDA. To look for newer ones: rm -r .venv-newest
.venv-%/.ready: BIN = $(@D)/bin
.venv-%/.ready: export PIP_CONSTRAINT = $(CURDIR)/$(@D)/limits.txt
.venv-%/.ready: $(SOURCES)
	$(PY) -m venv $(@D)
	test $* = newest || grep -oE '[a-z0-9_-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | sed 's/\[.*\]//; s/>=/==/' > $(PIP_CONSTRAINT)
	touch $(PIP_CONSTRAINT)
	$(PIP) $(EVERYTHING)
	$(PIP) $(OTHERS)
	touch $@

demo: .venv/.run
	@echo "demo: $(RECIPE), which takes about a minute"
	$(BIN)/memsaver run $(RECIPE)

# What guards a change, in random order: `-p randomly --randomly-seed=N` of a run's head repeats it. CONTRIBUTING.md
test: setup
test-newest: .venv-newest/.ready
test-oldest: .venv-oldest/.ready
test-newest test-oldest: BIN = $(@:test-%=.venv-%)/bin
test test-newest test-oldest:
	$(PYTEST) --ignore tests/packaging --ignore tests/plans

# `make test` and `make plans` by one pytest: no core waits for the other between them.
test-ci: setup
	$(PYTEST) --ignore tests/packaging

# And the rest of what is worth keeping: whole matrices of cases, tests marked `extended`.
test-all: setup
	$(PYTEST) --all

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/index.html; a warning is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q
	git ls-files -z examples | xargs -0 cp --parents -t site  # the pages link them
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

.venv/.docs: $(READY)
	$(PIP) -c $(LIMITS) -e '.[docs]'
	touch $@

# dist/: the sdist, the wheel built from it; both tried out in an environment of their own.
dist: setup
	$(BIN)/python -m pytest tests/packaging

# README's install line by the Dockerfile's instructions in an empty folder: 1 GB of downloads. `make test-all` also types
# the commands of docs/how-to/train.md there, which takes longer still.
environment: setup
	$(BIN)/python -m pytest --all tests/packaging/test_environment.py -k dockerfile

# Every packaged recipe on the GPUs that it is for: some minutes.
plans: setup
	$(BIN)/python -m pytest -n 2 tests/plans

# On a machine with a GPU, with the Python that has torch for it (no .venv): make test-gpu PY=python3, and so on.
# OUT=DIR: full results as JSON.
GPU := PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PY)
OUT ?= runs/benchmarks

# What counts a device's bytes runs by itself, the rest beside each other. Two cards need half of the time, with
# CUDA_VISIBLE_DEVICES=0 make test-gpu PART=1/2 on one and PART=2/2 on the other; then test-gpus, for tests that need both.
PART ?= 1/1
test-gpu:
	$(GPU) -m pytest -m "gpu and alone" --part $(PART)
	$(GPU) -m pytest -m "gpu and not alone" --part $(PART) -n 14 --no-loadscope-reorder

test-gpus:
	$(GPU) -m pytest -m gpus

# Full counts of every soak test, on the CPU and, where there is one, on the GPU.
soak:
	$(GPU) -m pytest -m soak --soak -p no:timeout --durations=0

bench-memory: bench-backup
	$(GPU) -m benchmarks.bench_memory --out $(OUT)

bench-backup:
	$(GPU) -m benchmarks.bench_backup --out $(OUT)

bench-sync:
	$(GPU) -m benchmarks.bench_sync --out $(OUT)

bench-rollout:
	$(GPU) -m benchmarks.bench_generate --out $(OUT)
	$(GPU) -m benchmarks.bench_steps --out $(OUT)
	$(GPU) -m benchmarks.bench_async --out $(OUT)
	$(GPU) -m benchmarks.bench_serve --out $(OUT)

bench-update:
	$(GPU) -m benchmarks.bench_update --out $(OUT)

bench-switch:
	$(GPU) -m benchmarks.bench_switch --out $(OUT)

# With vllm installed, or on PYTHONPATH: vLLM on our tags beside vLLM as it comes.
bench-vllm:
	$(GPU) -m benchmarks.bench_vllm --out $(OUT)

# Learning curves of all losses on a CPU, about ten minutes: the picture of docs/losses.md. A second call skips finished runs.
bench-losses: .venv/.run
	$(BIN)/python -m benchmarks.bench_losses --out $(OUT)/losses --picture docs/images/losses.png

# Red if a ratio to a rival or floor of the same run is worse than benchmarks/gate.json accepts.
bench-gate:
	$(GPU) -m benchmarks.gate --out $(OUT)

clean:
	rm -rf .venv .venv-* build dist site *.egg-info memsaver/native/shim-*.so
