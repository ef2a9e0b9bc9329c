# The verbs of this repository; CI calls the same ones. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done
PACKAGES := proto kernels services/scaling services/telemetry services/streams services/engine \
            services/worker services/gateway services/client services/simulator services/pagestream operator
PYTEST := $(BIN)/python -m pytest
# An index that offers PyTorch's CPU build, for machines without an NVIDIA GPU
# (see docs/getting-started.md, "Which torch").
TORCH_INDEX ?=
PYTEST_ARGS ?=
# What takes an API server, or helm.
KUBE_TESTS = tests/integration/chart tests/integration/operator
# Longer cases of engines, workers and kills; what builds or interprets kernels, copies large weights or trains.
LONG = tests/integration/engine tests/integration/worker tests/integration/cli tests/faults \
       tests/unit/engine/layers/test_linear_levels.py tests/unit/engine/layers/test_exact_linears.py \
       tests/unit/engine/runner/test_triton_steps.py tests/unit/engine/attention \
       tests/unit/engine/models/test_loader.py tests/unit/demo/test_train.py \
       tests/unit/benchmarks/test_gpu_run.py
# pytest's exit status where a choice of ours leaves one of the two parts without a test; without a choice that fails.
NOTHING_FOUND = $(if $(PYTEST_ARGS),5,none)
# Test files that run at once, more than there are cores, since many wait; 0 is one after the other. Tests that kill
# processes always run one after the other.
WORKERS ?= 3
# The processes that tests start load this repository's modules compiled, from the second one on.
unexport PYTHONDONTWRITEBYTECODE
# Test files that run at once share the cores: one thread each, and none that spins while it waits for another's.
SHARED_CORES = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
SEED ?= 1
KILLS ?= 1000
ROUNDS ?= 10
# docker, buildah, or a command: see deploy/images/build.sh.
IMAGE_BUILDER ?= $(PAGESTREAM_IMAGE_BUILDER)

.PHONY: help setup run test kube-test kernel-test clients schemas malformed browser-test test-fast check bench faults faults-campaign families slow-test topologies properties model-check gpu images cluster-test operator-scale proto demo-model kernels kernel-tables constraints clean

help: ## List the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## Make .venv from constraints.txt

$(STAMP): constraints.txt pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES)) tools/setup.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup.sh $(PACKAGES)
	@touch $@

run: $(STAMP) ## Serve the demo model and show a streamed answer (Ctrl-C ends it)
	@$(BIN)/pagestream serve --greet "Tell me a story about the lighthouse." $(ARGS)

