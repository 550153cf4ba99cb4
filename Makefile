# Everything a fresh machine needs: `make demo` or `make test`, each from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
VLLM   := .venv-vllm

.PHONY: demo test lint test-vllm clean

demo: $(READY)
	$(BIN)/peagle demo

test: $(READY) lint
	$(BIN)/pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-vllm: $(READY) $(VLLM)/.ready
	PEAGLE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/pytest -m vllm tests/vllm

# torch first and alone: a range asked for by another package would bring its largest build
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VLLM)/.ready: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' $<)"
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf $(VENV) $(VLLM)
