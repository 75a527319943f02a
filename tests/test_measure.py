"""The harness by closed forms and fake clocks: nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hnclip.measure import (
    Quartiles,
    Report,
    Timing,
    fresh_result,
    gemm_rate,
    load_file,
    machine,
    peak_memory,
    threads,
    time_ways,
)

MEGABYTE = 2**20
forgets_its_peak = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="elsewhere what came before the work can hide its memory"
)


class FakeClock:
    """Stands still unless work is done."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_timing_of_known_seconds() -> None:
    timing = Timing((4.0, 1.0, 2.0, 3.0, 10.0))
    assert timing.median == 3.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.milliseconds == Quartiles(2000.0, 3000.0, 4000.0)
    assert timing.per_second(12.0) == Quartiles(3.0, 4.0, 6.0)
    single = Timing((2.0,))
    assert (single.median, single.spread) == (2.0, 0.0)
    assert single.milliseconds == Quartiles(2000.0, 2000.0, 2000.0)


def test_ratio_pairs_the_turns() -> None:
    """A machine that gets slower changes no ratio; the ratio of medians would be another."""
    peer = Timing((1.0, 2.0, 4.0, 8.0, 16.0))
    assert Timing(tuple(3 * seconds for seconds in peer.seconds)).ratios(peer) == Quartiles(3.0, 3.0, 3.0)
    own = Timing((5.0, 2.0, 4.0, 32.0, 32.0))  # 5, 1, 1, 4, 2
    assert own.ratio(peer) == 2.0
    assert own.ratios(peer) == Quartiles(1.0, 2.0, 4.0)
    assert own.ratio(peer) != own.median / peer.median
    with pytest.raises(ValueError, match="zip"):
        own.ratio(Timing((1.0,)))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_quartiles_lie_among_the_values(values: list[float]) -> None:
    found = Quartiles.of(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_ways_take_turns() -> None:
    clock, calls = FakeClock(), []

    def way(name: str, seconds: float) -> object:
        def work() -> None:
            calls.append(name)
            clock.now += seconds * len(calls)

        return work

    def prepare() -> None:
        calls.append("prepare")
        clock.now += 1000  # is not timed

    ways = {"a": way("a", 1.0), "b": way("b", 0.5)}
    found = time_ways(ways, turns=2, warmup=1, clock=clock, prepare=prepare)
    assert calls == ["prepare", "a", "b"] * 3
    assert found == {"a": Timing((5.0, 8.0)), "b": Timing((3.0, 4.5))}
    assert list(found) == ["a", "b"]


def test_turns_go_on_for_a_time() -> None:
    clock = FakeClock()

    def work() -> None:
        clock.now += 1.0

    assert len(time_ways({"a": work, "b": work}, turns=2, seconds=9.0, clock=clock)["a"].seconds) == 5
    assert len(time_ways({"a": work}, turns=4, seconds=1.0, warmup=0, clock=clock)["a"].seconds) == 4
    with pytest.raises(ValueError, match="turns must be at least 1, got 0"):
        time_ways({"a": work}, turns=0)


def test_gemm_rate_counts_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing((0.5, 0.25, 0.125))
    monkeypatch.setattr("hnclip.measure.time_ways", lambda ways, **_: dict.fromkeys(ways, timing))
    assert gemm_rate(size=10) == 2 * 1000 / 0.25


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with threads(before + 1):
            assert torch.get_num_threads() == machine()["threads"] == before + 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before


CHILD = """
import os, torch
from shared_sizes import MEGABYTE

def one_by_one(sizes):
    def work():
        for megabytes in sizes:
            torch.ones(megabytes * MEGABYTE, dtype=torch.uint8)  # gone before the next

    return work

def ones(megabytes):
    before = torch.ones(300 * MEGABYTE, dtype=torch.uint8)  # an input, or what the preparation needed
    del before
    kept = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    print("a word of its own")
    return lambda: (kept, torch.ones(megabytes * MEGABYTE, dtype=torch.uint8))

def echo(**given):
    return {**given, "process": os.getpid(), "threads": torch.get_num_threads()}

def fail(word):
    raise KeyError(f"{word} is missing")
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "shared_sizes.py").write_text("MEGABYTE = 2**20\n")
    (tmp_path / "some_work.py").write_text(CHILD)
    return tmp_path / "some_work.py"


@forgets_its_peak
def test_peak_memory_of_a_known_allocation(child: Path) -> None:
    """Only the work counts, neither inputs nor preparation."""
    assert 198 * MEGABYTE < peak_memory(child, "ones", megabytes=200) < 215 * MEGABYTE


@forgets_its_peak
def test_rise_is_that_of_the_peak(child: Path) -> None:
    """In a process of its own: what the C library keeps for itself depends on all that came before."""
    assert 98 * MEGABYTE < peak_memory(child, "one_by_one", sizes=[50, 100]) < 110 * MEGABYTE


def test_a_fresh_process_answers(child: Path) -> None:
    with threads(3):
        found = fresh_result(child, "echo", file="x", function=[1, None])
    assert found.pop("process") != os.getpid()
    assert found == {"file": "x", "function": [1, None], "threads": 3}


def test_a_failing_process_says_why(child: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)fail\(\{'word': 'bread'\}\) failed:.*KeyError: 'bread is missing'"):
        peak_memory(child, "fail", word="bread")


def test_a_killed_process_is_told_from_a_failing_one(child: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(child.with_name("ends_itself")))
    Path(sys.executable).write_text("#!/bin/sh\nkill -KILL $$\n")
    Path(sys.executable).chmod(0o755)
    with pytest.raises(RuntimeError, match=r"fail\(\{'word': 'bread'\}\) was ended by SIGKILL; is there memory enough"):
        peak_memory(child, "fail", word="bread")


REPORT = Report(
    "tea",
    {"cups": "cups", "time": "s", "ratio": "× peer", "left": "left"},
    [
        {"cups": 1200, "time": Timing((1.0, 2.0, 3.0)), "ratio": Quartiles(0.5, 1.25, 1500.0), "hidden": Path("a/b")},
        {"cups": True, "time": math.nan, "ratio": 0.12345, "left": math.inf, "more": [{"turns": Timing((0.5,))}]},
    ],
    {"threads": 2, "torch": "x"},
    ["a note"],
)


def test_report_as_text() -> None:
    assert REPORT.to_text().splitlines() == [
        "threads 2, torch x",
        "",
        "cups        s            × peer  left",
        "-----  ------  ----------------  ----",
        "1,200  2 ±25%  1.25 (0.5–1,500)     –",
        "True        –             0.123     –",
        "a note",
    ]


def test_report_as_json() -> None:
    found = json.loads(json.dumps(REPORT.to_dict(), allow_nan=False))
    assert found == {
        "benchmark": "tea",
        "machine": {"threads": 2, "torch": "x"},
        "columns": {"cups": "cups", "time": "s", "ratio": "× peer", "left": "left"},
        "rows": [
            {
                "cups": 1200,
                "time": {"median": 2.0, "spread": 0.5, "seconds": [1.0, 2.0, 3.0]},
                "ratio": {"low": 0.5, "median": 1.25, "high": 1500.0},
                "hidden": "a/b",
            },
            {
                "cups": True,
                "time": None,
                "ratio": 0.12345,
                "left": None,
                "more": [{"turns": {"median": 0.5, "spread": 0.0, "seconds": [0.5]}}],
            },
        ],
        "notes": ["a note"],
    }


def test_machine_is_described() -> None:
    assert json.loads(json.dumps(machine()))["torch"] == torch.__version__
    assert {"device", "processor", "threads", "cores", "torch", "python", "system"} == set(machine())


def test_load_file_refuses_what_is_no_python(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a Python file"):
        load_file(tmp_path / "notes.txt")
