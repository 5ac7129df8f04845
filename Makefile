# `make demo` and `make test` do all set-up on a fresh machine; everything runs from .venv.
PY ?= python3
BIN := .venv/bin
READY := .venv/.ready
RECIPE ?= recipes/tiny.yaml

BENCHES := bench-memory bench-backup bench-memory-host bench-kvcache bench-sync bench-rollout bench-switch bench-gap

.PHONY: setup demo test lint docs dist plans soak test-gpu $(BENCHES) clean

setup: $(READY)

# torch first and by name: the CPU build here; the project's own dependencies then pull no other torch.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard memsaver/allocator/*.[ch])
	$(PY) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[cuda,ray,models,plots,dev]'
	touch $@

demo: setup
	$(BIN)/memsaver run $(RECIPE)

# A second try for what fails: some tests kill processes or count descriptors while others run beside them. -ra tells.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --ignore tests/packaging --ignore tests/plans

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/index.html; a warning is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

.venv/.docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@

# dist/: the sdist, the wheel built from it; both tried out in an environment of their own.
dist: setup
	$(BIN)/python -m pytest tests/packaging

# Every packaged recipe on the GPUs that it is for: some minutes.
plans: setup
	$(BIN)/python -m pytest -n 2 tests/plans

# On a machine with a GPU, with the Python that has torch for it (no .venv): make test-gpu PY=python3, and so on.
# OUT=DIR: full results as JSON. MODEL=DIR, TEMPERATURE=0.7: a trained model and a temperature for bench-gap.
GPU := PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PY)
OUT ?= runs/benchmarks

test-gpu:
	$(GPU) -m pytest -m gpu

# Full counts of every soak test, on the CPU and, where there is one, on the GPU.
soak:
	$(GPU) -m pytest -m soak --soak -p no:timeout --durations=0

bench-memory: bench-backup
	$(GPU) -m tests.benchmarks.bench_memory --out $(OUT)

bench-backup:
	$(GPU) -m tests.benchmarks.bench_backup --out $(OUT)

bench-memory-host:
	$(GPU) -m tests.benchmarks.bench_memory_host --out $(OUT)

# SGLang's prefix cache is measured beside ours where sglang is installed, or its wheel is on PYTHONPATH:
# pip download sglang==0.5.23 --no-deps
bench-kvcache:
	$(GPU) -m tests.benchmarks.bench_kvcache --out $(OUT)

bench-sync:
	$(GPU) -m tests.benchmarks.bench_sync --out $(OUT)

bench-rollout:
	$(GPU) -m tests.benchmarks.bench_generate --out $(OUT)

bench-switch:
	$(GPU) -m tests.benchmarks.bench_switch --out $(OUT)

bench-gap:
	$(GPU) -m tests.benchmarks.bench_gap --out $(OUT) $(if $(MODEL),--model $(MODEL)) $(if $(TEMPERATURE),--temperature $(TEMPERATURE))

clean:
	rm -rf .venv build dist site *.egg-info memsaver/allocator/_shim*.so
