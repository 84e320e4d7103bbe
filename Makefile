# The three commands a newcomer needs: make setup, make serve, make test.
PORT ?= 8000
MODEL ?=
ARGS ?=
JOBS ?= $(shell n=$$(nproc); echo $$((n > 7 ? 8 : n + 1)))
VENV := .venv
BIN := $(VENV)/bin
# With an NVIDIA driver the machine's own torch (2.11 or newer) is kept; without one a CPU build serves.
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH := $(if $(GPU),torch>=2.11,torch==2.13.0)
# The first interpreter of a fitting version, one that has torch before others if there is a driver. A version
# switcher's shim may stand on the PATH and fail, so each is tried.
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
HAS_TORCH := import sys, importlib.util as u; sys.exit(not ((3, 11) <= sys.version_info[:2] < (3, 14) and u.find_spec("torch")))
ifndef PYTHON
PYTHON := $(shell for probe in $(if $(GPU),'$(HAS_TORCH)') '$(FITS)'; do for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c "$$probe" >/dev/null 2>&1 && echo $$p && exit; done; done)
endif
# Where that interpreter has its packages, also when it is one of a virtual environment.
PACKAGES = $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup serve test check docs clean browser

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Penstock needs Python 3.11, 3.12 or 3.13 on the PATH"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(if $(GPU),--system-site-packages) $(VENV)
	$(if $(GPU),$(PACKAGES) > "$$(echo $(VENV)/lib/python*/site-packages)/machine.pth")
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed tests/constraints.txt
	$(INSTALL) -e '.[test,docs]' -c tests/constraints.txt
	@touch $@

serve: setup
	$(BIN)/penstock serve $(MODEL) --port $(PORT) $(ARGS)

# Tests start many processes, which all import the same: it is compiled once, whatever the environment says. They run on
# the CPU, also where there is a GPU, of which each of their servers would take most: `pytest -m gpu` and the kernels'
# tests run there.
test: export PYTHONDONTWRITEBYTECODE =
test: export CUDA_VISIBLE_DEVICES =
test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	@# mypy takes one core for half a minute where it has no cache: the tests begin beside it, and what it finds comes last.
	$(BIN)/mypy >$(VENV)/mypy.log 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder; \
	tests=$$?; wait $$types; found=$$?; cat $(VENV)/mypy.log; exit $$(($$tests || $$found))

# While you work, in a minute or two: ruff, mypy, and the tests beside what differs from BASE (the upstream branch).
BASE ?=
check: export CUDA_VISIBLE_DEVICES =
check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $$($(BIN)/python -m tests.changed $(BASE))

# Chromium for the tests of the page, which are skipped without a browser. Debian's and Ubuntu's packages are tried.
APT := $(if $(filter 0,$(shell id -u)),,sudo )apt-get
browser:
	@$(foreach name,chromium chromium-browser google-chrome chrome,command -v $(name) ||) { \
	$(APT) install -qq -y --no-install-recommends chromium || { $(APT) update -qq && \
	$(APT) install -qq -y --no-install-recommends chromium; }; }

# The documentation as a site, in site/: a broken link or anchor fails. `make docs ARGS=serve` shows it while you write.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) build site *.egg-info
