# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# With := these count from the command line only (make serve HOST=::1), not from the environment: csh and conda set HOST.
PORT := 8000
HOST := 127.0.0.1
MODEL := smollm2
BACKEND := cpu
export PYTHON
BIN = .venv/bin
SETUP = $(if $(filter cuda,$(BACKEND)),setup-gpu kernels,setup)

.PHONY: help demo serve test test-full test-hosts test-gpu kernels bench bench-gpu load-gpu soak lint setup setup-dev setup-gpu setup-bench bundle ansible lint-ansible lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(SETUP) ## start the server with a real small model, ask it something, print answers and speed, stop
	@$(BIN)/appliance demo --model $(MODEL) --backend $(BACKEND)

serve: $(SETUP) ## keep the server in the foreground (PORT=8000 HOST=127.0.0.1 MODEL=smollm2 BACKEND=cpu)
	@exec $(BIN)/appliance serve --model $(MODEL) --backend $(BACKEND) --host $(HOST) --port $(PORT) $(if $(ARGS),-- $(ARGS))

test: setup-dev ## all tests, reduced counts (what CI runs); makes the test hosts where root, and says what is skipped
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup

test-full: setup-dev ## the issues' full counts (one and a half to two hours on two cores)
	@APPLIANCE_FULL=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup --timeout 1800

test-hosts: setup-dev ## the tests in the namespace box and the qemu machine (a skip for want of one is a failure)
	@APPLIANCE_REQUIRE_HOSTS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "box or vm"

test-gpu: setup-gpu kernels ## the tests that need an NVIDIA GPU (a skip for want of one is a failure)
	@APPLIANCE_REQUIRE_GPU=1 $(BIN)/python -m pytest -q -m gpu --timeout 1800 tests

kernels: setup ## compile the CUDA kernels into kernels/fatbin (needs nvcc 13.0, no GPU)
	@$(BIN)/python -m kernels.build

bench: setup-bench ## our figures beside the peers', in one run
	@$(BIN)/python -m tests.bench

bench-gpu: setup-gpu setup-bench kernels ## the CUDA engine beside compiled transformers; writes tests/bench/results
	@$(BIN)/python -m tests.bench.gpu --peer-python .venv-bench/bin/python

load-gpu: setup-gpu kernels ## seven minutes of mixed load on a GPU (MODEL_DIR=..., LOAD="--seconds 420 --clients 64")
	@$(BIN)/python -m tests.bench.load --backend cuda --model $(MODEL_DIR) $(LOAD)

soak: setup-dev ## 20,000 small requests incl. errors, aborts, disconnects
	@$(BIN)/python -m tests.bench.soak

lint: setup-dev ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# VERSION=1.2.3+site4: another version than the tree's; GPU=1: with PyCUDA and the kernels; DEBIAN_SOURCES=FILE: apt lines
# of Debian 12, where this machine has none.
bundle: setup $(if $(GPU),setup-gpu kernels) ## what ansible installs: dist/appliance-VERSION-debian12-x86_64.tar (GPU=1 for hosts with GPUs)
	@$(BIN)/python ansible/bundle $(if $(GPU),--gpu) $(if $(VERSION),--version $(VERSION)) $(if $(DEBIAN_SOURCES),--debian-sources $(DEBIAN_SOURCES))

ansible: ## .venv-ansible: ansible-playbook with our collection (appliance.host.install, upgrade, drain, verify, uninstall)
	@.ci/setup-ansible

lint-ansible: ## ansible-lint (production profile), yamllint
	@.ci/setup-ansible lint
	@cd ansible && PATH="$(CURDIR)/.venv-ansible/bin:$$PATH" ansible-lint --offline -q && "$(CURDIR)/.venv-ansible/bin/yamllint" --strict .

setup: ## the venv for demo and serve
	@.ci/setup run

setup-dev: ## the venv for the tests
	@.ci/setup dev

setup-gpu: ## the venv for BACKEND=cuda (compiles PyCUDA once: needs nvcc and g++)
	@.ci/setup gpu

setup-bench:
	@.ci/setup bench

lock: ## write the locked requirements anew (needs uv)
	@.ci/lock

clean: ## everything that was built or installed here (models stay)
	rm -rf .venv .venv-bench .venv-ansible build dist ansible/.ansible kernels/fatbin kernels/fatbin-racecheck tests/gpu/probe/fatbin *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .setup.lock
	find . -name __pycache__ -prune -exec rm -rf {} + ; find engine kernels -name '*.so' -delete
