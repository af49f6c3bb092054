# Everything a developer runs. Works with GNU make 4 and with the make 3.81 of macOS.

PYTHON ?= python3
ARGS ?=
SEEDS ?= 200
FIRST ?= 0
MINUTES ?= 2
LEARNERS ?= 4
FRAGMENTS ?= 2
INTENSITY ?= 1
WORKERS ?= 4
SECONDS ?= 600
CASES ?= 1000000
BENCHES ?= merge stall:encode stall stall:cost quality:wire quality rounds:events failover failover:flood store_gcs dashboard:report rounds
ROOTFS ?= .rootfs
RESULTS ?= runs/quality.jsonl
LARGE ?= runs/large
SIZE ?= 10m
PIECE ?= 9
PEER ?=
TORCH ?=
SHORT ?=
HEADLINE ?= runs/headline
LINK ?= tests/tools/slow_link.py
KIND ?= cpu
INTERPRETER ?=
RUN_UNITS ?= tests/tools/run_units.sh
SLURM ?=

BIN := .venv/bin
INSTALL := $(BIN)/python locks/install.py
STAMP := .venv/installed
RUN := $(BIN)/python -m

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo reference docs test test-long wheel-test test-slow test-browser picture extras test-extras test-stores test-models test-lm-eval tpu cuda test-alerts test-slurm operators-hour test-systemd chaos fuzz mutants lint types \
	imports check \
	attack attack-live bench headline quality quality-large sim release terraform lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..." is passed on by demo, test, test-long, test-slow, chaos, fuzz, mutants, sim, bench and lock;'
	@echo '  PYTHON=... chooses the interpreter of install.'

install: $(STAMP) ## make .venv with the pinned packages and the diloco command

# Once, and again when the pins or the project's own metadata have changed.
$(STAMP): requirements.lock locks/arrow.lock locks/tokens.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Python 3.11 or newer is needed; '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>&1 || true)"; \
		echo "hint: install it, or name it: make install PYTHON=python3.12"; \
		exit 1; }
	@echo "installing: virtual environment in .venv"
	@$(PYTHON) -m venv .venv
	@echo "installing: pinned packages of requirements.lock (a minute or more the first time)"
	@$(INSTALL) .venv --require-hashes -r requirements.lock -r locks/arrow.lock -r locks/tokens.lock
	@echo "installing: this project, editable"
	@$(INSTALL) .venv --no-deps --no-build-isolation -e .
	@echo "installing: compiling what an aggregator merges with (some seconds)"
	@$(RUN) diloco.aggregator.compile_kernels
	@touch $(STAMP)
	@echo "installed: $(BIN)/diloco"

demo: install ## train with four learners and an aggregator on this machine
	@$(BIN)/diloco local $(ARGS)

test: install ## run the tests, without the long and the slow ones; WORKERS=4 at a time
	@$(RUN) pytest -m "not long and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

test-long: install ## run the long tests, many of them of real processes; WORKERS=4 at a time
	@$(RUN) pytest -m "long and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

sim: install ## simulate; SEEDS=200 MINUTES=2 LEARNERS=4 FRAGMENTS=2 INTENSITY=1 FIRST=0 FULL=1
	@$(BIN)/python tests/sim/run_sim.py --seeds $(SEEDS) --first $(FIRST) --minutes $(MINUTES) \
		--learners $(LEARNERS) --fragments $(FRAGMENTS) --intensity $(INTENSITY) \
		$(if $(FULL),--full) $(ARGS)

wheel-test: install ## build wheel and sdist, and try them in an environment outside the tree
	@$(RUN) pytest -m slow tests/wheel $(ARGS)

# TORCH=... is another build of it than the lock's, such as one for the CPU alone.
EXTRAS = tensorboard wandb notebook
# Learners of trainers and of Keras that are killed, and four ranks under FSDP2.
SOME_EXTRAS = tests/integration/test_trainers.py tests/integration/test_ranks.py \
	tests/integration/test_keras.py -k "two_learners or fsdp or killed_learner"
extras: .venv-extras/installed ## make .venv-extras, some gigabytes where torch's build has CUDA; TORCH="torch==..."

.venv-extras/installed: $(STAMP) $(addprefix locks/,$(EXTRAS:=.lock) torch.lock trainers.lock keras.lock \
		tunix.lock)
	@$(INSTALL) .venv-extras --require-hashes -r requirements.lock $(EXTRAS:%=-r locks/%.lock) \
		$(if $(TORCH),,-r locks/torch.lock)
	@$(if $(TORCH),$(INSTALL) .venv-extras "$(TORCH)")
	@$(INSTALL) .venv-extras --require-hashes --no-deps -r locks/trainers.lock -r locks/keras.lock \
		-r locks/tunix.lock
	@$(INSTALL) .venv-extras --no-deps --no-build-isolation -e .
	@touch $@

test-extras: extras ## test what needs torch, trainers, trackers, Keras, tunix or a notebook; SHORT=1 for some of it
	@.venv-extras/bin/python -m pytest $(if $(SHORT),$(SOME_EXTRAS),tests/integration/test_torch.py \
		tests/integration/test_trackers.py tests/integration/test_trainers.py \
		tests/integration/test_ranks.py tests/integration/test_notebook.py \
		tests/integration/test_keras.py tests/integration/test_tunix.py) $(ARGS)

