# make demo    trains the small model in MXFP4 on Shakespeare, from nothing, on a GPU if there is one
# make test    runs the tests on the CPU
# make check   format, lint, types
# make format  puts format and order of imports right
# Each sets up .venv as far as it needs; a stamp in it, written last, tells that nothing is to be done.

SHELL := /bin/bash
VENV := .venv
RUN := $(VENV)/bin/python
DEVICE := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
# Asked, not only looked for: pyenv has a python3.12 on the path that may not run here.
PYTHON = $(shell for p in python3.12 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
NO_PYTHON = found no Python 3.12 as python3.12 or python3; install it (say, `pyenv install 3.12`)
# XLA compiles what tests run once: it need not be fast.
QUICK := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
SOURCES := adahop_jax triton_kernels pallas_kernels train benchmarks tests .ci

.PHONY: demo test check format
demo: $(VENV)/demo-$(DEVICE)
	$(RUN) -m train.lm --quant adahop

test: $(VENV)/dev-$(DEVICE)
	JAX_PLATFORMS=cpu XLA_FLAGS="$(QUICK)" $(RUN) -m pytest -n 2 $(ARGS)

check: $(VENV)/dev-$(DEVICE)
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m mypy

format: $(VENV)/dev-$(DEVICE)
	$(RUN) -m ruff check --fix-only $(SOURCES)
	$(RUN) -m ruff format $(SOURCES)

$(VENV)/demo-% $(VENV)/dev-%: pyproject.toml constraints.txt .ci/environment.py
	@$(or $(PYTHON),$(error $(NO_PYTHON))) .ci/environment.py $(subst -, ,$(@F))
