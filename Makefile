# The interface of this repository. `make serve` and `make test` set up all they need in .venv;
# with TREADLE_PYTHON set, that interpreter is used as it is and nothing is installed.
PYTHON ?= python3
ARGS ?=

ifdef TREADLE_PYTHON
PY := $(TREADLE_PYTHON)
export PYTHONPATH := $(CURDIR)/.typecheck$(if $(PYTHONPATH),:$(PYTHONPATH))
RUNTIME := .typecheck/treadle/.made
TESTING := $(RUNTIME)
CHECK :=
else
PY := .venv/bin/python
RUNTIME := .venv/.runtime
TESTING := .venv/.testing
CHECK := check
endif

.PHONY: serve test test-all check bench kernels gpu-check clean help

help:
	@echo "make serve [ARGS=...]  set up and serve the embedded model"
	@echo "make test              set up and run checks and tests (under 10 minutes on 2 cores)"
	@echo "make test-all          the slow tests too"
	@echo "make check             ruff, mypy, import-linter"
	@echo "make bench             speed beside transformers, in one run"
	@echo "make gpu-check         correctness and speed on a GPU, in eight minutes; docs/gpu.md"
	@echo "make kernels           what Triton's kernels take of a GPU, into docs/kernels.md"

serve: $(RUNTIME)
	@$(PY) -m treadle.tools.cli serve $(ARGS)

test: $(CHECK) $(TESTING)
	$(PY) -m pytest -m "not slow" $(ARGS)

test-all: $(CHECK) $(TESTING)
	$(PY) -m pytest $(ARGS)

check: $(TESTING) .typecheck/treadle/.made
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	PYTHONPATH=.typecheck .venv/bin/lint-imports --no-logo

bench: $(TESTING)
	$(PY) -m treadle.perf.bench $(ARGS)

kernels: $(TESTING)
	TRITON_INTERPRET=0 $(PY) -m treadle.tools.kernel_report $(ARGS)

gpu-check: $(TESTING)
	@$(PY) -m treadle.perf.gpu_check $(ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Treadle needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

.venv/.runtime: .venv/bin/python pyproject.toml constraints.txt $(wildcard kernels/csrc/host/*)
	$(PY) -m pip install -q -c constraints.txt -e .
	@touch $@

.venv/.testing: .venv/.runtime
	$(PY) -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

# A view of the packages under their import names, for mypy and for interpreters that install nothing.
.typecheck/treadle/.made: Makefile
	@mkdir -p .typecheck/treadle
	@for p in engine graphs kernels http tools perf; do ln -sfn ../../$$p .typecheck/treadle/$$p; done
	@touch $@

clean:
	rm -rf .venv .typecheck build *.egg-info
