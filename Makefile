# The three commands a newcomer needs: make setup, make serve, make test.
PORT ?= 8000
MODEL ?=
ARGS ?=
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# With an NVIDIA driver the machine's own torch (2.11 or newer) is kept; without one a CPU build serves.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH := $(if $(GPU),torch>=2.11,torch==2.13.0)
VENV_FLAGS := $(if $(GPU),--system-site-packages,)

.PHONY: setup serve test clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11, 3.12 or 3.13 on the PATH"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

serve: setup
	$(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build *.egg-info
