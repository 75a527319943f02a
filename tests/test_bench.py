"""`hnclip bench` from the list to the JSON; what is measured is tiny, and nobody looks at how long it took."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hnclip.bench import DIRECTORY, benchmarks, open_benchmark, run_benchmark
from hnclip.cli import main
from hnclip.measure import Report, Timing, exponent

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.py") if "def run(" in path.read_text(encoding="utf-8"))


def bench_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_has_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"gemm", "growth", "loading", "open_checkpoint", "preprocess", "ranks"} <= set(NAMES) == set(benchmarks())
    for call in (["bench"], ["bench", "--help"]):
        assert main(call) == 0
        printed = capsys.readouterr().out
        assert "hnclip bench NAME --help" in printed
        for name, about in benchmarks().items():
            assert f"  {name} " in printed
            assert about.rstrip(".") in printed


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_its_form(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = open_benchmark(name)
    assert module.__doc__ is not None
    assert module.__doc__.split("\n\n")[0].endswith(".")
    assert dataclasses.is_dataclass(module.Options)
    assert module.Options.__dataclass_params__.frozen
    with pytest.raises(SystemExit) as done:
        main(["bench", name, "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: hnclip bench {name}" in printed
    assert all(part in printed for part in ("--json", "--out", module.__doc__.split()[0]))


def test_wrong_calls_say_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "gem"]) == 1
    assert "there is no benchmark 'gem'; there are " in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["bench", "gemm", "--jsn"])
    assert done.value.code == 2
    capsys.readouterr()
    assert main(["bench", "gemm", "--sizes", "8", "--out", str(tmp_path)]) == 1
    assert "is a directory; name a file" in capsys.readouterr().err
    assert main(["bench", "loading", str(tmp_path)]) == 1
    assert f"{tmp_path} holds no pictures" in capsys.readouterr().err


def test_without_the_repository_there_are_no_benchmarks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hnclip.bench.DIRECTORY", tmp_path / "none")
    assert main(["bench"]) == 1
    assert "come with the repository" in capsys.readouterr().err


TOY = '''
"""A toy. It measures nothing.

