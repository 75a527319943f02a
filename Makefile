# Two commands from a fresh clone: `make demo` and `make test`. Each sets up what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# On all cores, which pip does on one. Some packages bring templates that are no Python: those need not compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all results check lint types docs format clean

demo: $(CORE)
	$(BIN)/hnclip demo

# The tests use single-threaded workers: two cores serve two of them better than two threads in each. A worker
# that is done takes tests over from the other. `make test` leaves out a few long ones that are marked as slow.
test: $(DEV)
	$(PYTEST) -m "not slow"

# The slow tests as well, some of them with a local Ray and a server of Milvus.
test-all: $(VENV)/.ray
	$(PYTEST)

# Every study on the embedded benchmark with three seeds, by two single-threaded processes, and docs/results.md of it. If
# a row fails, so does the command. The same command continues: what was done is not done again.
results: STUDY := OMP_NUM_THREADS=1 $(BIN)/hnclip study all --recipe results --seeds 42 1337 3407 --threads 1
results: $(DEV)
	$(STUDY) --shard 2/2 --quiet & second=$$!; $(STUDY) --shard 1/2; first=$$?; wait $$second && exit $$first
	$(STUDY) --docs docs

check: lint types test-all

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV)
	$(BIN)/mypy

docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and by its exact version: a plain or ranged torch would bring gigabytes of CUDA.
$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch==2.13.0
	$(INSTALL) --editable .
	$(COMPILE)
	touch $(CORE)

# Of open_clip only files are used, its tokenizer and its loss: imported whole it needs torchvision, which breaks a CPU
# torch.
$(DEV): $(CORE)
	$(INSTALL) --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps open_clip_torch==3.3.0
	$(COMPILE)
	touch $(DEV)

$(VENV)/.ray: $(DEV)
	$(INSTALL) --editable '.[scale]'
	touch $(VENV)/.ray

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