# Servers of an environment of their own: moto speaks S3, Azurite (of npm) as Azure does.
AZURITE = 3.37.0
test-stores: install ## test s3:// and az:// against moto and Azurite, in .venv-stores; needs npm
	@$(INSTALL) .venv-stores --require-hashes -r locks/stores.lock
	@npm install --prefix .venv-stores --silent --no-audit --no-fund azurite@$(AZURITE)
	@DILOCO_TEST_SERVERS=$(CURDIR)/.venv-stores $(RUN) pytest tests/conformance/test_store.py \
		tests/integration/test_store_buckets.py $(ARGS)

# The oracle is transformers and peft, in an environment that has nothing of the project.
test-models: install .venv-models/installed ## hold models against transformers; TORCH="torch==..." and SHORT=1 as test-extras
	@DILOCO_TEST_ORACLE=$(abspath .venv-models/bin/python) $(RUN) pytest -rs \
		$(if $(SHORT),tests/models -k "six_families or peft and qwen3-moe",tests/models tests/integration/test_continue.py) $(ARGS)

.venv-models/installed: $(STAMP) locks/oracle.lock locks/torch.lock
	@$(INSTALL) .venv-models --no-deps --require-hashes -r locks/oracle.lock
	@$(INSTALL) .venv-models $(if $(TORCH),"$(TORCH)",--no-deps --require-hashes -r locks/torch.lock)
	@touch $@

# lm_eval[hf], in an environment that has nothing of the project either.
test-lm-eval: install .venv-lm-eval/installed ## hold evaluate --lm-eval against lm_eval itself; TORCH="torch==..." as test-extras
	@DILOCO_TEST_LM_EVAL=$(abspath .venv-lm-eval/bin/python) $(RUN) pytest -rs \
		tests/models/test_scores_by_lm_eval.py $(ARGS)

.venv-lm-eval/installed: $(STAMP) locks/lm-eval.lock locks/torch.lock
	@$(INSTALL) .venv-lm-eval --no-deps --require-hashes -r locks/lm-eval.lock
	@$(INSTALL) .venv-lm-eval $(if $(TORCH),"$(TORCH)",--no-deps --require-hashes -r locks/torch.lock)
	@touch $@

# libtpu compiles without a chip; apart, since JAX looks for one wherever it is installed.
tpu: install ## compile a learner's programs for TPUs that are not here, in .venv-tpu; ARGS="--preset 125m"
	@$(INSTALL) .venv-tpu --require-hashes -r requirements.lock -r locks/arrow.lock -r locks/tpu.lock
	@$(INSTALL) .venv-tpu --no-deps --no-build-isolation -e .
	@JAX_PLATFORMS=cpu .venv-tpu/bin/python -m pytest -n 0 tests/unit/test_topology.py
	@JAX_PLATFORMS=cpu .venv-tpu/bin/python -m bench.tpu $(ARGS)

# Nor does XLA need a GPU to compile for one.
cuda: install ## compile a learner's programs for GPUs that are not here, in .venv-cuda
	@$(INSTALL) .venv-cuda --require-hashes -r requirements.lock -r locks/arrow.lock -r locks/cuda.lock
	@$(INSTALL) .venv-cuda --no-deps --no-build-isolation -e .
	@JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -n 0 tests/unit/test_topology.py -rs $(ARGS)

# PROMETHEUS is a folder with Debian's prometheus, promtool, prometheus-alertmanager and amtool.
test-alerts: install ## break runs, and see alerts pass a real Prometheus and Alertmanager; PROMETHEUS=...
	@PATH="$(if $(PROMETHEUS),$(PROMETHEUS):)$$PATH" $(RUN) pytest -rs \
		tests/integration/test_alerting.py tests/integration/test_prometheus.py $(ARGS)

# SLURM is a folder into which Debian's packages were unpacked (dpkg -x); without it they are installed.
test-slurm: install ## run a learner as a job of a real Slurm, as root; SLURM=...
	@SLURM=$(SLURM) $(RUN) pytest -rs tests/integration/test_slurm.py $(ARGS)

# Every command of every runbook, and some pages on a run that was broken as they say.
operators-hour: install ## follow the runbooks on real runs that are broken for it
	@$(RUN) pytest -rs --durations=0 tests/integration/test_runbooks_acted.py \
		tests/integration/test_runbooks_followed.py tests/integration/test_runbook_commands.py $(ARGS)

test-slow: install ## run the slow tests
	@$(RUN) pytest -m slow $(ARGS)

# Of npm, and for these tests alone: what users run has no build step and no npm.
test-browser: install ## try the live page in a Chromium, by keyboard and with axe-core; needs Node
	@cd tests/browser && npm ci --silent --no-audit --no-fund
	@$(RUN) pytest tests/browser $(ARGS)

picture: install ## make docs/report.png of a local run, OF=runs/NAME
	@cd tests/browser && npm ci --silent --no-audit --no-fund
	@$(BIN)/python tests/browser/picture.py $(OF)

