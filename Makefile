# The verbs of this repository; CI calls the same ones. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done
PACKAGES := proto kernels services/options services/scaling services/grammars services/telemetry services/streams \
            services/batches services/engine services/worker services/gateway services/client services/simulator \
            services/pagestream operator
PYTEST := $(BIN)/python -m pytest
# An index that offers PyTorch's CPU build, for machines without an NVIDIA GPU
# (see docs/getting-started.md, "Which torch").
TORCH_INDEX ?=
PYTEST_ARGS ?=
# What `make test` leaves out: what takes minutes, an API server, a GPU.
QUICK = not slow and not kube and not gpu
# The parts of `make deep`; PARTS="kernels faults" chooses some. CI runs "kube" and the cover of "faults".
PARTS ?= slow kube kernels emulated families published faults topologies properties model-check malformed schemas
# pytest's exit status where a choice of ours (PYTEST_ARGS) leaves a part without a test; without one that fails.
NOTHING_FOUND = $(if $(PYTEST_ARGS),5,none)
# Test files that run at once, more than there are cores, since many wait; 0 is one after the other.
WORKERS ?= 4
# The processes that tests start load this repository's modules compiled, from the second one on.
unexport PYTHONDONTWRITEBYTECODE
# Test files that run at once share the cores: one thread each, and none that spins while it waits for another's.
SHARED_CORES = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PARALLEL = $(SHARED_CORES) $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SEED ?= 1
KILLS ?= 1000
ROUNDS ?= 10
MINUTES ?= 60
# Where tests with the mark `kube` lie; none of the other folders is imported for them.
KUBE_TESTS = tests/operator tests/chart
# docker, buildah, or a command: see deploy/images/build.sh.
IMAGE_BUILDER ?= $(PAGESTREAM_IMAGE_BUILDER)

.PHONY: help setup run test test-fast deep $(addprefix deep-,slow kube kernels emulated families published faults topologies \
	properties model-check malformed schemas) clients browser-test check bench path-cost paths mutants faults faults-campaign hostile gpu images cluster-test \
	operator-scale kube-test soak proto demo-model kernels kernel-tables constraints clean

help: ## List the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## Make .venv from constraints.txt, compile the C++ kernels for this processor

$(STAMP): constraints.txt pyproject.toml $(addsuffix /pyproject.toml,$(PACKAGES)) tools/setup.sh
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/setup.sh $(PACKAGES)
	@touch $@

run: $(STAMP) ## Serve the demo model and show a streamed answer (Ctrl-C ends it)
	@$(BIN)/pagestream serve --greet "Tell me a story about the lighthouse." $(ARGS)

test: $(STAMP) ## Run the tests (8 minutes on two cores)
	$(PARALLEL) -m '$(QUICK)' $(PYTEST_ARGS)

test-fast: WORKERS = 2
test-fast: $(STAMP) ## Run at each change: no process is started, nothing is compiled (a minute)
	$(PARALLEL) -m '$(QUICK) and not builds and not served' $(PYTEST_ARGS)

deep: $(addprefix deep-,$(PARTS)) ## All that CI has no time for (hours; PARTS="kernels topologies" chooses; -k goes on)

deep-slow: $(STAMP)
	$(PARALLEL) -m 'slow and not kube and not gpu' $(PYTEST_ARGS) || [ $$? = $(NOTHING_FOUND) ]

deep-kube: $(STAMP)
	$(PARALLEL) -m 'kube' $(PYTEST_ARGS) $(KUBE_TESTS)

kube-test: $(STAMP) ## The operator and the chart against a real API server (4 minutes on two cores; KUBEBUILDER_ASSETS)
	$(PARALLEL) -m 'kube and not slow' $(PYTEST_ARGS) $(KUBE_TESTS)

soak: $(STAMP) ## Two operators behind failing links, servers that are killed: MINUTES=60 SEED=1 (KUBEBUILDER_ASSETS, toxiproxy)
	$(BIN)/python tests/campaigns/operator_soak.py --minutes $(MINUTES) --seed $(SEED) $(ARGS)

deep-kernels: kernels

deep-emulated: $(STAMP)
	$(BIN)/python tests/campaigns/emulated.py $(ARGS)

deep-families: $(STAMP)
	$(BIN)/python tests/campaigns/families.py --write docs/models.md $(ARGS)

deep-published: $(STAMP)
	$(BIN)/python tests/campaigns/published.py --write docs/models.md $(ARGS)

deep-faults: faults

deep-topologies: $(STAMP)
	$(PARALLEL) -m 'not gpu' tests/streams $(PYTEST_ARGS)

deep-properties: $(STAMP)
	for round in $$(seq $(ROUNDS)); do env -u CI $(PYTEST) -q -m "hypothesis and not gpu" --hypothesis-profile deep $(PYTEST_ARGS) || exit 1; done

deep-model-check: $(STAMP)
	$(PYTEST) -m 'not gpu' tests/streams/test_model_check.py $(PYTEST_ARGS)

deep-malformed: $(STAMP)
	$(BIN)/python tests/campaigns/malformed.py $(ARGS)

