# Every target sets up what it needs: a virtual environment in $(VENV) with the package installed in
# place, its C++ extensions compiled, and the extras that the target uses. Nothing but Python 3.11, a C++
# compiler and make is expected.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
PYTEST_ARGS ?=
SITE_ARGS ?=
WORKERS ?= -n 3 --dist loadfile
PYTHONS ?= 3.11 3.12 3.13
TORCHES ?= 2.11 2.13 2.15
ENVIRONMENTS ?= $(CURDIR)/build/environments
GPU_RESULTS ?= bench/results
GPU_ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH := $(INSTALLED).# and extras: .venv/.installed.cli,test
CXX_SOURCES := $(shell find csrc commhooks tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh')
CUDA_SOURCES := $(shell find csrc commhooks tests -name '*.cu')

COMMA := ,

.DEFAULT_GOAL := help
export PYTHONS TORCHES
unexport PYTHONDONTWRITEBYTECODE # each process would compile the tests and the package again
.PHONY: help demo test test-all test-newest test-pure torch-suite mutate sanitize soak build lint types format bench \
  results wheel wheel-pure sdist packages matrix gpu-check cuda docs check-site clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(WITH)cli ## Train a small GPT on 2 ranks with three hooks, show what each cost and saved
	$(BIN)/python examples/demo.py

test: $(WITH)cli,results,test ## Run the tests (PYTEST_ARGS="-k powersgd" selects some)
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

test-all: $(WITH)cli,docs,integrations,nvrtc,results,test ## Run the exhaustive cases, which `make test` leaves out
	$(BIN)/python -m pytest -m exhaustive $(WORKERS) $(PYTEST_ARGS)

# What works without the extensions, on torch's wrapper: tests/pure, and tests that need no other one.
PURE_TESTS ?= tests/pure tests/adapters/test_torch_ddp.py tests/algorithms/test_selection.py \
  tests/codecs/test_codecs.py tests/codecs/test_index_code.py tests/codecs/test_precision.py

# The newest supported torch is a build for CUDA, so nvcc compiles everything; no GPU is needed.
NEWEST ?= 2.15
NEWEST_TESTS ?= tests/adapters tests/comm tests/pure tests/reducer tests/runtime tests/state

test-newest: override export PYTEST_ARGS := $(WORKERS) $(NEWEST_TESTS) $(PYTEST_ARGS)
test-newest: ## Build HEAD with nvcc for the newest torch (5 GB, kept in ENVIRONMENTS), and test the engine there
	PYTHONS=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') TORCHES=$(NEWEST) \
	  COMMHOOKS_WITH_CUDA=1 ENVIRONMENTS="$(ENVIRONMENTS)" .ci/matrix

test-pure: $(WITH)cli,results,test ## Test what works without the extensions (COMMHOOKS_NO_EXTENSION=1)
	COMMHOOKS_NO_EXTENSION=1 $(BIN)/python -m pytest $(WORKERS) $(PURE_TESTS) $(PYTEST_ARGS)

torch-suite: export TORCH_TESTS ?=
torch-suite: $(WITH)test ## Run torch's own tests on this project's wrapper (TORCH_TESTS=pytorch/test/distributed adds files)
	$(BIN)/python -m pytest -c tests/torch_suite/pytest.ini --rootdir . \
	  tests/torch_suite/suite.py $(PYTEST_ARGS)

MUTATE ?= commhooks/hook --tests tests/hook

mutate: $(WITH)test ## Run tests on mutants of modules (MUTATE="commhooks/runtime --tests tests/runtime")
	$(BIN)/python tests/mutation.py $(MUTATE)

SANITIZERS ?= address thread

sanitize: $(WITH)test ## Run tests of the C++ under sanitizers (SANITIZERS="address thread")
	set -e; for kind in $(SANITIZERS); do PYTHON=$(BIN)/python .ci/sanitize $$kind; done

MINUTES ?= 30
SEED ?= 0

soak: $(WITH)integrations,test ## Train with random hooks and faults, and check all ranks (MINUTES=30 SEED=0)
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED)

build: $(if $(EXTRAS),$(WITH)$(EXTRAS),$(INSTALLED)) ## Set up the environment and compile (EXTRAS=test,dev adds what these need)

lint: $(WITH)cli,dev,results,tensorboard ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES) $(CUDA_SOURCES)
	$(BIN)/mypy

format: $(WITH)dev ## Rewrite Python, C++ and CUDA sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES) $(CUDA_SOURCES)

bench: $(WITH)cli,results,test ## Run the benchmarks side by side with torch's own
	$(BIN)/python -m pytest bench $(PYTEST_ARGS)

results: $(WITH)cli,results ## Write the pages of results, their plots, and what pages of hooks take from the code
	$(BIN)/python -m bench.results_page
	$(BIN)/python docs/generator/hook_pages.py

wheel wheel-pure sdist: $(INSTALLED)
	PYTHON=$(BIN)/python .ci/packages $@ dist

wheel: ## Build a wheel in dist/ for the installed torch, which it requires
wheel-pure: ## Build a wheel in dist/ without extensions, for any torch
sdist: ## Build a source distribution in dist/

packages: $(INSTALLED) ## Build all packages, install each into a fresh environment and use it
	PYTHON=$(BIN)/python .ci/packages check

matrix: override export PYTEST_ARGS := $(WORKERS) $(PYTEST_ARGS)
matrix: ## Build, install and test with each of PYTHONS and TORCHES (what is installed), one by one
	.ci/matrix

gpu-check: ## Build, test and measure on a CUDA device, with $(PYTHON) (GPU_ARGS="--part build --part tests")
	$(PYTHON) -m bench.gpu.check --output "$(GPU_RESULTS)" $(GPU_ARGS)

# nvcc is the machine's, or comes from the package index.
cuda: $(WITH)nvrtc$(if $(shell command -v nvcc),,$(COMMA)nvcc) ## Compile every CUDA source to machine code; a warning is an error
	PYTHONPATH=csrc:tests $(BIN)/python -m cuda_compile

docs: $(WITH)docs ## Build the documentation site in build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check-site: docs ## Open every page of the site in headless Chromium, which has to be there
	PYTHONPATH=tests $(BIN)/python -m browser_check build/docs $(SITE_ARGS)

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .benchmarks
	rm -f reducer/_C*.so commhooks/_C*.so reducer/built_with.json commhooks/built_with.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first: the extensions are compiled against the torch that will load it, which build
# isolation would replace with a download of its own.
$(INSTALLED): pyproject.toml setup.py csrc/extensions.py constraints.txt $(CXX_SOURCES) $(CUDA_SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --constraint constraints.txt torch numpy ninja setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

# The package is installed, so this adds what its extras require, and compiles nothing.
$(WITH)%: pyproject.toml constraints.txt | $(INSTALLED)
	$(BIN)/python -m pip install --constraint constraints.txt 'commhooks[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
