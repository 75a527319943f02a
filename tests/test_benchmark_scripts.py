"""The statistics of benchmarks by closed forms, and each benchmark at its smallest size; no number of seconds is
asserted."""

from __future__ import annotations

import contextlib
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

from hnclip.util.timing import Quartiles, Timing, machine, threads, time_ways

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the scripts import each other
measure, losses = import_module("measure"), import_module("losses")
MEGABYTE = 2**20


def test_ratios_are_within_turns() -> None:
    """A machine that gets slower changes no ratio; the ratio of medians would be another."""
    peer = Timing((1.0, 2.0, 4.0, 8.0, 16.0))
    assert Timing(tuple(3 * seconds for seconds in peer.seconds)).ratios(peer) == Quartiles(3.0, 3.0, 3.0)
    own = Timing((5.0, 2.0, 4.0, 32.0, 32.0))  # 5, 1, 1, 4, 2
    assert own.ratios(peer) == Quartiles(1.0, 2.0, 4.0)
    assert own.ratio(peer) == 2.0 != own.median / peer.median
    with pytest.raises(ValueError):
        own.ratio(Timing((1.0,)))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quartiles_lie_among_the_values(values: list[float]) -> None:
    found = Quartiles.of(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"turns": 2}, 2), ({"turns": 2, "seconds": 30.0}, 3), ({"turns": 4, "seconds": 1.0, "warmup": 0}, 4)],
)
def test_ways_take_turns(options: dict[str, Any], count: int) -> None:
    """By a clock that only the ways move, one second for each call before."""
    now, calls = [100.0], list[str]()

    def work(name: str) -> None:
        calls.append(name)
        now[0] += len([call for call in calls if call != "prepare"])

    ways = {name: lambda name=name: work(name) for name in "ab"}
    found = time_ways(ways, clock=lambda: now[0], prepare=lambda: calls.append("prepare"), **options)
    warmup = options.get("warmup", 1)
    assert calls == ["prepare", "a", "b"] * (count + warmup)
    first = 1 + 2 * warmup
    assert found["a"] == Timing(tuple(float(first + 2 * turn) for turn in range(count)))
    assert found["b"] == Timing(tuple(float(first + 1 + 2 * turn) for turn in range(count)))
    with pytest.raises(ValueError, match="turns"):
        time_ways(ways, turns=0)


def test_threads_are_restored_after_an_error() -> None:
    before, inside = torch.get_num_threads(), None
    with contextlib.suppress(KeyError), threads(before + 1):
        inside = machine()["threads"]
        raise KeyError
    assert (inside, torch.get_num_threads()) == (before + 1, before)


