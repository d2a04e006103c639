# make demo: all set-up, then the main job on a real model.   make test: all set-up, then every test.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# No multimodal part; the RPC backend is the peer that the benchmarks measure against.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DGGML_RPC=ON

# Stages are processes, and tests start dozens: without bytecode each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test fast lint types bench setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing; llama.cpp is compiled once, which takes some minutes."
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev,demo,bench]'
	# A wheel in pip's cache may come from a build with other flags: then it makes room for one with ours.
	ls $(VENV)/lib/python*/site-packages/llama_cpp/lib/libggml-rpc.* >/dev/null 2>&1 || { \
	  $(BIN)/pip cache remove -q llama_cpp_python; \
	  $(BIN)/pip install -q --disable-pip-version-check --force-reinstall --no-deps 'llama-cpp-python>=0.3.36,<0.4'; }
	touch $@

demo: setup
	@$(BIN)/python -m meshpipe demo

# A worker for each core; `pytest FILE` alone runs in one process.
test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

fast: setup
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench all

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
