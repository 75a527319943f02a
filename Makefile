# Two commands from a fresh clone: `make demo` and `make test`. Each sets everything up by itself.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all results check lint types format clean

demo: $(READY)
	$(BIN)/hnclip demo

# The tests use single-threaded workers: two cores serve two of them better than two threads in each. Whoever is done takes
# over from the other, so that neither waits at the end. `make test` leaves out a few long ones that are marked as slow.
test: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# The slow tests as well, one of them with a local Ray.
test-all: $(VENV)/.ray
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Every study on the embedded benchmark, by two single-threaded processes, and docs/results.md of it. If a row fails, so
# does the command. The same command continues: what was done is not done again.
results: STUDY := OMP_NUM_THREADS=1 $(BIN)/hnclip study all --recipe results --threads 1
results: $(READY)
	$(STUDY) --shard 2/2 --quiet & second=$$!; $(STUDY) --shard 1/2; first=$$?; wait $$second && exit $$first
	$(STUDY) --docs docs

check: lint types test-all

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch first and by its exact version: a plain or ranged torch would bring gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
# Only files of it are used, its tokenizer and its loss: imported whole it needs torchvision, which breaks a CPU torch.
	$(BIN)/python -m pip install --quiet --no-deps open_clip_torch==3.3.0
# On all cores, which pip does on one. Some packages bring templates that are no Python: those need not compile.
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
	touch $(READY)

$(VENV)/.ray: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[scale]'
	touch $(VENV)/.ray

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
