# `make` lists the targets. Each builds .venv as needed.

PYTHON ?= python3
PIP_ARGS ?=
LAB_ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test quick lab lint matrix floor gpu clean

help:
	@echo 'make run     run every notebook, then show what passed and was measured'
	@echo 'make test    run the tests, and every notebook cell by cell'
	@echo 'make quick   run the tests that are fast, for daily work'
	@echo 'make lab     open the notebooks in Jupyter Lab'
	@echo 'make lint    check style, notebooks and copied source'
	@echo 'make matrix  test the Triton kernels with each Triton of $(TRITONS)'
	@echo 'make floor   try the lowest version of every dependency'
	@echo 'make gpu     try and time the kernels on an NVIDIA GPU, 5 minutes at most'
	@echo 'make clean   remove .venv, results, build output and caches'
	@echo ''
	@echo 'PYTHON     builds .venv; Python 3.11, 3.12 or 3.13 (now $(PYTHON))'
	@echo 'PIP_ARGS   more arguments for pip, such as an index of CPU wheels'
	@echo 'LAB_ARGS   more arguments for Jupyter Lab, such as --no-browser'
	@echo 'JOBS       how many tests run at once (now $(JOBS))'
	@echo ''
	@echo 'Another PYTHON or PIP_ARGS needs a fresh .venv: make clean first.'

# One at a time: most notebooks measure times.
run: $(STAMP)
	$(BIN)/cookbook run

# Each worker has one thread, and threads that wait sleep: on two cores that
# several processes share, spinning ones would keep the others from their work.
test quick: export OMP_NUM_THREADS := 1
test quick: export OMP_WAIT_POLICY := PASSIVE

# The kernels are compiled first, or each worker would compile them anew.
# Notebooks come first among the tests: they are the longest, and worksteal
# shares the rest. Their results go to build/, so a test run never replaces
# your figures.
test: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m cases.compile_kernels $(JOBS)
	COOKBOOK_RESULTS="$(CURDIR)/build/test-results" \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		--nbmake --nbmake-timeout=120 notebooks tests

# Without notebooks, faulty copies and grids: tests/conftest.py has the list.
quick: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not slow' tests

# In copies that git ignores: your answers stay, and the tests stay green.
lab: $(STAMP)
	$(BIN)/cookbook lab -- $(LAB_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m nbstripout --verify --keep-id notebooks/*.ipynb
	$(BIN)/cookbook lint
	$(BIN)/cookbook sync --check

gpu: $(STAMP)
	$(BIN)/cookbook gpu

# Each Triton in an environment of its own. torch's CUDA wheel wants its own
# Triton and is refused: on Linux, name the index of CPU wheels in PIP_ARGS.
# Triton 3.6 needs a numpy before 2.4.
TRITONS := 3.6.0 3.7.1 3.9.0
TRITON_TESTS := tests/attention/triton tests/attention/test_backends.py \
	tests/attention/test_write_kv.py \
	tests/attention/test_attention_backends.py \
	tests/attention/test_edge_of_memory.py

matrix: $(TRITONS:%=matrix-%)

matrix-%:
	test -x build/triton-$*/bin/python || \
		$(PYTHON) -m venv build/triton-$*
	grep -v -e '^triton==' -e '^numpy==' constraints.txt \
		> build/triton-$*/constraints.txt
	echo 'triton==$*' >> build/triton-$*/constraints.txt
	case $* in 3.6.*) echo 'numpy<2.4';; *) grep '^numpy==' constraints.txt; \
		esac >> build/triton-$*/constraints.txt
	build/triton-$*/bin/python -m pip install --quiet \
		--disable-pip-version-check -c build/triton-$*/constraints.txt \
		-e '.[notebooks,test]' $(PIP_ARGS)
	build/triton-$*/bin/python -m pytest -n $(JOBS) --dist worksteal \
		--nbmake --nbmake-timeout=120 -k 'not gather and not cpu' \
		$(TRITON_TESTS) notebooks/07_triton_paged_attention.ipynb

# The lowest version of each range, without Triton, in an environment of its
# own; what these need in turn is today's. torch is the lowest that has a CPU
# wheel at hand: a lower one, from 2.6, is untested unless FLOOR_TORCH names
# it and PIP_ARGS the index of CPU wheels. numpy 2.0 needs Python 3.11 or 3.12.
FLOOR := build/floor
FLOOR_TORCH ?= 2.13.0

floor:
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python scripts/floors.py torch==$(FLOOR_TORCH) \
		> $(FLOOR)/requirements.txt
	$(FLOOR)/bin/python -m pip install --quiet \
		--disable-pip-version-check -r $(FLOOR)/requirements.txt \
		$(PIP_ARGS)
	$(FLOOR)/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-deps -e . $(PIP_ARGS)
	COOKBOOK_RESULTS="$(CURDIR)/$(FLOOR)/results" OMP_NUM_THREADS=1 \
	OMP_WAIT_POLICY=PASSIVE \
	$(FLOOR)/bin/python -m pytest -n $(JOBS) --dist worksteal \
		--nbmake --nbmake-timeout=120 notebooks/02_*.ipynb \
		notebooks/06_*.ipynb tests/tools

clean:
	rm -rf $(VENV) build dist results llm_systems_cookbook.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o \
		\( -name __pycache__ -o -name .ipynb_checkpoints \) \
		-prune -exec rm -rf {} +

# The stamp goes first and comes back last: an install that fails or is
# interrupted leaves none, and the next make tries again. A .venv whose pip
# does not run is a half-built one, or its Python is gone: build it afresh.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c '$(SUPPORTED)' || { \
			echo 'This needs Python 3.11, 3.12 or 3.13, and' \
				'"$(PYTHON)" is none of them.' \
				'Name one: make PYTHON=python3.12 ...' >&2; \
			exit 1; \
		}; \
		$(PYTHON) -m venv --clear $(VENV); \
	}
	@echo 'Installing into $(VENV): minutes the first time, PyTorch is large.'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[notebooks,test]' $(PIP_ARGS)
	@touch $@

SUPPORTED := import sys; \
	sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
