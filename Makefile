# `make lab` and `make test` are all that a learner needs; `make help` lists the rest.
# A comment after ##1 is for learners, after ## for developers.
# Needs make and Python >= 3.11, best 3.13. To use another Python: make PYTHON=/path/to/python3 lab

# $(call python,3.13 3.12): the first of these versions that runs and can make environments, on the PATH or among pyenv's.
python = $(shell for version in $(1); do \
	for python in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python python3; do \
	"$$python" -c "import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" 2>/dev/null \
	&& echo "$$python" && exit; done; done)

# The reference is the newest JAX on Python 3.13; Python 3.11 gets no JAX after 0.10.
GIVEN_PYTHON := $(PYTHON)
ifndef PYTHON
PYTHON := $(or $(call python,3.13 3.12 3.14 3.11),python3)
endif
PYTHON311 ?= $(call python,3.11)
PYTHON313 ?= $(call python,3.13)
NEWEST_PYTHON ?= $(call python,3.13 3.12 3.14)
LABFLAGS ?=
NB ?=

PY = .venv/bin/python
# One process per core; the tests of one file, or the cells of one notebook, run in one process.
TEST = -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
# Without the plugin for notebooks, which takes 2 s to import in each process.
UNIT = $(TEST) -p no:nbval
# Python keeps what it compiled, though containers often turn this off: jaxtyping's hook compiles the library in each process, 4 s.
unexport PYTHONDONTWRITEBYTECODE
# An environment is built again when one of these files changes, or the Python that built it.
PINS = pyproject.toml requirements/reference.txt requirements/py311.txt requirements/colab.txt
IDENTITY = -c 'import sys; print(sys.version.split()[0], sys.base_prefix)'
anew = $(shell [ "$$(cat $(1)/.installed 2>/dev/null)" = "$$($(2) $(IDENTITY) 2>/dev/null)" ] || echo another-python)
# JupyterLab refuses to run as root, the user of most containers.
AS_ROOT = $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)
LAB = $(PY) -m jupyterlab --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(AS_ROOT)
.NOTPARALLEL:
.PHONY: help lab work class grade edit test test-all lint unit unit-all nbval notebooks test-py311 test-colab test-colab-unit test-colab-live test-latest gpu \
	case-study ladder optimizers soak badges site environment pins clean another-python

help: ##1 this list
	@echo "For learners and teachers:"; awk -F ':.*##1 ' '/^[a-z0-9-]+:.*##1 / { printf "  %-16s%s\n", $$1, $$2 }' Makefile
	@echo "For developers:"; awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s%s\n", $$1, $$2 }' Makefile

lab: work ##1 make .venv and open JupyterLab on your own copies, in work/ (without a browser: prints the URL)
	$(LAB) --notebook-dir=work $(LABFLAGS)

work: .venv/.installed ##1 copy new notebooks into work/; take one anew and keep yours: make work NB=03
	$(PY) tools/work.py $(NB)

class: .venv/.installed ##1 for teachers: copies without solutions, into a new folder: make class FOLDER=../class
	$(PY) tools/teach.py class "$(FOLDER)"

grade: .venv/.installed ##1 for teachers: run FOLDER/STUDENT/NN_*.ipynb and count exercises (NB=03: one notebook; CSV=FILE: a table)
	$(PY) tools/teach.py grade "$(FOLDER)" --number "$(NB)" $(if $(CSV),--csv "$(CSV)")

edit: .venv/.installed ## open JupyterLab on notebooks/, to change the course
	$(LAB) --notebook-dir=notebooks $(LABFLAGS)

test: lint unit nbval ##1 lint, types, unit tests, and every notebook against its stored outputs
	@[ -n "$$COURSE_SLOW" ] || echo "Left out: $$(cat .pytest_cache/v/course/left_out) slow cases. \`make test-all\` runs them."

# Slow tests: docs/versions.md says what they do.
test-all unit-all: export COURSE_SLOW = 1
test-all: test ## all of `make test`, with the slow tests

unit-all: unit ## the unit tests alone, with the slow ones

lint: .venv/.installed ## lint, types, GitHub's workflows and forms
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

unit: .venv/.installed ## the unit tests alone, without the slow ones
	$(PY) $(UNIT) --durations=10

nbval: .venv/.installed ## the notebooks alone; one of them: make nbval NB=01
	$(PY) $(TEST) --durations=10 --nbval $(if $(NB),notebooks/$(NB)*.ipynb,notebooks)

notebooks: .venv/.installed ## run the notebooks again and store their outputs; one of them: make notebooks NB=01
	$(PY) tools/execute_notebooks.py $(NB)

test-py311: .venv-py311/.installed ## types, unit tests and notebooks on Python 3.11, with JAX 0.10.2
	.venv-py311/bin/python -m mypy
	.venv-py311/bin/python $(UNIT)
	.venv-py311/bin/python $(TEST) --nbval notebooks

test-colab: test-colab-unit test-colab-live ## unit tests and notebooks with the versions that Colab ships (needs Python 3.13)
	.venv-colab/bin/python $(TEST) --nbval notebooks

test-colab-live: .venv-colab/.installed ## the notebooks as after their first cell on a CPU runtime of Colab
	.venv-colab/bin/python tools/pretend_colab.py .venv-colab-live
	.venv-colab-live/bin/python $(TEST) --nbval notebooks

