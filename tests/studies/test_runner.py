"""Studies from the call to the tables: repeated, killed, shared, divided, planned, wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from study_data import SHORT, asked, write_pairs

from hnclip.cli import main
from hnclip.studies.runner import run_study

ROWS = 4  # of the study that most tests run


class Place(NamedTuple):
    """A data set, a model, and an uninterrupted study of them."""

    model: Path
    data: Path
    out: Path

    def options(self, out: Path | None = None, *more: str) -> list[str]:
        return asked(self.model, self.data, out or self.out, *more)


@pytest.fixture(scope="module")
def place(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("study")
    found = Place(model_directory, write_pairs(folder / "data"), folder / "out")
    assert main(["study", "components", *found.options(None, "--quiet")]) == 0
    return found


def table(out: Path, study: str = "components") -> str:
    return (out / study / f"{study}.txt").read_text(encoding="utf-8")


def homes(out: Path) -> list[Path]:
    return sorted(path.parent for path in (out / "runs").glob("*/result.json"))


def weights(out: Path) -> dict[str, bytes]:
    return {home.name: (home / "best/model.safetensors").read_bytes() for home in homes(out)}


def start(*arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "hnclip", "study", *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def written(folder: Path) -> dict[Path, int]:
    files = (file for file in folder.rglob("*") if file.is_file() and ".locks" not in file.parts)
    return {file: file.stat().st_mtime_ns for file in files}


def test_a_finished_study_is_only_written_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before, printed = written(place.out / "runs"), table(place.out)
    assert len(homes(place.out)) == ROWS
    assert main(["study", "components", *place.options()]) == 0
    assert printed.rstrip("\n") in capsys.readouterr().out
    assert written(place.out / "runs") == before
    assert table(place.out) == printed


@pytest.mark.slow
def test_a_killed_study_resumes(place: Place, tmp_path: Path) -> None:
    """SIGKILL in the first, second and third run; the same command ends with the weights of an uninterrupted study."""
    for finished in range(3):
        process = start("components", *place.options(tmp_path))
        while process.poll() is None:
            begun = [path for path in (tmp_path / "runs").glob("*/checkpoint.pt") if path.parent not in homes(tmp_path)]
            if len(homes(tmp_path)) >= finished and begun:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        process.communicate()
    assert main(["study", "components", *place.options(tmp_path, "--quiet")]) == 0
    assert weights(tmp_path) == weights(place.out)
    assert table(tmp_path) == table(place.out).replace(str(place.out), str(tmp_path))


@pytest.mark.slow
def test_two_processes_share_a_plan(place: Place, tmp_path: Path) -> None:
    """No run is trained twice, and both processes write the reports when everything is done."""
    processes = [start("components", *place.options(tmp_path)) for _ in range(2)]
    ended = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert sum(messages.count("before training") for _, messages in ended) == ROWS
    assert weights(tmp_path) == weights(place.out)


def test_shards_divide_a_plan(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measurement `retrievals` needs runs of both shards: the second does it and writes the tables."""
    for number, runs, missing in ((1, 2, 3), (2, 4, 0)):
        options = place.options(tmp_path, "--shard", f"{number}/2", "--json")
        assert main(["study", "components,retrievals", *options]) == 0
        assert len(json.loads(capsys.readouterr().out)["missing"]) == missing
        assert len(homes(tmp_path)) == runs
        assert (tmp_path / "components").exists() == (not missing)


def test_a_dry_run_writes_nothing_and_reports_states(place: Place) -> None:
    request = {"model": str(place.model), "data": [str(place.data)], "recipe": "demo", "set": SHORT, "seeds": (42,)}

    def jobs(name: str) -> dict[str, Any]:
        return run_study(name, out=place.out, dry_run=True, **request).to_dict()  # type: ignore[arg-type]

    before = written(place.out)
    states = [job["state"] for job in jobs("components,held-out")["jobs"]][:ROWS]
    assert states == ["to evaluate", "done", "done", "to evaluate"]  # held-out has a gallery of its own
    found = jobs("components,frozen")
    assert [job["state"] for job in found["jobs"]] == ["done"] * ROWS + ["to do"]
    assert found["seconds"] > 0  # by the finished runs
    assert written(place.out) == before
    # Of the paper's runs, without its data and weights.
    paper = [job for job in run_study("main", recipe="paper/dci", dry_run=True).to_dict()["jobs"] if job["epochs"]]
    assert {(job["pairs"], job["epochs"], job["state"]) for job in paper} == {(5445, 10, "not known")}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["cross-domain"], "two or more"),
        (["main", "--set", "optim.lrr=1"], "optim.lrr"),
        (["main", "--set", "objective.global_loss=hn"], "objective.global_loss"),
        (["main", "--data", "nowhere.csv"], "nowhere.csv"),
        (["main", "--recipe", "paper/dci"], "longclip-L.pt"),
    ],
)
def test_wrong_calls_are_refused_before_anything_runs(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", *arguments, "--out", str(tmp_path / "out")]) == 1
    assert word in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/*"))


def test_rows_that_cannot_be_trained_are_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """No regions were prepared: the rows that need them fail with the reason, and the table shows the others."""
    assert main(["study", "main", *place.options()]) == 1
    failed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hnclip study:")]
    assert ["GOAL" in failed[0], "StructXLIP" in failed[1], len(failed)] == [True, True, 2]
    assert "hnclip prepare regions" in failed[0]
    assert "FineLIP" in table(place.out, "main")