deep-schemas: $(STAMP)
	PYTHON="$(PYTHON)" tests/schemas/prepare.sh .schemas
	$(BIN)/python tests/campaigns/schemas.py $(ARGS)

clients: $(STAMP) ## Clients that others wrote, for Python and JavaScript, against the demo model (needs npm, 1.5 GB; 3 minutes)
	PYTHON="$(PYTHON)" tests/clients/prepare.sh .clients
	$(PYTEST) tests/clients $(PYTEST_ARGS)

browser-test: $(STAMP) ## The page and /docs in Chromium, while its buttons kill processes (needs chromium and chromium-driver)
	$(PYTEST) tests/browser $(PYTEST_ARGS)

check: $(STAMP) ## Lint, format, types, layer order, widths of Markdown and YAML, pages that are written from the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/rumdl check --quiet --no-cache .
	$(BIN)/yamllint --strict .
	for page in options fields outputs sizing vllm_flags reference telemetry; do \
	  $(BIN)/python tools/write_$$page.py --check || { echo "run: .venv/bin/python tools/write_$$page.py" >&2; exit 1; }; \
	done

bench: $(STAMP) ## Print the benchmarks' ratios (minutes; a quiet machine is best)
	$(BIN)/python tests/benchmarks/run.py $(ARGS)

path-cost: $(STAMP) ## What a token costs in each stage from the engine's step to the client (10 minutes; ARGS="--streams 64")
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/path_cost.py $(ARGS)

faults: $(STAMP) ## Kill, stop, cut off and fill every part at every moment: 189 cells, and a table (40 minutes; ARGS=--cover: 4)
	$(BIN)/python tests/campaigns/fault_matrix.py $(ARGS)

faults-campaign: $(STAMP) ## Random kills under continuous load: SEED=1 KILLS=1000; goes on after an interruption
	$(BIN)/python tests/campaigns/faults.py --seed $(SEED) --kills $(KILLS) $(ARGS)

hostile: $(STAMP) ## Valid requests at their fields' limits beside a greedy stream (hours; ARGS="--requests 20000 --seed 1")
	$(BIN)/python tests/campaigns/hostile.py $(ARGS)

images: ## Build the images of gateway, operator and engine, each with its list of contents; CUDA=1 for GPUs, too
	PAGESTREAM_IMAGE_BUILDER="$(IMAGE_BUILDER)" TORCH_INDEX="$(TORCH_INDEX)" deploy/images/build.sh $(if $(filter 1,$(CUDA)),--cuda) $(ARGS)

cluster-test: $(STAMP) ## Install the chart on a real cluster and disturb it (KUBECONFIG, PAGESTREAM_IMAGE_LOADER; 25 minutes)
	PAGESTREAM_IMAGE_BUILDER="$(IMAGE_BUILDER)" TORCH_INDEX="$(TORCH_INDEX)" tests/cluster/prepare.sh
	$(PYTEST) tests/cluster $(PYTEST_ARGS)

kernels: $(STAMP) ## Every kernel in every shape, interpreted and compiled ahead of time (long; cached by source)
	$(BIN)/python tests/campaigns/kernel_cover.py $(ARGS)

kernel-tables: $(STAMP) ## Choose the attention kernels' tile sizes by chip: builds, and times where there is a GPU (minutes)
	$(BIN)/python -m pagestream_kernels.tuning $(ARGS)

gpu: $(STAMP) ## On one GPU: tests/gpu, then all figures, to docs/benchmarks/gpu.md (10 minutes; ARGS=--dry-run without)
	$(BIN)/python tests/benchmarks/gpu/run.py $(ARGS)

operator-scale: $(STAMP) ## One operator, 50 pools, 1,000 pods that kwok pretends to run: times, calls, memory (minutes)
	$(BIN)/python tests/benchmarks/operator_scale.py $(ARGS)

paths: $(STAMP) ## Files and functions that one decode step and one chat cross, to docs/architecture.md (a minute)
	$(BIN)/python tools/paths.py $(ARGS)

mutants: $(STAMP) ## Share of drawn mutants that `make test` catches (hours; run again, it goes on; ARGS="--checkout DIR")
	$(BIN)/python tests/campaigns/mutants.py map --state .mutants --select '$(QUICK)' $(ARGS)
	$(BIN)/python tests/campaigns/mutants.py run --state .mutants $(ARGS)
	$(BIN)/python tests/campaigns/mutants.py report --state .mutants

proto: $(STAMP) ## Generate the Python code of the wire contract
	$(BIN)/python tools/generate_proto.py

demo-model: $(STAMP) ## Train the demo model and its draft again from their seed
	$(BIN)/python deploy/demo-model/train.py --out deploy/demo-model/model --seed 0
	$(BIN)/python deploy/demo-model/train.py --out deploy/demo-model/draft --seed 0 --draft

constraints: $(STAMP) ## Write the exact versions of .venv to constraints.txt
	$(BIN)/python tools/write_constraints.py

clean: ## Remove what the other verbs made
	rm -rf build .venv .clients .schemas .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .fault-campaign .mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
