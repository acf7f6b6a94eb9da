# make quickstart | test | test-all | check | format | gpu-smoke
SEED ?= 0
VENV := .venv
# the first Python of a version that verl and torch are built for
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
# without a GPU: the versions that were tested together; which build of torch that is, the package index decides
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 || echo -c constraints-cpu.txt)
RUN := OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 $(VENV)/bin/python

# all that needs Ray in one process and one session, the rest beside it: see tests/conftest.py
TWO := -n 2 --dist loadgroup

.PHONY: quickstart test test-all check format gpu-smoke clean

quickstart: $(VENV)/installed
	$(RUN) -m marl.quickstart seed=$(SEED) $(ARGS)

test: $(VENV)/installed
	$(RUN) -m pytest $(TWO) -m "not slow and not gpu" $(ARGS)

test-all: $(VENV)/installed
	$(RUN) -m pytest $(TWO) -m "not gpu" $(ARGS)

gpu-smoke: $(VENV)/installed
	$(RUN) -m pytest -m gpu $(ARGS)

check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; install one, or say PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: whatever another package asks for, this build satisfies it
	$(VENV)/bin/pip install -q $(CONSTRAINTS) torch
	$(VENV)/bin/pip install -q $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) outputs .pytest_cache .ruff_cache .mypy_cache
