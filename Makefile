# Each target does all its own set-up in .venv; nothing but Python 3.11 or 3.12 is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The Triton that today's GPU machines have, beside the newest one of .venv: kernels must compile with both.
OTHER_TRITON := 3.6.0
OTHER := build/triton-$(OTHER_TRITON)

.PHONY: demo test kernels box-report lossless server seeds lint format clean

demo: $(READY)  ## run and measure the embedded model on this machine
	$(BIN)/python -m stoker.demo

test: $(READY) $(OTHER)/.ready lint  ## what CI runs
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

kernels: $(READY) $(OTHER)/.ready  ## kernel x architecture: registers, shared memory, spills, parity; a quarter of an hour
	$(BIN)/python -m benchmarks.kernel_table --json build/kernels.json
	PYTHONPATH=$(OTHER) $(BIN)/python -m benchmarks.kernel_table --no-parity --json build/kernels-$(OTHER_TRITON).json

$(OTHER)/.ready: | $(READY)
	$(BIN)/python -m pip install --no-compile --no-deps --target $(OTHER) triton==$(OTHER_TRITON)
	@touch $@

box-report:  ## this GPU box at 122B shapes, without a download; ten minutes or so. PYTHON must have torch for the GPU
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"The box report needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}; run: make box-report PYTHON=python3.12")'
	@PYTHONPATH=src:. $(PYTHON) -m benchmarks.box_report $(ARGS)

lossless: $(READY)  ## every token the same in twelve configurations; an hour or so, goes on where it stopped
	$(BIN)/python -m benchmarks.lossless

server: $(READY)  ## the server's long tests: 2,000 made-up requests and 200 answers to schemas; ten minutes or so
	STOKER_FULL=1 $(BIN)/python -m pytest tests/server/test_bad_requests.py tests/server/test_structured.py

seeds: $(READY)  ## docs/seeds.md: every figure of the documents this project started from, beside what is predicted
	$(BIN)/python -m stoker.plan.seeds docs/seeds.md

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# A newer pip than the one Python brings shows progress while it installs, not only while it downloads. Modules are
# compiled when they are first imported: compiling all of them takes longer than the installation.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 12) else \
	  f"Stoker needs Python 3.11 or 3.12 and $(PYTHON) is {v[0]}.{v[1]}; run: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --no-compile --constraint constraints.txt --editable '.[server,cpu,dev]'
	@touch $@
