# Each target does all its own set-up in .venv; nothing but Python 3.11, 3.12, 3.13 or 3.14 is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --constraint constraints.txt
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
# cpu: torch without CUDA, from PyTorch's own index. cuda: torch as the public index serves it, on Linux with CUDA.
# auto: cpu on Linux without an NVIDIA GPU.
TORCH ?= auto
# The Triton that today's GPU machines have, beside the newest one of .venv: kernels must compile with both.
OTHER_TRITON := 3.6.0
OTHER := build/triton-$(OTHER_TRITON)
# Modules are compiled once, whatever the surroundings ask for: without, every start of a process compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE
# The packages that write quantised checkpoints; theirs and ours are compared.
QUANTISERS := build/quantisers
# A real vLLM: the build for CPUs, and the newest release for its parser.
VLLM := build/vllm
VLLM_NEWEST := build/vllm-newest
VLLM_TORCH := 2.13.0
VLLM_TORCHVISION := 0.28.0

ifeq ($(filter auto cpu cuda,$(TORCH)),)
$(error TORCH=$(TORCH) is unknown; use TORCH=cpu, TORCH=cuda or TORCH=auto)
endif
ifeq ($(TORCH),auto)
TORCH_BUILD := $(shell if [ "$$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi >/dev/null; \
  then echo cuda; else echo cpu; fi)
else
TORCH_BUILD := $(TORCH)
endif

# Processes that run tests; auto: as many as there are cores.
WORKERS ?= auto

.PHONY: demo test test-all test-vllm kernels box-report lossless server seeds lint style format clean

demo: $(INSTALLED)  ## run and measure the embedded model on this machine
	$(BIN)/python -m stoker.demo

# mypy takes a core for a minute or two: it runs beside the tests, and what it finds comes last.
test: $(READY) style  ## what CI runs; a quarter of an hour or so on two cores
	@mkdir -p build; $(BIN)/mypy > build/mypy.txt 2>&1 & types=$$!; \
	  $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal; tests=$$?; \
	  wait $$types; typed=$$?; cat build/mypy.txt; exit $$((tests | typed))

# Tests of the server run one at a time: what they allow it to keep others waiting is short.
test-all: $(READY) $(OTHER)/.ready $(QUANTISERS)/.ready lint  ## every test, all architectures, both Tritons; before a release
	STOKER_TESTS=all $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --ignore tests/server --ignore tests/agents \
		--ignore tests/weights/formats/test_against_quantisers.py
	STOKER_TESTS=all PYTHONPATH=$(QUANTISERS) $(BIN)/python -m pytest tests/weights/formats/test_against_quantisers.py
	$(MAKE) server

kernels: $(READY) $(OTHER)/.ready  ## kernel x architecture: registers, shared memory, spills, parity; a quarter of an hour
	$(BIN)/python -m benchmarks.gpu.kernel_table --json build/kernels.json
	PYTHONPATH=$(OTHER) $(BIN)/python -m benchmarks.gpu.kernel_table --no-parity --json build/kernels-$(OTHER_TRITON).json

$(OTHER)/.ready: | $(READY)
	$(BIN)/python -m pip install --no-compile --no-deps --target $(OTHER) triton==$(OTHER_TRITON)
	@touch $@

# In a folder of their own and without what they depend on: they ask for another torch than .venv has.
$(QUANTISERS)/.ready: tests/weights/formats/quantisers.txt | $(READY)
	rm -rf $(QUANTISERS)
	$(BIN)/python -m pip install --no-compile --no-deps --target $(QUANTISERS) --requirement $<
	@touch $@

test-vllm: $(READY) $(VLLM)/.ready $(VLLM_NEWEST)/.ready  ## with a real vLLM, one box and two; downloads 1 to 4 GB once
	STOKER_TESTS=vllm STOKER_VLLM=$(CURDIR)/$(VLLM)/bin/vllm $(BIN)/python -m pytest tests/real_vllm

# torch and torchvision of one origin: PyTorch's own index of CPU builds, or if that cannot be reached the public index,
# whose builds for CUDA run without a card too. With three equals signs no other build of the version counts as it.
$(VLLM)/.ready: tests/real_vllm/requirements.txt | $(READY)
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(UV_VLLM) --dry-run && $(UV_VLLM) || $(VLLM)/bin/python -m pip install --no-compile \
		torch===$(VLLM_TORCH) torchvision===$(VLLM_TORCHVISION)
	$(VLLM)/bin/python -m pip install --no-compile --no-deps --requirement $<
	@touch $@

UV_VLLM = UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 $(BIN)/python -m uv pip install --python $(VLLM)/bin/python \
	--torch-backend cpu torch==$(VLLM_TORCH) torchvision==$(VLLM_TORCHVISION)

$(VLLM_NEWEST)/.ready: tests/real_vllm/newest.txt | $(READY)
	rm -rf $(VLLM_NEWEST)
	$(BIN)/python -m pip install --no-compile --no-deps --target $(VLLM_NEWEST) --requirement $<
	@touch $@

box-report:  ## this GPU box at 122B shapes, without a download; ten minutes or so. PYTHON must have torch for the GPU
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	  f"The box report needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}; run: make box-report PYTHON=python3.12")'
	@PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu.box_report $(ARGS)

# 40 prompts: 348,160 tokens. All 200 take some three hours on two cores: ARGS="--prompts 200", and --jobs on more.
lossless: $(READY)  ## every token the same in twelve configurations; an hour at most on two cores, goes on where it stopped
	$(BIN)/python -m benchmarks.lossless --prompts 40 $(ARGS)

server: $(READY)  ## all tests of the server: 22,000 made-up requests, schemas, agents, hostile clients; most of an hour
	STOKER_TESTS=all $(BIN)/python -m pytest tests/server tests/agents

seeds: $(READY)  ## docs/seeds.md: every figure of the documents this project started from, beside what is predicted
	$(BIN)/python -m tools.seeds docs/seeds.md

lint: $(READY) style
	$(BIN)/mypy

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

# What runs Stoker, without the tools that test it. A newer pip than the one Python brings shows progress while it
# installs, not only while it downloads. Modules are compiled when they are first imported: compiling all of them takes
# longer than the installation.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 14) else \
	  f"Stoker needs Python 3.11 to 3.14 and $(PYTHON) is {v[0]}.{v[1]}; run: make $(MAKECMDGOALS) PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
ifeq ($(TORCH_BUILD),cpu)
	@echo "Downloading 0.4 GB into $(VENV), torch without CUDA. With CUDA: make $(MAKECMDGOALS) TORCH=cuda"
	@$(TORCH_FOR_CPU)
else
	@echo "Downloading into $(VENV): 3 GB on Linux, where torch brings CUDA. Without: make $(MAKECMDGOALS) TORCH=cpu (0.4 GB)"
endif
	$(PIP_INSTALL) --editable '.[server]'
	@touch $@

# uv knows where PyTorch keeps its CPU builds. Whether that can be reached is asked once, without retries, so that a
# machine that cannot is told within seconds; pip then installs the torch that it finds.
UV_TORCH = $(BIN)/python -m uv pip install --python $(BIN)/python --constraint constraints.txt --torch-backend cpu torch
TORCH_FOR_CPU = $(PIP_INSTALL) uv && UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=10 $(UV_TORCH) --dry-run && $(UV_TORCH) || \
  echo "PyTorch's own index did not serve torch for the CPU. pip takes torch from its index instead; on Linux the public one has it with CUDA, 3 GB."

$(READY): $(INSTALLED)
	$(PIP_INSTALL) --editable '.[server,dev]'
	@touch $@
