# `make` lists the targets. Each builds .venv as needed.

PYTHON ?= python3
PIP_ARGS ?=
LAB_ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Jupyter Lab asks the network for news and updates unless told not to.
OFFLINE := --LabApp.news_url=None \
	--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	--LabApp.extension_manager=readonly

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test lab lint matrix gpu clean

help:
	@echo 'make run     run every notebook, then show what passed and was measured'
	@echo 'make test    run the tests, and every notebook cell by cell'
	@echo 'make lab     open the notebooks in Jupyter Lab'
	@echo 'make lint    check style, notebooks, copied source and badges'
	@echo 'make matrix  test the Triton kernels with each Triton of $(TRITONS)'
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

# Notebooks come first: they are the longest, and worksteal shares the rest.
# Their results go to build/, so a test run never replaces your figures. Each
# worker has one thread, and threads that wait sleep: on two cores that several
# processes share, spinning ones would keep the others from their work.
test: $(STAMP)
	COOKBOOK_RESULTS="$(CURDIR)/build/test-results" OMP_NUM_THREADS=1 \
	OMP_WAIT_POLICY=PASSIVE \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		--nbmake --nbmake-timeout=120 notebooks tests

# In copies that git ignores: your answers stay, and the tests stay green.
lab: $(STAMP)
	mkdir -p lab
	for f in notebooks/*.ipynb; do \
	  test -e "lab/$${f##*/}" || cp "$$f" lab/; \
	done
	cd lab && ../$(BIN)/python -m jupyter lab $(OFFLINE) $(LAB_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/cookbook lint
	$(BIN)/cookbook sync --check
	$(BIN)/cookbook badges --check

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