CHILD = """
import torch
def ones(megabytes):
    before = torch.ones(300 * 2**20, dtype=torch.uint8)  # what the preparation needs
    del before
    kept = torch.ones(64 * 2**20, dtype=torch.uint8)

    def work():
        for size in megabytes:
            torch.ones(size * 2**20, dtype=torch.uint8)  # freed before the next
        return kept

    return work
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak until now cannot be forgotten")
def test_peak_memory_is_that_of_the_work_alone(tmp_path: Path) -> None:
    """Neither inputs nor preparation count, and what is freed before the next allocation counts once."""
    (tmp_path / "some_work.py").write_text(CHILD)
    found = measure.peak_memory(tmp_path / "some_work.py", "ones", megabytes=[50, 200])
    assert 198 * MEGABYTE < found < 215 * MEGABYTE
    with pytest.raises(RuntimeError, match="TypeError"):
        measure.peak_memory(tmp_path / "some_work.py", "ones", megabytes=1)


def test_a_report_as_text_and_as_json() -> None:
    rows = [
        {"cups": 1200, "time": Timing((1.0, 2.0, 3.0)), "ratio": Quartiles(0.5, 1.25, 1500.0)},
        {"cups": 3, "time": math.nan, "ratio": 0.12345},
    ]
    report = measure.Report("tea", rows, {"threads": 2}, ["a note"])
    text = report.to_text()
    assert all(cell in text for cell in ("threads 2", "1,200", "2 ±25%", "1.25 (0.5–1,500)", "–", "0.123", "a note"))
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["benchmark"] == "tea"
    assert found["rows"][0]["time"] == {"median": 2.0, "seconds": [1.0, 2.0, 3.0]}
    assert found["rows"][0]["ratio"] == {"low": 0.5, "median": 1.25, "high": 1500.0}
    assert found["rows"][1]["time"] is None


@pytest.mark.parametrize("loss", losses.WAYS)
def test_all_ways_of_a_loss_have_the_same_gradients(loss: str) -> None:
    inputs = losses.make_inputs(loss, 3 if loss == "token" else 20, 8, "cpu")
    found = {way: make()(inputs) for way, make in losses.WAYS[loss].items()}
    expected = next(iter(found.values()))
    for own in found.values():
        torch.testing.assert_close(own[:2], expected[:2], rtol=1e-4, atol=1e-6)


def bench(capsys: pytest.CaptureFixture[str], call: str) -> list[dict[str, Any]]:
    """The rows of a benchmark; all ratios are finite."""
    name, *arguments = shlex.split(call)
    module = import_module(name)
    measure.main(module.Options, module.run, [*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == shlex.join(["python", f"benchmarks/{name}.py", *arguments, "--json"])
    ratios = [row[key]["median"] for row in found["rows"] for key in row if key[0] == "×" and row[key]]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
    return found["rows"]


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--pairs 3 --width 4 --turns 1 --seconds 0 --no-memory --losses"
    rows = bench(capsys, f"losses {given} {' '.join(losses.WAYS)}")
    assert [(row["loss"], row["way"]) for row in rows] == [
        (loss, way) for loss in losses.WAYS for way in losses.WAYS[loss]
    ]
    losses.work("token", "tiled", 2, 4, "cpu")()  # what the process that measures memory runs


SMALL = "step --model small --micro-batch 2 --turns 1"


def test_a_step_of_each_way_and_of_each_method(capsys: pytest.CaptureFixture[str]) -> None:
    step = import_module("step")
    ways = [way for way in step.PEERS if way not in ("compile", *step.METHODS)]
    rows = bench(capsys, f"{SMALL} --pairs-in-memory 20 --ways {shlex.join([step.PADDED, *ways])}")
    assert [row.get("peer") for row in rows] == [None, *(step.PEERS[way] for way in ways)]
    found = {row["way"]: row for row in rows}
    assert found["hnclip"]["tokens"] == pytest.approx(1)  # no pad is computed
    assert found["cached"]["Tflop"] > 1.2 * found["hnclip"]["Tflop"]  # one more forward pass
    rows = bench(capsys, f"{SMALL} --accumulate 1 --methods")
    assert [row["way"] for row in rows] == ["infonce", "hnclip", *step.METHODS]


@pytest.mark.slow
def test_a_step_against_another_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    """The other checkout is this one, so its first loss is the same."""
    other, own = bench(capsys, f"{SMALL} --against {BENCHMARKS.parent}")
    assert other["loss"] == own["loss"] > 0


@pytest.mark.slow
def test_the_first_step_has_parts(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = bench(capsys, "step --first-step --turns 1")
    parts = [row[f"{part} s"] for part in ("imports", "model", "data", "evaluation", "step")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(row["s"]["median"])


def test_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (40 + number, 32), (number, 100, 200)).save(tmp_path / f"{number}.png")
    rows = bench(capsys, f"data cache {tmp_path} --size 32 --turns 1 --workers 2 --limit 2")
    assert [row["way"].split()[0] for row in rows] == ["decode,", "decode,", "fill", "read"]
    assert all(row["same bytes"] for row in bench(capsys, "data preprocess --seconds 0 --sizes 320 240 40 30"))
    assert len(bench(capsys, "data encode --records 5 --layers 1 --width 64 --batch 2 --turns 1")) == 3


def test_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Argsort ends at 60 pairs."""
    both, alone = bench(capsys, "retrieval --pairs 50 70 --largest 60 --turns 1")
    assert {"argsort s", "argsort MB", "times as fast"} <= both.keys()
    assert {"argsort s", "argsort MB", "times as fast"}.isdisjoint(alone)


def test_search_engines(capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(capsys, "search engines --rows 1500 --width 16 --queries 12")
    assert [row["engine"].split()[0] for row in rows] == ["float32", "faiss", "exact", "faiss-ivf", "faiss-hnsw"]
    assert min(row["R@10"] for row in rows) > 0.8
    with pytest.raises(SystemExit):
        bench(capsys, "search engines --rows 50 --width 16 --engines faiss-ivf")


@pytest.mark.slow
def test_cold_search_imports_torch_only_without_a_text_tower(capsys: pytest.CaptureFixture[str]) -> None:
    torch_row, onnx = bench(capsys, "search cold --images 6 --turns 1")
    assert (torch_row["imports torch"], onnx["imports torch"], onnx["torch's hits"]) == (True, False, True)
    assert onnx["largest difference"] < 1e-4


def test_indexing_and_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(bench(capsys, "search indexing --images 6 --layers 1 --width 64 --batch 4 --turns 1 --threads 1")) == 3
    for row in bench(capsys, "search serving --rows 40 --clients 3 --seconds 1 --images 2"):
        assert row["answers/s"] > 0
        assert row["failed"] == 0
