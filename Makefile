# Two commands do everything, set-up included:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REFERENCE := $(VENV)/.reference

.PHONY: setup reference demo test test-slow test-avx2 check format clean

setup: $(READY)
reference: $(REFERENCE)

# torch goes first and pinned: whatever asks for a range of torch later finds it there and brings no other build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Vitrail needs Python 3.11 or newer; try make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt) -c constraints.txt
	$(BIN)/python -m pip install --quiet --editable '.[dev]' -c constraints.txt
	touch $(READY)

# The libraries that tests compare results and files with; without them these tests are skipped. natten asks for torch to
# be built, and pip would bring another torch for that, so it is built beside the one that is there. open_clip asks for
# torchvision; only its tokenizer is used.
$(REFERENCE): $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[dev,reference]' -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation $$(grep -E '^(natten|open-clip-torch)==' constraints.txt)
	touch $(REFERENCE)

demo: setup
	$(BIN)/vitrail train

# One thread for each process: the matrices of tests are tiny, and processes that share cores slow each other down.
# Compiled tests are kept, even if the environment says otherwise: each process would compile all of them again.
test: setup check
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu and not network"

# Two at a time, whatever the number of cores: some tests start several processes or need gigabytes.
test-slow: $(REFERENCE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not gpu and not network"

# The tests of arithmetic again, as a processor without AVX-512 and AMX computes: kernels and rounding differ there. Both
# variables are needed: PyTorch and oneDNN choose their kernels separately.
test-avx2: setup
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto \
		--dist worksteal -m "not slow and not gpu and not network" tests/models tests/evaluation tests/training/test_adafactor.py tests/training/test_large_batches.py tests/training/test_layers.py tests/training/test_muon.py tests/training/test_optimizer.py tests/training/test_reference_steps.py tests/training/test_schedule.py tests/training/test_tables.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
