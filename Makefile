# `make lab` and `make test` are all that a learner needs; `make help` lists the rest.
# Needs make and Python >= 3.11. Another Python: make PYTHON=python3.12 lab

PYTHON ?= python3
LABFLAGS ?=
NB ?=

PY = .venv/bin/python
# A process for each core; tests of one file, and cells of one notebook, stay together.
TEST = -m pytest -q -n auto --dist loadfile --no-loadscope-reorder
PINS = pyproject.toml requirements/py311.txt requirements/py312.txt requirements/oldest.txt
# JupyterLab refuses to run as root, which is who one is in a container.
AS_ROOT = $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)
# The first Python >= 3.12 that runs, for the newest JAX; the last ones are pyenv's.
NEWEST_PYTHON ?= $(shell for p in python3.13 python3.12 python3.14 $(PYTHON) \
	$(lastword $(sort $(wildcard $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python))); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)

.NOTPARALLEL:
.PHONY: help lab test lint unit nbval notebooks test-oldest test-oldest-unit test-latest gpu case-study soak badges environment pins clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s%s\n", $$1, $$2 }' Makefile

lab: .venv/.installed ## make .venv and open JupyterLab on notebooks/ (without a browser: prints the URL)
	$(PY) -m jupyterlab --notebook-dir=notebooks --LabApp.news_url=None \
		--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(AS_ROOT) $(LABFLAGS)

test: lint unit nbval ## lint, types, unit tests, and every notebook against its stored outputs

lint: .venv/.installed
	$(PY) -m ruff check .
	$(PY) -m mypy

unit: .venv/.installed
	$(PY) $(TEST) --durations=10

nbval: .venv/.installed
	$(PY) $(TEST) --durations=10 --nbval notebooks

notebooks: .venv/.installed ## re-run the notebooks and store their outputs; one of them: make notebooks NB=01
	$(PY) tools/execute_notebooks.py $(NB)

test-oldest: test-oldest-unit ## unit tests and notebooks at the lower bounds of pyproject.toml
	COURSE_COMPARE=facts .venv-oldest/bin/python $(TEST) --nbval notebooks

test-oldest-unit: .venv-oldest/.installed ## the unit tests of it alone
	.venv-oldest/bin/python $(TEST)

test-latest: ## unit tests and notebooks with the newest packages there are (needs Python >= 3.12)
	@[ -n "$(NEWEST_PYTHON)" ] || { echo "The newest JAX needs Python >= 3.12, and none was found."; \
		echo "Name one: make test-latest NEWEST_PYTHON=/path/to/python3.13"; exit 1; }
	$(NEWEST_PYTHON) tools/make_venv.py .venv-latest newest
	COURSE_SLOW=1 .venv-latest/bin/python $(TEST)
	COURSE_COMPARE=facts .venv-latest/bin/python $(TEST) --nbval notebooks

# Not all of the GPU's memory for whoever comes first: tests start processes of their own.
gpu: export XLA_PYTHON_CLIENT_PREALLOCATE = false
gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu: ## on a machine with a GPU, with the Python and JAX that are there: tests, notebooks, measurements into docs/results/
	$(PYTHON) tools/check_gpu.py
	COURSE_BACKEND=gpu $(PYTHON) -m pytest -q
	COURSE_BACKEND=gpu $(PYTHON) -m pytest -q --nbval notebooks
	$(PYTHON) -m benchmarks.gpu

soak: .venv/.installed ## kill a small training run 100 times and see that nothing is lost (many minutes)
	COURSE_KILLS=100 $(PY) -m pytest -q tests/program/test_loop.py -k killed_at_random_moments

case-study: .venv/.installed ## compile every published configuration and write the recorded table (many minutes)
	$(PY) -m course_lib.lessons.case_study
	$(PY) tools/draw_case_study.py

badges: .venv/.installed ## stamp the project's address into badges and set-up cells: make badges REPO=owner/name
	$(PY) tools/stamp.py $(REPO)

pins: .venv/.installed ## resolve requirements/ and environment.yml anew from pyproject.toml (needs uv)
	$(PY) tools/pin_versions.py
	$(PY) tools/sync_environment.py

environment: .venv/.installed ## write environment.yml from pyproject.toml and requirements/
	$(PY) tools/sync_environment.py

clean: ## remove the environments and what tools left behind
	rm -rf .venv .venv-oldest .venv-latest .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.installed: $(PINS)
	$(PYTHON) tools/make_venv.py .venv

.venv-oldest/.installed: $(PINS)
	$(PYTHON) tools/make_venv.py .venv-oldest oldest