test-colab-unit: .venv-colab/.installed ## the unit tests alone with the versions that Colab ships
	.venv-colab/bin/python $(UNIT)

# Colab's debugger would write a warning for each process that starts a kernel.
test-colab test-colab-unit test-colab-live: export PYDEVD_DISABLE_FILE_VALIDATION = 1

test-latest: ## unit tests and notebooks with the newest packages there are (needs Python >= 3.12)
	@[ -n "$(NEWEST_PYTHON)" ] || { echo "The newest JAX needs Python 3.12 or newer (best 3.13), and none was found."; \
		echo "Name one: make $@ NEWEST_PYTHON=/path/to/python3.13"; exit 1; }
	$(NEWEST_PYTHON) tools/make_venv.py .venv-latest newest
	COURSE_SLOW=1 .venv-latest/bin/python $(UNIT)
	COURSE_COMPARE=facts .venv-latest/bin/python $(TEST) --nbval notebooks

# Without this the first process takes most of the GPU's memory, and the tests start several.
gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
gpu: PYTHON = $(or $(GIVEN_PYTHON),python3)
# pytest-benchmark, where it is installed, warns beside pytest-xdist, and warnings are errors.
gpu: ON_GPU = -q --tb=short -n 8 --dist loadfile --no-loadscope-reorder -p no:benchmark
gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu: ## on a machine with a GPU, with the Python and JAX that are there: tests, notebooks, measurements into docs/results/
	$(PYTHON) tools/check_gpu.py
	$(PYTHON) -m benchmarks.gpu
	COURSE_BACKEND=gpu $(PYTHON) -m pytest $(ON_GPU)
	COURSE_BACKEND=gpu $(PYTHON) -m pytest $(ON_GPU) --nbval notebooks

soak: .venv/.installed ## kill a small training run 100 times and check that nothing is lost (many minutes)
	COURSE_SLOW=1 COURSE_KILLS=100 $(PY) -m pytest -q tests/program/test_program_by_processes.py -k killed_at_random_moments

case-study: .venv/.installed ## compile every published configuration and write the recorded table (many minutes)
	$(PY) tools/record.py case_study

ladder: .venv/.installed ## compile every rung of notebook 19 and write the recorded table and its picture (minutes)
	$(PY) tools/record.py ladder

optimizers: .venv/.installed ## train a small model with each optimizer and write the recorded curves of notebook 17 (10 minutes of one core)
	$(PY) tools/record.py optimizers

badges: .venv/.installed ## stamp the project's address into badges and set-up cells: make badges REPO=owner/name
	$(PY) tools/stamp.py $(REPO)

SITE = .venv-site/bin/python
site: .venv-site/.installed ## the web pages, from stored outputs, into build/site/html: no notebook runs
	rm -rf build/site
	$(SITE) docs/site/pages.py write build/site/source
	$(SITE) -m sphinx --quiet --fail-on-warning --keep-going --jobs auto -c docs/site build/site/source build/site/html
	$(SITE) docs/site/pages.py check build/site/html
	@echo "Open build/site/html/index.html"

pins: .venv/.installed ## write new exact versions into requirements/ and environment.yml (needs uv)
	$(PY) tools/pin_versions.py
	$(PY) tools/sync_environment.py

environment: .venv/.installed ## write environment.yml from pyproject.toml and requirements/
	$(PY) tools/sync_environment.py

clean: ## remove the environments and what tools left behind
	rm -rf .venv .venv-py311 .venv-colab .venv-colab-live .venv-latest .venv-site build/site .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.SECONDEXPANSION:
.venv/.installed: $(PINS) $$(call anew,.venv,$$(PYTHON))
	@command -v $(PYTHON) >/dev/null || { echo "The course needs Python 3.11 or newer (best 3.13), and none was found."; \
		echo "Name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.13"; exit 1; }
	$(PYTHON) tools/make_venv.py .venv

.venv-py311/.installed: $(PINS) $$(call anew,.venv-py311,$$(PYTHON311))
	@[ -n "$(PYTHON311)" ] || { echo "This needs Python 3.11, and none was found (with its modules venv and ensurepip)."; \
		echo "Name one: make $(MAKECMDGOALS) PYTHON311=/path/to/python3.11"; exit 1; }
	$(PYTHON311) tools/make_venv.py .venv-py311 py311

.venv-site/.installed: requirements/site.txt $$(call anew,.venv-site,$$(NEWEST_PYTHON))
	@[ -n "$(NEWEST_PYTHON)" ] || { echo "The site needs Python 3.12 or newer (best 3.13), and none was found."; \
		echo "Name one: make $(MAKECMDGOALS) NEWEST_PYTHON=/path/to/python3.13"; exit 1; }
	$(NEWEST_PYTHON) tools/make_venv.py .venv-site site

.venv-colab/.installed: $(PINS) $$(call anew,.venv-colab,$$(PYTHON313))
	@[ -n "$(PYTHON313)" ] || { echo "This needs Python 3.13, which Colab has, and none was found (with venv and ensurepip)."; \
		echo "Name one: make $(MAKECMDGOALS) PYTHON313=/path/to/python3.13"; exit 1; }
	$(PYTHON313) tools/make_venv.py .venv-colab colab
