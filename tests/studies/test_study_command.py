"""`hnclip study` as a person, a shell script or a scheduler uses it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from study_data import asked, write_pairs

from hnclip.cli import main
from hnclip.studies import command, store
from hnclip.studies.catalogue import STUDIES

ROWS = 4  # of the study that most tests run


class Place:
    """A data set, a model, and the outcome of an uninterrupted study of them."""

    def __init__(self, model: Path, data: Path, out: Path) -> None:
        self.model, self.data, self.out = model, data, out
        self.text = ""

    def options(self, out: Path | None = None, *more: str) -> list[str]:
        return asked(self.model, self.data, out or self.out, *more)


@pytest.fixture(scope="module")
def place(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("study")
    found = Place(model_directory, write_pairs(folder / "data"), folder / "out")
    assert main(["study", "components", *found.options(None, "--quiet")]) == 0
    found.text = tables(found.out)
    return found


@pytest.fixture
def untrainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be trained or evaluated any more."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was done again")

    monkeypatch.setattr(store, "train_or_continue", fail)
    monkeypatch.setattr(store, "_evaluated", fail)


def tables(out: Path, study: str = "components") -> str:
    return (out / study / f"{study}.txt").read_text(encoding="utf-8")


def homes(out: Path) -> list[Path]:
    return sorted(path.parent for path in (out / "runs").glob("*/result.json"))


def start(*arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "hnclip", "study", *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_second_time_nothing_is_trained_and_every_digit_is_the_same(
    place: Place, untrainable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "components", *place.options()]) == 0
    printed = capsys.readouterr()
    assert place.text.rstrip("\n") in printed.out
    assert "components.tex" in printed.out
    assert "run 1" not in printed.err


def test_the_same_configuration_in_two_studies_is_one_run(
    place: Place, untrainable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """InfoNCE and HN-CLIP of one study are rows of the other, by whatever name; the data may be named by another
    path."""
    assert len(homes(place.out)) == ROWS
    other = asked(place.model, place.data.parent / ".." / "data" / "pairs.jsonl", place.out)
    assert main(["study", "frozen,retrievals", *other, "--commands"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 1  # Ḡ frozen alone is missing
    assert main(["study", "retrievals", *other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == 2
    assert not found["missing"]
    assert [study["study"] for study in found["studies"]] == ["retrievals"]
    assert all(Path(file).is_file() for file in found["files"])


@pytest.mark.slow
def test_a_killed_study_goes_on(place: Place, tmp_path: Path) -> None:
    process = start("components", *place.options(tmp_path / "out"))
    limit = time.monotonic() + 120
    while not (homes(tmp_path / "out") and len(list((tmp_path / "out" / "runs").glob("*/checkpoint.pt"))) > 1):
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = {home: (home / "result.json").stat().st_mtime_ns for home in homes(tmp_path / "out")}
    assert 1 <= len(finished) < ROWS
    # With other threads than before: it is the same run all the same. One thread gives the same bits.
    assert main(["study", "components", *place.options(tmp_path / "out", "--quiet", "--device", "cpu")]) == 0
    assert {home: (home / "result.json").stat().st_mtime_ns for home in finished} == finished
    assert tables(tmp_path / "out") == place.text
    for mine, theirs in zip(homes(tmp_path / "out"), homes(place.out)):
        assert mine.name == theirs.name
        assert (mine / "best/model.safetensors").read_bytes() == (theirs / "best/model.safetensors").read_bytes()


@pytest.mark.slow
def test_shards_do_the_plan_together(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    processes = [start("components", *place.options(out), "--shard", f"{part}/2") for part in (1, 2)]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert [said.count("before training") for _, said in ended] == [2, 2]
    assert len(homes(out)) == ROWS
    if not (out / "components").exists():  # both ended in the same moment
        assert all("of 4 runs are done" in printed for printed, _ in ended)
        assert main(["study", "components", *place.options(out, "--quiet")]) == 0
    assert tables(out) == place.text


@pytest.mark.slow
def test_two_processes_share_a_plan_without_shards(place: Place, tmp_path: Path) -> None:
    """Nobody trains what the other is at, both wait for all of it, and both write the same tables."""
    processes = [start("components", *place.options(tmp_path / "out")) for _ in range(2)]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    assert sum(said.count("before training") for _, said in ended) == ROWS
    assert all(place.text.rstrip("\n") in printed for printed, _ in ended)


def test_commands_for_a_scheduler_complete_the_plan(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert main(["study", "components", *place.options(tmp_path / "out"), "--commands"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == ROWS
    for number, line in enumerate(commands, start=1):
        program, *words = shlex.split(line)
        assert program == "hnclip"
        assert main(words) == 0
        assert capsys.readouterr().out.startswith("done: ")
        assert len(homes(tmp_path / "out")) == number
    request.getfixturevalue("untrainable")
    assert main(["study", "components", *place.options(tmp_path / "out"), "--commands"]) == 0
    assert capsys.readouterr().out.strip() == ""
    assert main(["study", "components", *place.options(tmp_path / "out")]) == 0
    assert tables(tmp_path / "out") == place.text


def test_a_run_that_fails_does_not_stop_the_others(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody prepared regions: rows that need them fail with what to do, the table has the others."""
    assert main(["study", "main", *place.options()]) == 1
    printed = capsys.readouterr()
    failed = [line for line in printed.err.splitlines() if line.startswith("hnclip study:")]
    assert len(failed) == 2
    assert "GOAL" in failed[0]
    assert "hnclip prepare regions" in failed[0]
    assert "StructXLIP" in failed[1]
    assert "incomplete: 4 of 6 runs are done" in printed.out
    table = tables(place.out, "main")
    assert "FineLIP" in table
    assert "missing" in table
    assert main(["study", "main", *place.options(), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["missing"]) == len(found["failures"]) == 2


def test_a_shard_says_how_far_the_whole_is(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "retrievals", *place.options(tmp_path / "out"), "--shard", "2/2", "--quiet"]) == 0
    assert "1 of 2 runs are done" in capsys.readouterr().out
    assert not (tmp_path / "out" / "retrievals").exists()


