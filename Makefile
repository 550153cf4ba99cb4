# Everything a fresh machine needs: `make demo` or `make test`, each from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm
PIP    := install --quiet --disable-pip-version-check

# one line where PYTHON is too old; pip would first download, and then blame versions of torch
define check_python
import sys
if sys.version_info < (3, 11):
    sys.exit("peagle needs Python 3.11 or newer; $(PYTHON) is %d.%d: name one, as in make PYTHON=python3.12" % sys.version_info[:2])
endef
export check_python

# $(call step,WHAT,COMMAND): say what begins, and then how long it took
define step
@printf '  %s ... ' '$(1)' && begun=$$(date +%s) && $(2) && echo "$$(($$(date +%s) - begun)) s"
endef

.PHONY: demo test nightly quick lint figures reports wheel tagged docs test-vllm test-lowest test-newest clean

demo: $(READY)
	@$(BIN)/peagle demo

test: $(READY) lint
	$(BIN)/pytest -n 2 --durations=30

# what `make test` leaves out: the other combinations of sweeps, and what takes longest
nightly: $(READY)
	$(BIN)/pytest -n 2 -m 'nightly and not vllm' --durations=30

# what most changes can break: no server, no processes, no interpreted kernels
QUICK := tests/test_*.py $(addprefix tests/,dialects drafters engine invariants models ops regenerate train)

quick: $(READY)
	$(BIN)/pytest -n 2 -m 'not slow and not vllm and not nightly' --ignore=tests/ops/triton $(QUICK)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the tables of README and docs, made from benchmarks/results
figures: $(READY)
	$(BIN)/python benchmarks/figures.py

# a page with plots of each result
reports: $(READY)
	$(BIN)/python benchmarks/draw.py --out build/reports

# one wheel, with the bundled pair, in dist/
wheel: $(READY)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

# whether TAG, of the environment, is the version's
tagged:
	@test "$$TAG" = "v$(VERSION)" || { echo "the tag $$TAG is not v$(VERSION), the version of pyproject.toml"; exit 1; }

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

# the site of README and docs, in build/site; a link that leads nowhere ends it
docs: $(READY) .venv-docs/.ready
	$(BIN)/python docs/website.py build/pages
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

# what `make quick` tests, with the lowest versions that pyproject.toml allows, and with the newest there are
test-lowest test-newest: test-%: .venv-%/.ready
	.venv-$*/bin/pytest -n 2 -m 'not slow and not vllm and not nightly' --ignore=tests/ops/triton $(QUICK)

test-vllm: $(READY) $(VLLM)/.ready
	PEAGLE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/pytest -m vllm tests/vllm

# torch first and alone: a range asked for by another package would bring its largest build
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$check_python"
	@echo "setting up $(VENV), 2.7 GB on disk (more where torch comes with CUDA):"
	$(call step,Python environment,$(PYTHON) -m venv $(VENV))
	$(call step,torch (0.8 GB),$(BIN)/pip $(PIP) "$$(grep '^torch==' constraints.txt)")
	$(call step,peagle and what it needs (1.9 GB),$(BIN)/pip $(PIP) --constraint constraints.txt --editable '.[dev]')
	@touch $@

$(VLLM)/.ready: tests/vllm/requirements.txt
	@echo "setting up $(VLLM) for tests against vLLM:"
	$(call step,Python environment,$(PYTHON) -m venv $(VLLM))
	$(call step,torch,$(VLLM)/bin/pip $(PIP) "$$(grep '^torch==' $<)")
	$(call step,vLLM and what it needs,$(VLLM)/bin/pip $(PIP) --requirement $<)
	$(call step,the wheel for GPUs (0.3 GB),$(VLLM)/bin/pip download --quiet --no-deps --dest $(VLLM)/wheels vllm==0.33.0)
	@$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

.venv-lowest/.ready: pyproject.toml
	@echo "setting up .venv-lowest:"
	$(call step,Python environment,$(PYTHON) -m venv .venv-lowest && .venv-lowest/bin/pip $(PIP) uv==0.13.9)
	$(call step,lowest versions,.venv-lowest/bin/uv pip compile --quiet --resolution lowest-direct $(EXTRAS) pyproject.toml --output-file .venv-lowest/versions.txt)
	$(call step,peagle and what it needs,.venv-lowest/bin/uv pip install --quiet --python .venv-lowest --constraint .venv-lowest/versions.txt --editable '.[dev]')
	@touch $@

EXTRAS := $(addprefix --extra ,chat data report serve structured train)

.venv-newest/.ready: pyproject.toml
	@echo "setting up .venv-newest:"
	$(call step,Python environment,$(PYTHON) -m venv .venv-newest)
	$(call step,peagle and what it needs,.venv-newest/bin/pip $(PIP) --editable '.[dev]')
	@touch $@

# apart from .venv, which older releases of Python 3.11 can make: these packages ask for 3.11.5
.venv-docs/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv-docs:"
	$(call step,Python environment,$(PYTHON) -m venv .venv-docs)
	$(call step,what makes the site,.venv-docs/bin/pip $(PIP) --constraint constraints.txt $(DOCS))
	@touch $@

# the extra `docs`, without peagle itself
DOCS := mkdocs mkdocs-material

clean:
	rm -rf $(VENV) $(VLLM) .venv-docs .venv-lowest .venv-newest build dist
