# `make help` lists the targets. PYTHON=... chooses the interpreter that .venv is made from.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.tercet-ready
NEXT := next: source $(BIN)/activate && tercet demo

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Tests start hundreds of interpreters: what is compiled once is kept, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo demo-envoy docs reference wheels check quick lock charts test test-all test-long test-models test-gpu test-vllm fuzz lint clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with everything for CPU engines and tests, and the built-in model
	@$(BIN)/python -m tercet.cluster.model smollm2 $(if $(filter setup,$(MAKECMDGOALS)),>/dev/null && echo '$(NEXT)')

$(READY): pyproject.toml $(wildcard packages/*/pyproject.toml) requirements/locked.txt requirements/torch.txt requirements/uv.txt scripts/setup
	@rm -f $@
	@PYTHON=$(PYTHON) scripts/setup $(VENV)
	@touch $@

lock: ## write requirements/locked.txt from the lists of pins, with hashes
	scripts/lock

demo: setup ## two engines, a small model, and an answer that used both
	@$(BIN)/tercet demo

demo-envoy: setup ## three simulated engines behind a real Envoy with tercet epp; engines and the picker are killed
	@scripts/demo-envoy $(VENV)

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# Sphinx does not read an unchanged page again, and so does not repeat its warnings: what failed is made from the start.
docs: setup ## the manual as a site, docs/_build/html/README.html; a warning, such as a broken link, is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --builder html docs docs/_build/html \
		|| { rm -rf docs/_build/html; exit 1; }
	$(BIN)/python -m scripts.one_file_manual docs docs/_build/html
	@echo docs/_build/html/README.html, and for language models llms.txt and llms-full.txt next to it

reference: setup ## write docs/reference, which git does not keep, and deploy/grafana from what the code declares
	$(BIN)/python -m scripts.reference
	$(BIN)/python -m scripts.dashboards

wheels: setup ## wheels, pins of the images and the packaged chart, in dist: what deploy/docker builds from
	$(BIN)/python -m scripts.wheels

# A test that does not end at its own limit ends its process, and its stacks are printed.
STUCK := -o faulthandler_exit_on_timeout=true -o faulthandler_timeout
# Folders of the unit tests, and how they run; scripts/run_tests.py names the same file.
UNIT := @tests/unit.args
check: setup ## style, types of src and packages, and the fast tests, with few examples of each property
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# Types take as long as all other checks: they run in the background, and their errors are printed at the end.
	@said=$$(mktemp); $(BIN)/python -m scripts.types_of_src >$$said 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null || true; rm -f $$said' EXIT; \
	$(BIN)/pytest --hypothesis-profile quick -m 'not processes and not slow and not vllm' $(UNIT) --forks 4; \
	wait $$types || { cat $$said; exit 1; }; tail -n 1 $$said

test: setup ## style, all types, all unit tests, charts, a real Envoy and real engines; at the end what failed and what took longest
	$(BIN)/python -m scripts.run_tests $(PARTS)

charts: setup ## the Helm chart and the images' files, without a cluster
	$(BIN)/pytest $(STUCK)=600 tests/kubernetes

quick: setup ## style, and the fast tests of the rooms that differ from the last commit on main
	$(BIN)/python -m scripts.quick

# Beyond `make test`; `in_full` of each test says what `make test` has instead.
LONG := moves_back_and_forth bypass moves_hostile router program_swaps sidecar plain_vllm two_machines chaos frozen starts thinking \
	staged_engines paused_engines scaled_models siblings
test-long: setup ## real engines, in full: 64 requests that move back and forth 20 times each, stopped cores, 200 clients, 50 swaps, engines lost while they prefill
	$(BIN)/pip install --disable-pip-version-check -q --no-deps -r requirements/ray-jobs.txt
	TERCET_LONG_TESTS=1 $(BIN)/pytest -m 'processes or slow or hypothesis' $(UNIT)
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --upgrade --target build/triton -r requirements/triton.txt
	TERCET_LONG_TESTS=1 PYTHONPATH=build/triton $(BIN)/pytest -s tests/engines/test_second_model_runner.py
	TERCET_LONG_TESTS=1 $(BIN)/pytest -s $(LONG:%=tests/engines/test_%.py)

test-all: test test-long test-models fuzz test-vllm ## everything, for the night: hours

test-models: setup ## tiny random models of each family on two engines each (an hour); ARGS="-k gemma2" for one
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --upgrade --target build/torchvision -r requirements/models.txt
	$(BIN)/pytest tests/models $(ARGS)
	$(BIN)/python -m tests.models.record

test-gpu: ## tests that need a CUDA device, with your Python (PYTHON=...), which has a CUDA vLLM, pytest and hypothesis
	@# That Python may lack the pytest plugins that this project's settings name.
	$(PYTHON) -m pytest -o addopts= -W ignore::pytest.PytestConfigWarning -W ignore::pytest.PytestUnknownMarkWarning \
		-m gpu -rs -v tests/gpu

fuzz: setup ## a million wrong frames and ten thousand wrong calls; ARGS="--seed 7 --only kv_sender" and others
	$(BIN)/python -m tests.fuzz.run $(ARGS)

VLLM_VERSIONS := 0.31.0 0.32.0 0.33.0
VLLM_ENGINES := tests/engines/test_equality.py tests/engines/test_openai.py
test-vllm: setup ## the plugin's tests, and then real engines, with each vLLM that it supports
	@for version in $(VLLM_VERSIONS); do \
		for ring in "tests/unit/vllm_plugin tests/unit/router/openai" "$(VLLM_ENGINES)"; do \
			echo "vLLM $$version: $$ring"; scripts/with-vllm $$version pytest -q $$ring; \
		done; \
	done

clean: ## remove caches and build products
	rm -rf build dist packages/*/build docs/_build docs/reference .pytest_cache .ruff_cache .hypothesis
	find src packages tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf $(VENV) .vllm src/tercet.egg-info packages/*/src/*.egg-info
