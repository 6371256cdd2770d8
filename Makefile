# The commands of the project; `make help` lists them.
# Variables are exported and read from the environment, never pasted into a shell line.
SHELL := /bin/sh
.DEFAULT_GOAL := help
export EXP ATTENTION ARGS IMAGE TEXT INPUT CSV CKPT OUT INVERT FIGURE OVER SEEDS MATCH RUNS

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
RUN := $(BIN)/python -m experiments.make

.PHONY: help setup train classify translate forecast heads export sweep compare sync test test-slow golden check format bench torture reproduce docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make train EXP=vit ATTENTION=Local ARGS="--model.attention.window=5 --trainer.max_epochs=3"'

setup: $(READY) ## make .venv and install everything into it (once; also done by each target that needs it)

$(READY): pyproject.toml
	@echo 'installing into .venv, a few minutes the first time'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[experiments,dev,bench]'
	@if [ -e .git ]; then $(BIN)/pre-commit install >/dev/null || echo 'note: commit hooks were not installed'; fi
	@touch $@

train: $(READY) ## train and test: EXP=preset [ATTENTION=name] [ARGS="--option=value"]; without EXP lists the presets
	@$(RUN) train

classify: $(READY) ## what is in a picture: IMAGE=file [CKPT=checkpoint] [INVERT=true] [OUT=attention.png]
	@$(RUN) classify

translate: $(READY) ## a text or a file: TEXT="..." or INPUT=file [OUT=file] [CKPT=checkpoint] [ARGS="--n_best=3"]
	@$(RUN) translate

forecast: $(READY) ## what follows in a table: CSV=file [CKPT=checkpoint] [OUT=file.csv] [ARGS="--backtest=true"]
	@$(RUN) forecast

heads: $(READY) ## how the heads of a model are doing: [CKPT=checkpoint] [OUT=heads.png] [ARGS="--data=PATH"]
	@$(RUN) heads

export: $(READY) ## a model as .pt2 and .onnx: [CKPT=checkpoint] [OUT=folder]
	@$(RUN) export

sweep: $(READY) ## every mechanism that fits a preset: EXP=preset [OVER=attention] [SEEDS=3] [MATCH=params] [ARGS=...]
	@$(RUN) sweep

compare: $(READY) ## a table of the runs and runs/compare.html: [RUNS='runs/vit/*'] [OUT=page.html]
	@$(RUN) compare

sync: $(READY) ## send to W&B what was logged offline: [ARGS="--dry_run"]
	@$(RUN) sync

test: $(READY) ## the tests, five to eight minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY) ## the tests that take longer
	$(BIN)/python -m pytest -m slow

golden: $(READY) ## measure the first losses of each experiment anew (read the difference before you commit it)
	$(BIN)/python -m pytest tests/golden -m "slow or not slow" --rewrite-golden

check: $(READY) ## format, lint, spelling, types, generated docs, who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m attnzoo --check docs/catalogue.md
	$(BIN)/python docs/build.py --check
	$(BIN)/python -m pytest tests/test_architecture.py

format: $(READY) ## put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) ## time and memory of every mechanism by length: [ARGS="--only=Local,Softmax --lengths=512,4096"]
	@FIGURE=speed $(BIN)/python -m benchmarks

torture: $(READY) ## runs killed, cut off and starved for 20 minutes: [ARGS="--kills=10 --rounds=1"]; see docs/reliability.md
	@FIGURE=torture $(BIN)/python -m benchmarks

reproduce: $(READY) ## measure a figure of docs/RESULTS.md: FIGURE=name; goes on where it was stopped
	@$(BIN)/python -m benchmarks

docs: $(READY) ## generate the tables of mechanisms and laws, and a page with pictures for each mechanism
	$(BIN)/python -m attnzoo --write docs/catalogue.md
	$(BIN)/python -m attnzoo --laws --write docs/laws.md
	$(BIN)/python docs/build.py

clean: ## remove caches (not .venv, not runs)
	rm -rf .pytest_cache .ruff_cache .mypy_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