# RUN_UNITS boots a copy of ROOTFS and runs a script in it; ARGS="-k installed" for one scenario.
test-systemd: install ## run the systemd units in a container, as root; ROOTFS=... to keep its system
	@ROOTFS=$(ROOTFS) RUN_UNITS=$(RUN_UNITS) $(RUN) pytest tests/systemd $(ARGS)

chaos: install ## kill, pause and cut off real processes; SECONDS=600, SEED=... to repeat one
	@$(BIN)/python tests/chaos/chaos.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: install ## feed every decoder with damaged inputs; CASES=1000000
	@$(BIN)/python tests/fuzz/run_fuzz.py --cases $(CASES) $(ARGS)

# Hours of one core where many survive; results are kept in runs/mutants.
mutants: install ## plant bugs one by one, and say what finds each; WORKERS=4 at a time, ARGS=--quick
	@$(BIN)/python tests/mutants/run_mutants.py --jobs $(WORKERS) $(ARGS)

lint: install ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install ## mypy, strict
	@$(BIN)/mypy

imports: install ## import-linter: who may import whom
	@$(BIN)/lint-imports --no-logo

check: lint types imports ## lint, types and imports

# INTERPRETER=/usr is a folder with bin/python3.N and lib; without it uv fetches one.
release: install ## make one archive of all that a machine runs; KIND=cpu, cuda or tpu, INTERPRETER=DIR
	@$(RUN) diloco.infra.make_release --kind $(KIND) $(if $(INTERPRETER),--interpreter $(INTERPRETER)) $(ARGS)

# A stand-in of Google's provider (tests/tools/google_provider) plans and tests without an account; needs npm.
terraform: install ## check infra/terraform: fmt, validate, checkov, plan, test
	@.ci/terraform

# Strict: a link that leads nowhere, or a page that no list names, is an error.
docs: reference ## build the site of the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet --strict $(ARGS)
	@echo "look at it: $(BIN)/python -m http.server --directory site"

reference: install ## write the generated parts of docs/ anew
	@$(RUN) docs.generate

# NAME:PART is a part of a bench, its first word.
bench: install ## run the benchmarks; BENCHES="merge stall:encode" for some of them
	@for name in $(BENCHES); do \
		echo "== bench.$$name"; \
		$(RUN) bench.$$(echo $$name | tr : ' ') $(ARGS) || exit 1; \
	done

# Of some hundreds of runs in virtual time; those that RESULTS holds are not run again.
quality: install ## sweep the quality of training, for some hours of one core; RESULTS=runs/quality.jsonl
	@mkdir -p $(dir $(RESULTS))
	@for task in language student transfer skills; do \
		$(RUN) bench.sweep --results $(RESULTS) --task $$task $(ARGS) || exit 1; \
	done
	@$(RUN) bench.curves --results $(RESULTS) --task student
	@$(RUN) bench.curves --results $(RESULTS) --task transfer
	@$(RUN) bench.curves --results $(RESULTS) --task skills
	@$(RUN) bench.curves --results $(RESULTS) --plot $(dir $(RESULTS))quality.png \
		--proof $(dir $(RESULTS))quality-proof.png

attack: install ## the worst that a search finds for liars among learners, in virtual time; ARGS="--draws 60"
	@$(RUN) bench.attack $(ARGS)

attack-live: install ## the same by processes, beside a nats-server with credentials; ARGS="--only links"
	@$(RUN) bench.attack_live $(ARGS)

quality-large: install ## quality of SIZE=10m or 35m on an accelerator, PIECE=9 minutes at a time
	@$(RUN) bench.large --folder $(LARGE) --size $(SIZE) --minutes $(PIECE) $(ARGS)

# LINK joins two network namespaces, which takes root; PEER is a Python that has torch and torchft.
headline: install ## goodput, a slow link and one round, beside peers; ARGS=--short; PEER=...
	@mkdir -p $(HEADLINE)
	@$(RUN) bench.headline_goodput --out $(HEADLINE)/goodput.json $(ARGS)
	@$(if $(filter 0,$(shell id -u)), \
		$(RUN) bench.headline_link --link $(LINK) --out $(HEADLINE)/link.json $(ARGS), \
		echo "no slow link: it takes root")
	@$(RUN) bench.headline_round $(if $(PEER),--peer $(PEER)) --out $(HEADLINE)/round.json $(ARGS)
	@$(RUN) bench.headline_goodput figures $(HEADLINE) --to $(HEADLINE)

# setuptools builds the editable install, which runs without build isolation.
lock: install ## resolve requirements.lock and locks/ again; ARGS=--upgrade for newer versions
	@printf 'setuptools>=77\n' | $(BIN)/uv pip compile pyproject.toml - --quiet \
		--extra dev --universal --python-version 3.11 --fork-strategy fewest \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
		--output-file requirements.lock $(ARGS) >/dev/null
	@$(BIN)/python locks/resolve.py $(BIN)/uv $(ARGS)

clean: ## remove .venv, caches and build leftovers; runs/ stays
	rm -rf .venv build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