test: $(STAMP) ## Run the tests (17 minutes on two quiet cores): those that kill processes first, one by one
	@failed=0; select='not slow and not gpu'; \
	$(PYTEST) -m "$$select" tests/faults $(PYTEST_ARGS) || [ $$? = $(NOTHING_FOUND) ] || failed=1; \
	$(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$$select" $(addprefix --ignore=,$(KUBE_TESTS)) tests/integration tests/unit $(PYTEST_ARGS) || [ $$? = $(NOTHING_FOUND) ] || failed=1; \
	exit $$failed

kube-test: $(STAMP) ## The chart and the operator against a real API server, without a cluster (minutes)
	$(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist loadfile -m 'not slow' $(KUBE_TESTS) $(PYTEST_ARGS)

kernel-test: $(STAMP) ## The builds and interpreted cases of the kernels' cover that `make test` leaves out (minutes)
	$(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist worksteal -m 'slow and not gpu' tests/unit/kernels $(PYTEST_ARGS)

slow-test: $(STAMP) ## The longer cases that neither `make test` nor `make kernel-test` has (minutes)
	$(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist loadfile -m 'slow and not gpu' $(LONG) $(PYTEST_ARGS)

clients: $(STAMP) ## Clients that others wrote, for Python and JavaScript, against the demo model (needs npm; 3 minutes)
	PYTHON="$(PYTHON)" tests/clients/prepare.sh .clients
	$(PYTEST) tests/clients $(PYTEST_ARGS)

schemas: $(STAMP) ## Call every operation of the OpenAPI document by schemathesis (3 minutes; ARGS="--examples 200")
	PYTHON="$(PYTHON)" tests/schemas/prepare.sh .schemas
	$(BIN)/python tests/campaigns/schemas.py $(ARGS)

malformed: $(STAMP) ## Malformed inputs over HTTP, WebSocket and gRPC (20,000 a minute; ARGS="--count 1000000 --seed 1")
	$(BIN)/python tests/campaigns/malformed.py $(ARGS)

browser-test: $(STAMP) ## The page in Chromium, while its buttons kill processes (needs chromium and chromium-driver)
	$(PYTEST) tests/browser $(PYTEST_ARGS)

test-fast: $(STAMP) ## Run at each change: the unit tests but interpreted kernels and C++ builds (under 5 minutes)
	$(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist loadfile -m 'not slow and not gpu and not builds' tests/unit $(PYTEST_ARGS)

check: $(STAMP) ## Lint, format, types, layer order, widths of Markdown and YAML
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/rumdl check --quiet --no-cache .
	$(BIN)/yamllint --strict .

bench: $(STAMP) ## Print the benchmarks' ratios (minutes; a quiet machine is best)
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

faults: $(STAMP) ## Kill, stop, cut off and fill every part at every moment: 168 cells, and a table (25 to 40 minutes)
	$(BIN)/python tests/campaigns/fault_matrix.py $(ARGS)

properties: $(STAMP) ## All pairs of an engine's features, then the property tests with fresh examples, ROUNDS times over (a minute a round)
	$(PYTEST) -q -m "slow or not slow" tests/integration/engine/test_feature_pairs.py
	for round in $$(seq $(ROUNDS)); do $(PYTEST) -q -m "hypothesis and not gpu" tests/unit $(PYTEST_ARGS) || exit 1; done

model-check: $(STAMP) ## The protocol's scripts on virtual time, and every broken variant of them (minutes)
	$(PYTEST) -m "slow or not slow" tests/integration/streams/test_model_check.py tests/integration/streams/test_model_mutants.py

topologies: $(STAMP) ## The streams' tests on the oldest and newest server, a cluster, behind Sentinels (minutes)
	$(PYTEST) -n $(WORKERS) --dist loadfile -m "slow or not slow" tests/integration/redis tests/integration/streams --ignore-glob='*/test_model_*' $(PYTEST_ARGS)

faults-campaign: $(STAMP) ## Random kills under continuous load: SEED=1 KILLS=1000; goes on after an interruption
	$(BIN)/python tests/campaigns/faults.py --seed $(SEED) --kills $(KILLS) $(ARGS)

families: $(STAMP) ## Run every causal LM that transformers registers, small, and write docs/models.md (4 minutes)
	$(BIN)/python tests/campaigns/families.py --write docs/models.md $(ARGS)

images: ## Build the images of gateway, operator and engine, each with its list of contents; CUDA=1 for GPUs, too
	PAGESTREAM_IMAGE_BUILDER="$(IMAGE_BUILDER)" TORCH_INDEX="$(TORCH_INDEX)" deploy/images/build.sh $(if $(filter 1,$(CUDA)),--cuda) $(ARGS)

cluster-test: $(STAMP) ## Install the chart on a real cluster and disturb it (KUBECONFIG, PAGESTREAM_IMAGE_LOADER; 25 minutes)
	PAGESTREAM_IMAGE_BUILDER="$(IMAGE_BUILDER)" TORCH_INDEX="$(TORCH_INDEX)" tests/cluster/prepare.sh
	$(PYTEST) tests/cluster $(PYTEST_ARGS)

kernels: $(STAMP) ## Every kernel in every shape, interpreted and compiled ahead of time (long; cached by source)
	$(BIN)/python tests/campaigns/kernels.py $(ARGS)

kernel-tables: $(STAMP) ## Choose the attention kernels' tile sizes by chip: builds, and times where there is a GPU (minutes)
	$(BIN)/python -m pagestream_kernels.tuning.write $(ARGS)

gpu: $(STAMP) ## On one GPU: tests/gpu, then all figures, to docs/benchmarks/gpu.md (10 minutes; ARGS=--dry-run without)
	$(BIN)/python tests/benchmarks/gpu/run.py $(ARGS)

operator-scale: $(STAMP) ## One operator, 50 pools, 1,000 pods that kwok pretends to run: times, calls, memory (minutes)
	$(BIN)/python tests/benchmarks/operator_scale.py $(ARGS)

proto: $(STAMP) ## Generate the Python code of the wire contract
	$(BIN)/python tools/generate_proto.py

demo-model: $(STAMP) ## Train the demo model and its draft again from their seed
	$(BIN)/python deploy/demo-model/train.py --out deploy/demo-model/model --seed 0
	$(BIN)/python deploy/demo-model/train.py --out deploy/demo-model/draft --seed 0 --draft

constraints: $(STAMP) ## Write the exact versions of .venv to constraints.txt
	$(BIN)/python tools/write_constraints.py

clean: ## Remove what the other verbs made
	rm -rf build .venv .clients .schemas .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .kernel-cache .fault-campaign
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
