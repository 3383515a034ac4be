# Every target first installs what it needs into .venv. Only Python 3.11 or newer and make are required.
PYTHON ?= python3
VENV := .venv
JUDGE := .judge
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
DATA ?=
ARGS ?=

# make ignores a misspelt variable: `make train data=DIR` would train the demonstration.
KNOWN := DATA ARGS PYTHON
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
ifneq ($(filter-out $(KNOWN) MAKEFLAGS -%,$(GIVEN)),)
  WRONG := $(firstword $(filter-out $(KNOWN) MAKEFLAGS -%,$(GIVEN)))
  RIGHT := $(filter $(shell echo '$(WRONG)' | tr '[:lower:]' '[:upper:]'),$(KNOWN))
  $(error unknown variable $(WRONG)$(if $(RIGHT),; write $(RIGHT)=$($(WRONG))); known are: $(KNOWN))
endif
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: train test lint bench gpu-test soak docs judge clean

train: $(VENV)/installed
	$(BIN)/python train_main.py $(if $(DATA),--train-data "$(DATA)") $(ARGS)

test: $(VENV)/installed-dev
	$(PYTEST) -m "not gpu and not two_gpus and not soak and not parity"

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/data.py

gpu-test: $(VENV)/installed-dev
	$(PYTEST) -m "gpu or two_gpus"

soak: $(VENV)/installed-dev
	$(PYTEST) -m soak --timeout=3600

docs: $(VENV)/installed
	$(BIN)/python -m myxtts.settings

# Installs the judges of `myxtts evaluate` and their weights into a separate venv (about 2 GB); ends with a self-test.
judge: $(JUDGE)/installed

clean:
	rm -rf $(VENV) $(JUDGE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch is named with its version so that pip installs exactly the pinned build for this machine.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required, found " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): about 5 GB on disk with the CUDA build of PyTorch, which PyPI gives, 1.5 GB with the CPU"
	@echo "build (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make …). pip says the size of each download."
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable '.[serve]'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev,ja,phonemes,serve]'
	touch $@

$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) --editable '.[bench]'
	touch $@

$(JUDGE)/installed: myxtts/tools/judge.py
	$(PYTHON) -I myxtts/tools/judge.py --install $(JUDGE)
	touch $@