More about it.
"""
from __future__ import annotations
import logging
from dataclasses import dataclass
from hnclip.measure import Report
from shared_part import WORD

@dataclass(frozen=True)
class Options:
    """Options of a toy."""
    size: int = 3
    fail: str = ""

def run(options):
    logging.getLogger("hnclip.bench").info("at work")
    if options.fail == "interrupt":
        raise KeyboardInterrupt
    if options.fail:
        raise RuntimeError(options.fail)
    return Report("toy", {"size": "size"}, [{"size": options.size, "word": WORD}])
'''


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory of benchmarks with one that shares a part, which is none itself."""
    (tmp_path / "toy.py").write_text(TOY.lstrip())
    (tmp_path / "shared_part.py").write_text('"""No benchmark."""\nWORD = "tea"\n')
    monkeypatch.setattr("hnclip.bench.DIRECTORY", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("toy")
def test_one_run_from_the_options_to_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert benchmarks() == {"toy": "A toy. It measures nothing."}
    out = tmp_path / "new" / "toy.json"
    assert main(["bench", "toy", "--size", "5", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == ["size", "----", "5"]
    assert printed.err == "at work\n"
    written = json.loads(out.read_text())
    assert written.pop("seconds") >= 0
    assert written["command"] == f"hnclip bench toy --size 5 --out {out}"
    assert written["rows"] == [{"size": 5, "word": "tea"}]
    found = bench_json(capsys, "toy")
    assert (found["benchmark"], found["rows"][0]["size"], found["command"]) == ("toy", 3, "hnclip bench toy --json")
    assert found["version"] == written["version"]


@pytest.mark.usefixtures("toy")
def test_what_stops_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "toy.json"
    assert main(["bench", "toy", "--fail", "the process of x() failed:\nKeyError", "--out", str(out)]) == 1
    assert capsys.readouterr().err == "at work\nhnclip bench: the process of x() failed:\nKeyError\n"
    assert main(["bench", "toy", "--fail", "interrupt", "--out", str(out)]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not out.exists()


def test_gemm(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_json(capsys, "gemm", "--sizes", "8", "24", "--turns", "3")
    assert [row["size"] for row in found["rows"]] == [8, 24]
    for row in found["rows"]:
        seconds = row["fp32_turns"]["seconds"]
        assert len(seconds) == len(row["bf16_turns"]["seconds"]) == 3
        assert row["fp32"]["median"] == pytest.approx(2 * row["size"] ** 3 / sorted(seconds)[1] / 1e9)
    assert {"torch", "threads", "processor"} <= found["machine"].keys()


def test_token_memory(capsys: pytest.CaptureFixture[str]) -> None:
    tuples, array = bench_json(capsys, "token_memory", "--captions", "2000")["rows"]
    assert array["bytes_per_token"] < 5 < tuples["bytes_per_token"]


def test_preprocess(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_json(capsys, "preprocess", "--seconds", "0", "--sizes", "320", "240", "40", "30")
    assert [row["picture"] for row in found["rows"]] == ["320x240", "40x30"]
    for row in found["rows"]:
        assert row["largest_difference"] <= 1
        assert len(row["hnclip"]["seconds"]) == len(row["transformers"]["seconds"]) == 7
    assert found["machine"]["threads"] == 1


def test_loading(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        Image.new("RGB", (40 + number, 32), (number, 100, 200)).save(tmp_path / f"{number}.png")
    arguments = [str(tmp_path), "--size", "32", "--turns", "2", "--workers", "2", "--limit", "2"]
    found = bench_json(capsys, "loading", *arguments)
    assert [row["way"].split(",")[0] for row in found["rows"]] == [
        "decode",
        "decode",
        "fill the cache",
        "read the cache",
    ]
    assert [row["cache_over"] is None for row in found["rows"]] == [False, False, True, True]
    assert found["rows"][-1]["same_bytes"] is True
    assert all(len(row["turns"]["seconds"]) == 2 for row in found["rows"])
    assert "2 pictures, size 32; same bytes: True" in found["notes"]


def test_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process alone, and the naive way ends at 60 pairs."""
    ranks = open_benchmark("ranks")
    memory = {"naive": 6_000_000, "hnclip": 2_000_000}

    def peak_memory(file: str, function: str, way: str, pairs: int) -> int:
        assert getattr(ranks, function)(way, pairs)().owner.tolist() == list(range(pairs))
        return memory[way]

    monkeypatch.setattr(ranks, "NAIVE_UP_TO", 60)
    monkeypatch.setattr(ranks, "peak_memory", peak_memory)
    beside, alone = ranks.run(ranks.Options(pairs=(50, 70), turns=2)).to_dict()["rows"]
    assert (beside["times_less_memory"], beside["largest_difference"], beside["naive_megabytes"]) == (3.0, 0, 6.0)
    assert {"naive", "times_as_fast", "naive_megabytes"}.isdisjoint(alone)
    for row in (beside, alone):
        parts = [row[name]["median"] for name in ("hnclip", "metrics", "similarity")]
        assert row["all_seconds"] == pytest.approx(sum(parts))
        assert len(row["hnclip"]["seconds"]) == 2
    memory["hnclip"] = 0  # so little that no page was added
    assert ranks.run(ranks.Options(pairs=(50,))).to_dict()["rows"][0]["times_less_memory"] is None


def test_open_checkpoint_writes_what_both_ways_open(tmp_path: Path) -> None:
    module = open_benchmark("open_checkpoint")
    for file in module.write(tmp_path, 1.0):
        for way in module.WAYS:
            row = module.open_and_use(way, str(file), 1.0)
            assert set(module.COLUMNS) <= set(row)
            assert row["megabytes"] == file.stat().st_size / 1e6


TINY = {
    "batches": (8, 16, 32),
    "tiled_batches": (4, 8, 16, 32),
    "width": 8,
    "token_batches": (2, 4, 8),
    "tokens": (3, 5),
    "lengths": (8, 16),
    "captions": 1,
    "galleries": (20, 40, 80),
    "pictures": 10,
    "squares": (10, 20),
    "turns": 2,
}
POWERS = {"eager": 2, "tiled": 1.5, "local_loss": 3, "text_tower": 1, "ranking": 0}


def test_growth_draws_what_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every curve but the processes; the bytes are made up, so their exponents are known."""
    growth = open_benchmark("growth")

    def peak_memory(file: str, work: str, **arguments: Any) -> int:
        getattr(growth, work)(**arguments)()
        return 1000 * arguments["size"] ** POWERS[arguments.get("way", work)]

    monkeypatch.setattr(growth, "peak_memory", peak_memory)
    monkeypatch.setattr(growth, "clip_text", small_text_tower)
    caplog.set_level("INFO", logger="hnclip")
    options = growth.Options(**TINY, only=("gallery", "batch", "length"), figures=tmp_path / "figures")
    report = growth.run(options)
    rows = {row["curve"]: row for row in report.to_dict()["rows"]}
    assert list(rows) == ["10 pictures", "as many pictures", "L_HN, eager", "L_HN, tiled", "token loss", "text tower"]
    assert [row["memory_exponent"] for row in rows.values()] == pytest.approx([0, 0, 2, 1.5, 3, 1])
    time_expected = {name: row["time_expected"] for name, row in rows.items()}
    assert time_expected.pop("text tower") == pytest.approx(math.log2(16 * (3072 + 16) / (8 * (3072 + 8))))
    assert list(time_expected.values()) == pytest.approx([1, 2, 2, 2, 2])
    assert rows["token loss"]["memory_expected"] == pytest.approx(math.log2(8 * (8 + 8) / (4 * (8 + 4))))
    assert rows["10 pictures"]["memory_expected"] == rows["text tower"]["memory_expected"] == pytest.approx(1)
    assert [point["size"] for point in rows["10 pictures"]["points"]] == [20, 40, 80]
    assert all(len(point["time"]["seconds"]) == 2 for row in rows.values() for point in row["points"])
    names = [Path(file).name for file in report.figures]
    assert names == ["growth-gallery.png", "growth-batch.png", "growth-length.png"]
    for file in report.figures:
        with Image.open(file) as picture:
            assert picture.width == 900
    assert caplog.messages[0] == "against captions in the gallery"


def test_expected_memory_is_that_of_large_batches() -> None:
    """Far beyond what is measured, the constants of the formulas no longer count."""
    growth = open_benchmark("growth")
    sizes = (2**20, 2**21, 2**22)
    jobs = {job.name: job for job in growth.jobs(growth.Options())}
    for name, power in {"L_HN, eager": 2, "L_HN, tiled": 1, "token loss": 2}.items():
        assert exponent(sizes, [jobs[name].memory_law(size) for size in sizes]) == pytest.approx(power, abs=0.01)


def small_text_tower(positions: int, device: str) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPTextModel(CLIPTextConfig(**sizes, max_position_embeddings=positions, eos_token_id=999)).to(device)


def test_growth_over_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """Two real processes; one alone is in the next test."""
    arguments = ["--only", "processes", "--pairs", "8", "--width", "8", "--turns", "2"]
    found = bench_json(capsys, "growth", *arguments, "--processes", "2")
    (row,) = found["rows"]
    (point,) = row["points"]
    assert (point["size"], len(point["time"]["seconds"])) == (2, 2)
    assert row["time_exponent"] is None  # of a single size
    assert found["notes"] == [f"2 processes: {8 / point['time']['median']:,.0f} pairs per second"]
    assert main(["bench", "growth", *arguments, "--processes", "3"]) == 1
    assert "8 pairs cannot be shared by 3 processes" in capsys.readouterr().err


def test_a_failing_process_of_several_says_why(tmp_path: Path) -> None:
    growth = open_benchmark("growth")
    options = growth.Options(pairs=2, width=8, turns=0)
    with pytest.raises(RuntimeError, match=r"(?s)one of 1 processes failed:.*ValueError: turns must be at least 1"):
        growth.step_of_processes(1, options, tmp_path / "1.json")


def test_curve_of_known_numbers() -> None:
    growth = open_benchmark("growth")
    times = [Timing((float(size),)) for size in (4, 1, 16)]
    curve = growth.Curve("c", "batch", (2, 1, 4), times, (20, 10, 40), lambda size: size**3, None)
    row = curve.to_row()
    assert row["largest_seconds"] is times[2]
    assert (row["largest_megabytes"], row["sizes"]) == (40 / 1e6, "1–4")
    assert [row[key] for key in ("time_exponent", "time_expected", "memory_exponent")] == pytest.approx([2, 3, 1])
    assert row["memory_expected"] is None


def test_run_benchmark_gives_text_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    module = open_benchmark("gemm")
    monkeypatch.setattr("hnclip.bench.open_benchmark", lambda _: module)
    monkeypatch.setattr(module, "run", lambda options: Report("gemm", {"d": "d"}, [{"d": options.device}]))
    assert run_benchmark("gemm", ["--device", "x"]).splitlines()[-1] == "x"
    assert json.loads(run_benchmark("gemm", ["--json"]))["rows"] == [{"d": "cpu"}]
