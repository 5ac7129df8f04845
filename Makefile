# `make demo` and `make test` do all set-up on a fresh machine; everything runs from .venv.
PY ?= python3
BIN := .venv/bin
READY := .venv/.ready
RECIPE ?= recipes/tiny.yaml

.PHONY: setup demo test lint test-gpu clean

setup: $(READY)

# torch first and by name: the CPU build here; the project's own dependencies then pull no other torch.
$(READY): pyproject.toml constraints.txt setup.py memsaver/allocator/shim.c memsaver/allocator/shim.h
	$(PY) -m venv .venv
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[cuda,ray,models,plots,dev]'
	touch $@

demo: setup
	$(BIN)/memsaver run $(RECIPE)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# On a machine with a GPU, with the Python that has torch for it (no .venv): make test-gpu PY=python3
test-gpu:
	PYTHONPATH=$(CURDIR):$(PYTHONPATH) $(PY) -m pytest -m gpu

clean:
	rm -rf .venv build dist *.egg-info memsaver/allocator/_shim*.so
