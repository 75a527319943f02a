"""The command line as a person or a program uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

from hnclip.cli import main, positional_data
from hnclip.cli.commands import COMMANDS, Command
from hnclip.cli.completion import command_flags
from hnclip.cli.options import Output, OutputGroup, Printed
from hnclip.data.image_cache import list_caches, load_images
from hnclip.data.images import ImageTransform
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.training.log import read_metrics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 images with captions in text files of the same names."""
    directory = tmp_path / "photos"
    directory.mkdir()
    for number, record in enumerate(scene_records("park", "train", families=6, members=4)):
        record.image.load().save(directory / f"{number:02}.png")
        (directory / f"{number:02}.txt").write_text(record.captions[0] + "\n", encoding="utf-8")
    return directory


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]):
    """Runs a command with --json that succeeds, and returns what it prints."""

    def run(*words: object) -> dict | list:
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_help_imports_nothing_heavy() -> None:
    """Help on all commands needs the standard library only, help on one neither torch nor transformers."""
    code = (
        "import sys\nfrom hnclip.cli import main\nmain(['--help'])\n"
        "assert not {'torch', 'transformers', 'tyro', 'numpy', 'rich', 'pydantic'} & {*sys.modules}\n"
        "from hnclip.cli.commands import COMMANDS\n"
        "for name in COMMANDS:\n"
        "    assert main([*name.split(), '--help']) == 0\n"
        "print('LOADED', *{'torch', 'transformers', 'matplotlib', 'onnxruntime'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.count("usage: hnclip") == len(COMMANDS) + 1
    assert found.stdout.rstrip().endswith("LOADED")


def test_characters_that_the_output_lacks_are_replaced() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", "hnclip", "--help"]
    found = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "image?text retrieval" in found.stdout


def test_the_help_of_train_leads_with_the_options_that_most_runs_need() -> None:
    flags = command_flags("train")
    first = [
        "--model",
        "--out",
        "--method",
        "--global-loss",
        "--gamma",
        "--epochs",
        "--lr",
        "--micro-batch",
        "--recipe",
    ]
    assert flags[:10] == [*first, "--resume"]
    assert "--optim.weight-decay" in flags[10:]


@pytest.mark.parametrize(
    ("words", "code", "keyword"),
    [
        (["trian"], 2, "did you mean 'train'"),
        (["data"], 2, "data check"),
        (["data", "--help"], 0, "data check"),
        (["data", "chekc"], 2, "did you mean 'data check'"),
        (["prepare", "edges"], 2, "prepare regions"),
        (["--version"], 0, "hnclip "),
        (["eval", "--modle", "x"], 2, "--model"),
        (["eval", "--top", "0"], 2, "--top"),
        (["eval", "--batch", "0"], 2, "--batch"),
        (["compare", "a.jsonl", "b.jsonl", "--k", "0"], 2, "--k"),
        (["compare", "a.jsonl", "bundled"], 2, "two files"),
        (["study", "main", "--shard", "0/4"], 2, "K/N"),
        (["encode", "photos", "--out", "x", "--partition", "3/2"], 2, "K/N"),
        (["interpolate", "bundled", "bundled", "--alpha", "0.5", "1.5"], 2, "--alpha"),
        (["interpolate", "bundled", "bundled", "--alpha", "0.5"], 2, "--out"),
        (["search", "x.hnc"], 2, "--image"),
        (["eval", "--model", "nowhere"], 1, "'nowhere'"),
        (["eval", "photos"], 1, "'photos'"),
        (["eval", "docci"], 1, "docci"),
        (["eval", "--out", "table.xls"], 1, "table.xls"),
        (["eval", "--split", "nonsense"], 1, "'nonsense'"),
        (["eval", "--device", "warp"], 1, "'warp'"),
        (["compare", "a.jsonl", "b.jsonl"], 1, "a.jsonl"),
        (["data", "check", "nowhere/at/all.csv"], 1, "all.csv"),
        (["train", "scenes/moon", "--model", "bundled", "--out", "run"], 1, "park"),
        (["docs", "serch"], 1, "did you mean 'search'"),
    ],
)
def test_exit_codes_and_what_is_wrong(
    words: list[str],
    code: int,
    keyword: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HNCLIP_DATA", raising=False)
    assert main(words) == code
    printed = capsys.readouterr()
    assert keyword in printed.out + printed.err
    assert "Traceback" not in printed.err
    assert [*tmp_path.iterdir()] == []


@dataclass(frozen=True)
class Failing:
    """A command that raises an error."""

    error: str = "ours"
    output: OutputGroup = field(default_factory=Output)

    def run(self) -> Printed | None:
        if self.error == "ours":
            load("nowhere")
        if self.error == "library":
            int("not a number")
        if self.error == "bug":
            raise KeyError("bug")
        if self.error == "interrupted":
            raise KeyboardInterrupt
        return Printed("text", [1], 1)


def test_user_errors_are_a_line_and_errors_of_the_program_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(COMMANDS, "failing", Command("none", "fails", "continue with --resume {error}"))
    monkeypatch.setattr("hnclip.cli.options_class", lambda name: Failing)
    assert main(["failing"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    for error, kind in (("library", ValueError), ("bug", KeyError)):
        with pytest.raises(kind):
            main(["failing", "--error", error])
    with pytest.raises(ValueError, match="nowhere"):
        main(["failing", "--traceback"])
    assert main(["failing", "--error", "interrupted"]) == 130
    assert "continue with --resume interrupted" in capsys.readouterr().err
    assert main(["failing", "--error", "none", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [1]
    log = tmp_path / "hnclip.log"
    assert main(["failing", "--quiet", "--log-file", str(log)]) == 1
    assert "ERROR hnclip: hnclip failing: " in log.read_text()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.csv --out x", "a.csv --out x"),
        ("--out x --data a.csv", "a.csv --out x"),
        ("--data a b --out x", "a b --out x"),
        ("main --data=a,b --seeds 1 2", "main a,b --seeds 1 2"),
        ("base tuned --alpha 0.5 --data a -h", "base tuned a --alpha 0.5 -h"),
        ("--model m", "--model m"),
    ],
)
def test_data_by_option_are_moved_to_the_positional_arguments(given: str, expected: str) -> None:
    assert positional_data(given.split()) == expected.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hnclip tr", {"train"}),
        ("hnclip data ch", {"check"}),
        ("hnclip data check captions.csv --mod", {"--model"}),
        ("hnclip train x.csv --global-l", {"--global-loss"}),
        ("hnclip train x.csv --model ''", set()),  # the shell completes files
    ],
)
def test_completion_in_bash(line: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish", "bash"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "train" in script
    words = line.split()
    ask = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _hnclip; echo "${{COMPREPLY[@]}}"'
    found = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert {*found.stdout.split()} == expected


def test_documentation_is_listed_and_printed(capsys: pytest.CaptureFixture[str], call) -> None:
    pages = call("docs")
    assert pages
    for name in pages:
        assert main(["docs", name]) == 0
        printed = capsys.readouterr().out
        assert pages[name] in printed
        assert ":::" not in printed  # of mkdocstrings: names of the Python API are summarised


def test_train_evaluate_resume_and_repeat(model_directory: Path, tmp_path: Path, call) -> None:
    """A program trains, evaluates the best model by its JSON, and repeats the run from its saved configuration."""
    out, again = tmp_path / "run", tmp_path / "again"
    options = ["--model", model_directory, "--recipe", "tiny", "--limit", "12", "--epochs", "1", "--threads", "1"]
    result = call("train", "--out", out, *options)
    assert (result["out"], result["steps"]) == (str(out), 1)
    assert call("train", "--resume", out) == result
    assert call("train", "--resume", out, "--device", "cpu", "--save-minutes", "3") == result

    stored = tmp_path / "results.json"
    found = call("eval", "--model", out, "--split", "validation", "--out", stored)
    assert found == json.loads(stored.read_text())
    (metrics,) = found["results"]  # one epoch is the best and the last
    evaluation = read_metrics(out, "evaluation")[-1]
    assert metrics["text_to_image"]["R@1"] == evaluation["text_to_image"]["R@1"]
    low, high = metrics["text_to_image"]["R@10_interval"]
    assert low <= metrics["text_to_image"]["R@10"] <= high

    call("train", "--config", out / "config.json", "--out", again)
    weights = [(run / "last" / "model.safetensors").read_bytes() for run in (out, again)]
    assert weights[0] == weights[1]


def test_check_train_evaluate_compare(
    folder: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str], call
) -> None:
    run = tmp_path / "run"
    assert call("data", "check", folder, "--model", model_directory)["total"]["records"] == 24
    options = ["--recipe", "tiny", "--model", model_directory, "--epochs", "2", "--threads", "1", "--out", run]
    assert main(["train", *map(str, [folder, *options]), "--read.validation-share", "0.25", "--lr", "1e-15"]) == 0
    printed = capsys.readouterr()
    assert "18 training pairs and 6 validation images" in printed.err
    assert "no epoch was better" in printed.out
    hint = next(line for line in printed.out.splitlines() if line.startswith("evaluate: hnclip "))
    assert "--split validation --read.validation-share 0.25" in hint  # not on pairs that were trained on
    assert [row["images"] for row in call(*hint.split()[2:])["results"]] == [6, 6]

    queries, page, models = tmp_path / "queries", tmp_path / "page.md", [model_directory, run / "last"]
    data = [f"{folder},scenes/park", "--split", "validation"]
    found = call("eval", *data, "--model", *models, "--queries", queries, "--out", page)
    assert [(row["model"], row["data"]) for row in found["results"]] == [
        (str(name), source) for name in models for source in (str(folder), "scenes/park")
    ]
    assert "## All data sets" in page.read_text(encoding="utf-8")
    expected = [row["difference"] for row in found["comparisons"] if row["data"] == "scenes/park"]
    files = sorted(queries.glob("*-scenes-park-validation.jsonl"))
    by_files = call("compare", files[1], files[0], "--k", "1")
    by_models = call("compare", models[1], models[0], "scenes/park", "--split", "validation", "--k", "1")
    assert [row["difference"] for row in by_files] == [row["difference"] for row in by_models] == expected
    files[0].write_bytes(files[0].read_bytes()[:-100])
    assert main(["compare", *map(str, files)]) == 1
    assert f"{files[0]} is damaged" in capsys.readouterr().err


def test_several_models_in_either_spelling(folder: Path, tmp_path: Path, model_directory: Path, call) -> None:
    (tmp_path / "other").symlink_to(model_directory)
    both = [str(model_directory), str(tmp_path / "other")]
    for given in (["--model", *both], ["--model", both[0], "--model", both[1]]):
        found = call("eval", folder, *given, "--batch", "5")
        assert [row["model"] for row in found["results"]] == both


def test_invalid_records_fail_the_check_and_are_listed_by_training(
    folder: Path, tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "03.png").write_bytes((folder / "03.png").read_bytes()[:200])
    (folder / "04.txt").write_text(" \n")
    assert main(["data", "check", str(folder), "--quiet"]) == 1
    printed = capsys.readouterr().out
    assert "truncated image" in printed
    assert "empty caption" in printed
    words = ["--recipe", "tiny", "--model", str(model_directory), "--threads", "1", "--out", str(tmp_path / "run")]
    train = ["train", str(folder), *words]
    assert main(train) == 1
    assert "1 of 24 rows" in capsys.readouterr().err  # the empty caption
    assert main([*train, "--read.max-bad", "0.042"]) == 1
    assert "1 of 23 records" in capsys.readouterr().err  # the truncated image
    assert main([*train, "--read.max-bad", "0.2", "--epochs", "1"]) == 0
    assert len((tmp_path / "run" / "left_out.jsonl").read_text().splitlines()) == 2


def test_an_adapter_is_trained_converted_and_interpolated(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], call
) -> None:
    base, run, merged_path = str(model_directory), tmp_path / "run", tmp_path / "merged"
    words = ["--recipe", "tiny", "--model", base, "--limit", "16", "--epochs", "1", "--adapt.method", "lora"]
    call("train", *words, "--adapt.rank", "4", "--out", run)
    assert "LoRA" in call("convert", run, merged_path)["recognised"]  # of a run its best epoch
    merged = load(merged_path)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert merged.provenance is not None
    assert "--adapt.method lora" in merged.provenance.command
    assert main(["convert", base, str(merged_path)]) == 1
    assert "--replace" in capsys.readouterr().err
    assert load(merged_path).source == merged.source  # nothing was lost

    common = ["interpolate", base, run / "last", "--alpha"]
    call(*common, "0.5", "--out", tmp_path / "half")
    start, half = dict(load(base).named_parameters()), dict(load(tmp_path / "half").named_parameters())
    tuned = dict(load(run / "last").named_parameters())
    moved = "backbone.text_model.encoder.layers.0.self_attn.q_proj.weight"
    assert not tuned[moved].equal(start[moved])
    assert half[moved].allclose((start[moved] + tuned[moved]) / 2, atol=1e-7)
    found = call(*common, "0", "1", "--out", tmp_path / "chosen")
    scores = {float(alpha): data["scenes/park"]["mean_R@1"] for alpha, data in found["results"].items()}
    assert scores.keys() == {0.0, 1.0}
    assert found["alpha"] == max(scores, key=lambda alpha: scores[alpha])
    assert found["split"] == "validation"
    assert load(tmp_path / "chosen").context == merged.context


def test_cached_images_are_listed_and_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str], call) -> None:
    images = [record.image for record in scene_records("park", "train", families=1, members=4)]
    load_images(images, ImageTransform(32), cache=tmp_path)
    old = tmp_path / "images" / "0123456789abcdef"
    old.mkdir()
    (old / "index.sqlite").write_bytes(bytes(1_500_000))
    command = ["data", "cache", "--read.cache", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for part in ("4 images", "1.5 MB", "--delete old"):
        assert part in printed
    rows = call(*command, "--delete", "old")["caches"]
    assert [(row["images"], row["deleted"]) for row in rows] == [(0, True), (4, False)]
    assert not old.exists()
    (info,) = list_caches(tmp_path)
    with FileLock(info.path / "lock"):
        assert main([*command, "--delete", "all"]) == 1
    assert "in use" in capsys.readouterr().err
    assert main([*command, "--delete", "all"]) == 0
    assert list_caches(tmp_path) == []
