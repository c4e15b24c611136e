# make demo      grows a network that is too small for its task, live, beside a twin that never grows, in about a minute
# make check     format, lint, types, fast tests: the development loop
# make lint      the same without tests
# make test      all tests but those that need extras which .venv does not have at first
# make test-all  these too: installs every extra into .venv and runs the tests with Lightning, transformers, peft, pyarrow, DuckDB, wandb, ONNX,
#                sb3-contrib, gromo and MkDocs after `make test`
# make faults    kills, disturbs and damages runs of all trainers thousands of times, and writes the table of docs/faults.md; some minutes
# make release-check  installs the wheel in empty environments outside the checkout and uses it there: every Python that is here, and the
#                lowest declared versions
# make docs      builds the documentation into build/docs, without network access; a broken link is an error
# make clean     removes what tools leave behind, but neither .venv nor runs/
#
# All of them make .venv first where it is missing, with the versions in constraints.txt. Another Python: make demo PYTHON=python3.12;
# another number of test processes: make test JOBS=2

# Keep compiled files between runs, also where the environment says otherwise: collecting the tests takes twice as long without them.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_ALL := .venv/.installed-all
INSTALLED_DOCS := .venv/.installed-docs
EXTRAS := numba,gym,tensorboard,league,dashboard,plot,dev
ALL_EXTRAS := $(EXTRAS),wandb,data,query,lightning,transformers,bench,interop,docs

# Python compiles what is imported when it is first imported. Compiling everything at once takes half of the time of the installation.
PIP := -qq --disable-pip-version-check --no-compile

DEMO = --task digits --host starved --controller heuristic --twin --seed 0 --epochs 40 --learning-rate 0.01 --schedule cosine --threads 1 --device cpu

.PHONY: demo check lint test test-all faults release-check docs clean

demo: $(INSTALLED)
	@echo "Handwritten digits, and a convolutional network that is too small for them. It grows where that pays; its twin never does."
	@$(BIN)/esper grow $(DEMO)
	@echo "One seed is one draw; what twenty of them say is in README.md."

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

check: lint
	@$(BIN)/pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile quick -m "not slow and not extra"

test: $(INSTALLED)
	@$(BIN)/pytest -q -n $(JOBS) --dist worksteal -m "not extra"

# Models are built from configurations in the tests; nothing is downloaded. Here, a package that is missing is a failure.
test-all: test $(INSTALLED_ALL)
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -q -n $(JOBS) --dist worksteal --extras $$(grep -rl --include='test_*.py' mark.extra tests)

faults: $(INSTALLED)
	@$(BIN)/python -m tests.faults --jobs $(JOBS)

release-check: $(INSTALLED)
	@$(BIN)/python -m tests.release_check --demo "$(DEMO)"

docs: $(INSTALLED_DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Installed again only when the requirements have changed.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON) here; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "esper needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name one with: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing esper and what it needs into .venv; the first time this takes a few minutes"
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(INSTALLED_ALL): $(INSTALLED)
	@echo "installing every extra into .venv; the first time this takes a few minutes"
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[$(ALL_EXTRAS)]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	@echo "installing MkDocs into .venv"
	@$(BIN)/python -m pip install $(PIP) -c constraints.txt -e '.[$(EXTRAS),docs]'
	@touch $@
