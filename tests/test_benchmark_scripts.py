"""The statistics of benchmarks by closed forms, and each benchmark at its smallest size; no number of seconds is
asserted."""

from __future__ import annotations

import json
import math
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hnclip.util.timing import Quartiles, Timing, time_ways

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import each other
measure, losses = import_module("measure"), import_module("losses")
MEGABYTE = 2**20


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_ratios_are_within_turns(values: list[float]) -> None:
    """A machine that gets slower changes no ratio; the ratio of medians would be another."""
    found = Quartiles.of(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    peer, own = Timing((1.0, 2.0, 4.0, 8.0, 16.0)), Timing((5.0, 2.0, 4.0, 32.0, 32.0))  # 5, 1, 1, 4, 2
    assert own.ratios(peer) == Quartiles(1.0, 2.0, 4.0)
    assert own.ratio(peer) == 2.0 != own.median / peer.median


@pytest.mark.parametrize(
    ("options", "count"),
    [({"turns": 2}, 2), ({"turns": 2, "seconds": 30.0}, 3), ({"turns": 4, "seconds": 1.0, "warmup": 0}, 4)],
)
def test_ways_take_turns(options: dict[str, Any], count: int) -> None:
    """By a clock that only the ways move, one second for each call before."""
    now, calls = [100.0], list[str]()

    def work(name: str) -> None:
        calls.append(name)
        now[0] += len(calls)

    found = time_ways({name: lambda name=name: work(name) for name in "ab"}, clock=lambda: now[0], **options)
    warmup = options.get("warmup", 1)
    assert calls == ["a", "b"] * (count + warmup)
    first = 1 + 2 * warmup
    assert found["a"] == Timing(tuple(float(first + 2 * turn) for turn in range(count)))
    assert found["b"] == Timing(tuple(float(first + 1 + 2 * turn) for turn in range(count)))


CHILD = """
import torch
def ones(megabytes):
    before = torch.ones(300 * 2**20, dtype=torch.uint8)  # what the preparation needs
    del before

    def work():
        for size in megabytes:
            torch.ones(size * 2**20, dtype=torch.uint8)  # freed before the next

    return work
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak until now cannot be forgotten")
def test_peak_memory_is_that_of_the_work_alone(tmp_path: Path) -> None:
    """Preparation does not count, and what is freed before the next allocation counts once."""
    (tmp_path / "some_work.py").write_text(CHILD)
    found = measure.peak_memory(tmp_path / "some_work.py", "ones", megabytes=[50, 200])
    assert 198 * MEGABYTE < found < 215 * MEGABYTE


def bench(capsys: pytest.CaptureFixture[str], call: str) -> list[dict[str, Any]]:
    """The rows of a benchmark; all ratios are finite."""
    name, *arguments = shlex.split(call)
    module = import_module(name)
    measure.main(module.Options, module.run, [*arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    ratios = [row[key]["median"] for row in rows for key in row if key[0] == "×" and row[key]]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
    return rows


@pytest.mark.parametrize("loss", losses.WAYS)
def test_all_ways_of_a_loss_have_the_same_gradients(loss: str, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = losses.make_inputs(loss, 3 if loss == "token" else 20, 8, "cpu")
    found = [make()(inputs) for make in losses.WAYS[loss].values()]
    for own in found:
        torch.testing.assert_close(own[:2], found[0][:2], rtol=1e-4, atol=1e-6)
    rows = bench(capsys, f"losses --pairs 3 --width 4 --turns 1 --seconds 0 --no-memory --losses {loss}")
    assert [row["way"] for row in rows] == [*losses.WAYS[loss]]


SMALL = "step --model small --micro-batch 2 --turns 1"


def test_a_step_of_each_way_and_of_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    step = import_module("step")
    ways = [way for way in step.PEERS if way not in ("compile", *step.METHODS)]
    rows = bench(capsys, f"{SMALL} --pairs-in-memory 20 --ways {shlex.join([step.PADDED, *ways])}")
    found = {row["way"]: row for row in rows}
    assert found["hnclip"]["tokens"] == pytest.approx(1)  # no pad is computed
    assert found["cached"]["Tflop"] > 1.2 * found["hnclip"]["Tflop"]  # one more forward pass
    rows = bench(capsys, f"{SMALL} --accumulate 1 --methods")
    assert [row["way"] for row in rows] == ["infonce", "hnclip", *step.METHODS]


def test_data_and_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Argsort ends at 60 pairs."""
    for number in range(3):
        Image.new("RGB", (40 + number, 32), (number, 100, 200)).save(tmp_path / f"{number}.png")
    assert len(bench(capsys, f"data cache {tmp_path} --size 32 --turns 1 --workers 2 --limit 2")) == 4
    assert all(row["same bytes"] for row in bench(capsys, "data preprocess --seconds 0 --sizes 320 240 40 30"))
    assert len(bench(capsys, "data encode --records 5 --layers 1 --width 64 --batch 2 --turns 1")) == 3
    both, alone = bench(capsys, "retrieval --pairs 50 70 --largest 60 --turns 1")
    assert ("argsort s" in both, "argsort s" in alone) == (True, False)


def test_search(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "search engines --rows 1500 --width 16 --queries 12")
    assert min(row["R@10"] for row in rows) > 0.8
    assert len(bench(capsys, "search indexing --images 6 --layers 1 --width 64 --batch 4 --turns 1 --threads 1")) == 3
    rows = bench(capsys, "search serving --rows 40 --clients 3 --seconds 1 --images 2")
    assert all(row["answers/s"] > 0 and row["failed"] == 0 for row in rows)


@pytest.mark.slow
def test_cold_search_imports_torch_only_without_a_text_tower(capsys: pytest.CaptureFixture[str]) -> None:
    torch_row, onnx = bench(capsys, "search cold --images 6 --turns 1")
    assert (torch_row["imports torch"], onnx["imports torch"], onnx["torch's hits"]) == (True, False, True)
