# Every target is one line that calls tools/. `make help` lists them.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done)
PY := .venv/bin/python
GIVEN_PYTHON = $(or $(shell command -v "$(PYTHON)"),$(error PYTHON=$(PYTHON): no such program; install Python 3.11 or 3.12, or name it: PYTHON=python3.11))
SERVE_FLAGS ?= --tp 8
GIVEN_MODEL = $(or $(MODEL),$(error set MODEL to a folder or a Hugging Face name: make $(MAKECMDGOALS) MODEL=deepseek-ai/DeepSeek-V2-Lite-Chat SERVE_FLAGS="--tp 1 --trust-remote-code"))
$(if $(filter-out 0,$(KERNELS)),$(error KERNELS=$(KERNELS): give KERNELS=0 to leave the CUDA kernels out, or nothing))
PORT_FLAG = $(if $(PORT),--port $(PORT))
.DEFAULT_GOAL := help
.PHONY: help port model gpu setup fetch apply-patches export-patches wheel install serve-tiny demo serve test test-all check rebase drift kernels lint format soak bench bench-e2e gpu-report uninstall clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18
port: # this and the next two are judged before anything is downloaded or built
	@$(if $(PORT),$(GIVEN_PYTHON) tools/port.py "$(PORT)")
model:
	@$(if $(GIVEN_MODEL),:)
gpu:
	@$(GIVEN_PYTHON) tools/gpu.py
setup: ## make .venv with the tools and the CPU requirements
	@$(GIVEN_PYTHON) tools/setup.py
fetch: setup ## download the pinned upstream wheel and verify its sha256
	@$(PY) -m tools.fork fetch
apply-patches: setup ## bring build/checkout to the pinned release plus patches/
	@$(PY) -m tools.fork apply
export-patches: setup ## write the commits of build/checkout to patches/ and upstream.lock
	@$(PY) -m tools.fork export
wheel: setup ## build the patched wheel with CUDA kernels into build/dist
	@$(PY) -m tools.fork build $(WHEEL_FLAGS)
install: setup ## build the wheel and install it into .venv; kernels where there is nvcc, none with KERNELS=0 (give it every time)
	@$(PY) -m tools.fork install $(if $(filter 0,$(KERNELS)),--no-kernels,--kernels-if-nvcc)
serve-tiny: port install ## [PORT=...] serve the tiny model on the CPU until interrupted
	@$(PY) -m tools.demo --serve $(PORT_FLAG)
demo: port install ## [KERNELS=0] [PORT=...] serve the tiny model on the CPU, ask it something, show which backend answered
	@$(PY) -m tools.demo $(PORT_FLAG)
serve: port model gpu setup ## MODEL=... [SERVE_FLAGS="--tp 8"] [PORT=30000] serve a model on this machine's GPUs
	@$(PY) -m tools.require_gpu && $(PY) -m tools.fork install --all-requirements && $(PY) -m sglang.launch_server --attention-backend sm120_mla --model-path $(GIVEN_MODEL) $(PORT_FLAG) $(SERVE_FLAGS)
test: install ## run the tests that this machine can run, but the slow ones
	@$(PY) -m pytest tests $(TEST_FLAGS)
test-all: install ## the long server tests too (DDTREE and compaction under load)
	@$(PY) -m pytest tests -m "slow or not slow" $(TEST_FLAGS)
check: setup ## check lock, patches, anchors, trailers, sizes and index
	@$(PY) -m tools.fork check
rebase: setup ## TO=... carry the patches to another upstream release
	@$(PY) -m tools.fork rebase $(TO)
drift: setup ## try the series on the newest release (or VERSION=...) and report, moving nothing
	@$(PY) -m tools.fork drift $(VERSION)
kernels: setup ## compile the CUDA kernels
	@$(PY) -m tools.kernels build
lint: setup ## ruff over Python, mypy over tools and overlay, clang-format over kernels
	@$(PY) -m tools.lint
format: setup ## put the format of Python, C++ and CUDA right
	@$(PY) -m tools.lint --fix
soak: install ## [SOAK_FLAGS="--minutes 3"] 20 minutes of random clients, good and bad, against the CPU server
	@$(PY) -m tools.soak $(SOAK_FLAGS)
bench-e2e: model gpu setup ## MODEL=... [DRAFT=...] stock against ours, served on this machine's GPUs; goes on where it was
	@$(PY) -m tools.require_gpu && $(PY) -m tools.fork install --all-requirements && $(PY) -m tools.bench_e2e --model $(GIVEN_MODEL) --draft "$(DRAFT)" --serve-flags="$(SERVE_FLAGS)" $(E2E_FLAGS)
bench: gpu setup ## time the kernels on this machine's GPU
	@$(PY) -m tools.kernels bench
gpu-report: gpu setup ## check kernels and GPU, write a report to send
	@$(PY) -m tools.kernels gpu-report
uninstall: ## remove the patched wheel from .venv
	@if $(PY) -m pip show --quiet sglang 2>/dev/null; then $(PY) -m pip uninstall -y sglang; else echo "nothing to uninstall: no sglang in .venv"; fi
clean: ## empty build/ (refused while build/checkout holds work of yours)
	@if test -e $(PY); then $(PY) -m tools.fork clean; elif test -e build; then echo "error: build/ is left as it is: to look there for work of yours takes .venv (make setup)" >&2; exit 1; fi
