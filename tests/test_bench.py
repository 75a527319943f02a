"""`hnclip bench` from the list to the JSON; what is measured is tiny, and no test depends on how long it took."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hnclip.bench import DIRECTORY, benchmarks, open_benchmark, run_benchmark
from hnclip.cli import main
from hnclip.measure import Report

NAMES = sorted(path.stem for path in DIRECTORY.glob("*.py") if "def run(" in path.read_text(encoding="utf-8"))


def bench_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_has_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"first_step", "loading", "losses", "ranks", "step"} <= set(NAMES) == set(benchmarks())
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
    assert main(["bench", "rank"]) == 1
    assert "there is no benchmark 'rank'; there are " in capsys.readouterr().err
    with pytest.raises(SystemExit) as done:
        main(["bench", "ranks", "--jsn"])
    assert done.value.code == 2
    capsys.readouterr()
    assert main(["bench", "ranks", "--pairs", "8", "--out", str(tmp_path)]) == 1
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


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        ("losses --pairs 8 --width 4 --turns 1 --seconds 0 --losses L_HN", 3),
        ("geometry --captions 50", 1),
        ("open_table --rows 20", 5),
    ],
)
def test_a_benchmark_in_miniature(arguments: str, ways: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_json(capsys, *arguments.split())
    assert len(found["rows"]) == ways
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


def test_step_has_a_named_peer_for_every_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    ways = ("padded fp32 loop", "long-clip", "hnclip", "infonce", "cached", "memory", "recompute", "bf16")
    small = ("--model", "small", "--micro-batch", "2", "--turns", "2", "--pairs-in-memory", "20")
    found = bench_json(capsys, "step", *small, "--ways", *ways)
    rows = {row["way"]: row for row in found["rows"]}
    assert tuple(rows) == ways
    for way, row in rows.items():
        peer = rows.get(row.get("peer"))
        assert (peer is None) == (way == "padded fp32 loop")
        assert way not in ("cached", "memory", "bf16") or row["peer"] == "hnclip"
        if peer is not None:
            ratios = [own / other for own, other in zip(row["seconds"]["seconds"], peer["seconds"]["seconds"])]
            assert row["ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert rows["hnclip"]["tokens"] == pytest.approx(1)
    assert rows["cached"]["tflop"] > 1.2 * rows["hnclip"]["tflop"]  # one more forward pass
    assert main(["bench", "step", "--model", "small", "--ways", "cashed"]) == 1
    assert "cashed" in capsys.readouterr().err


def test_step_against_another_checkout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The other checkout is this one, so its first loss is the same."""
    small = ("--model", "small", "--micro-batch", "2", "--turns", "2")
    other, own = bench_json(capsys, "step", *small, "--against", str(DIRECTORY.parent))["rows"]
    assert (other["way"], own["way"]) == ("other checkout", "hnclip")
    assert other["loss"] == own["loss"] > 0
    assert len(own["seconds"]["seconds"]) == 2
    assert main(["bench", "step", "--against", str(tmp_path)]) == 1
    assert "not a checkout" in capsys.readouterr().err


@pytest.mark.slow
def test_first_step_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    other, own = bench_json(capsys, "first_step", "--turns", "1", "--against", str(DIRECTORY.parent))["rows"]
    for row in (other, own):
        parts = [row[part] for part in ("imports", "model", "data", "evaluation", "step")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["seconds"]["median"])


def test_run_benchmark_gives_text_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    module = open_benchmark("step")
    monkeypatch.setattr("hnclip.bench.open_benchmark", lambda _: module)
    monkeypatch.setattr(module, "run", lambda options: Report("step", {"d": "d"}, [{"d": options.device}]))
    assert run_benchmark("step", ["--device", "x"]).splitlines()[-1] == "x"
    assert json.loads(run_benchmark("step", ["--json"]))["rows"] == [{"d": "cpu"}]