def test_a_dry_run_does_nothing_and_tells_states(
    place: Place, tmp_path: Path, untrainable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "components,frozen", *place.options(), "--dry-run", "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    states = [(next(iter(run["places"].values()))[0]["row"], run["state"]) for run in found["runs"]]
    assert states == [*((row, "done") for row in ROW_NAMES), ("Ḡ frozen", "to do")]
    assert [run["pairs"] for run in found["runs"]] == [16] * 5
    # Ḡ frozen costs what HN-CLIP did.
    assert found["seconds"] > found["evaluation_seconds"] > 0
    assert found["rates"][0]["source"] == "2 finished runs"
    assert main(["study", "frozen", *place.options(tmp_path / "new"), "--dry-run", "--no-measure"]) == 0
    printed = capsys.readouterr().out
    assert "2 runs, 2 of them to do; how long they take is not known" in printed
    assert not (tmp_path / "new").exists()


ROW_NAMES = ("InfoNCE", "InfoNCE + L_tok", "L_HN", "L_HN + L_tok")


def test_a_step_is_timed_once_for_what_costs_the_same(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["study", "components,rivals", *place.options(tmp_path / "new"), "--dry-run"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err.count("timing a step") == 2  # with and without the token term
    assert "measured step of 2 pairs on this machine, real data" in printed.out
    assert "one after the other" in printed.out


def test_a_plan_for_data_and_weights_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "main", "--recipe", "paper/dci", "--dry-run", "--no-measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trained = [run for run in found["runs"] if run["trained"]]
    assert len(trained) == 15
    assert {run["pairs"] for run in trained} == {5445 - round(0.05 * 5445)}
    assert {run["epochs"] for run in trained} == {10}
    assert {tuple(run["galleries"]) for run in found["runs"]} == {("dci", "long-dci")}
    assert {run["identity"] for run in found["runs"]} == {None}
    assert main(["study", "main", "--recipe", "paper/dci", "--dry-run", "--no-measure"]) == 0
    assert "not known before model and data are here" in capsys.readouterr().out
    assert main(["study", "main", "--recipe", "paper/dci"]) == 1  # to run it takes both
    assert "longclip-L.pt" in capsys.readouterr().err


def test_runs_of_other_versions_are_told_and_taken_when_asked(
    place: Place, tmp_path: Path, untrainable: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    for home in homes(place.out):
        front, _, _ = home.name.rpartition("-")
        (out / "runs" / f"{front}-0123456789").symlink_to(home)
    options = ["study", "retrievals", *place.options(out)]
    assert main([*options, "--dry-run", "--no-measure", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["state"] for run in runs] == ["made by other versions"] * 2
    assert main([*options, "--any-version"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mian"], "Did you mean main?"),
        (["main,all"], "all stands alone"),
        (["cross-domain"], "name two or more with --data"),
        (["transfer,main"], "transfer trains on one domain"),
        (["main", "--shard", "5/4"], "for example 2/4"),
        (["main", "--set", "optim.lrr=1"], "no field optim.lrr"),
        (["main", "--set", "optim.lr=fast"], "optim.lr: Input should be a valid number, got 'fast'"),
        (["main", "--set", "optim.epochs=1.5"], "optim.epochs: Input should be a valid integer, got 1.5"),
        (["main", "--set", "optim.epochs=0"], "optim.epochs: Input should be greater than or equal to 1, got 0"),
        (["main", "--set", "optim=1"], "--set: optim: Input should be an object"),
        (["main", "--set", "optim.lr=1", "optim.lr.x=1"], "one is part of the other"),
        (["main", "--set", "optim"], "KEY=VALUE"),
        (["main", "--set", "seed=1"], "chosen by --seeds"),
        (["main", "--model", "nowhere"], "model 'nowhere': no such file"),
        (["main", "--data", "nowhere.csv"], "no such file"),
        (["main", "--data", "docci"], "where is docci?"),
        (["main", "--data", "scenes/park", "scenes/park"], "twice"),
        (["main", "--run", "0123"], "no run 0123"),
        (["main", "--out", "/proc/nowhere/at/all"], "cannot be written"),
        (["miniature", "--seeds", "1"], "leave --seeds out"),
        (["adaptivity", "--shard", "1/2"], "leave --shard out"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert main(["study", *arguments, *out]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*/*"))


def test_an_out_that_is_a_file_and_data_without_a_test_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["study", "main", "--out", str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err
    data = write_pairs(tmp_path / "data", test=False)
    assert main(["study", "main", "--data", str(data), "--out", str(tmp_path / "out")]) == 1
    assert "has no test split: name data to test on with --tests" in capsys.readouterr().err


def test_options_that_exclude_each_other_are_refused() -> None:
    for wrong in (["--dry-run", "--commands"], ["--seeds", "1", "1"], ["--threads", "-1"]):
        with pytest.raises(SystemExit) as done:
            main(["study", "main", *wrong])
        assert done.value.code == 2


def test_the_list_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {*STUDIES, "adaptivity", "miniature"}
    assert lines[0].startswith("main ")
    assert main(["study", "list", "--json"]) == 0
    assert {"name", "title", "question"} == set(json.loads(capsys.readouterr().out)[0])


def test_an_interrupted_study_says_how_to_go_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "execute", interrupted)
    assert main(["study", "retrievals", *place.options(tmp_path / "out")]) == 130
    assert "the same command continues" in capsys.readouterr().err
