"""The command line as a person or a program uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hnclip.training.runs as loop
from hnclip.cli import main
from hnclip.config import RunOptions, SpeedConfig, TrainConfig, to_json
from hnclip.recipes import tiny
from hnclip.training.log import read_metrics


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hnclip", *arguments], capture_output=True, text=True, check=False)


def test_help_loads_nothing_heavy() -> None:
    """Answering in a blink is a matter of what is imported."""
    code = "import sys; from hnclip.cli import main; main(['--help']); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(found.stdout.split())
    assert "demo" in found.stdout
    assert not loaded & {"torch", "transformers", "tyro", "numpy", "matplotlib", "rich"}


COMMANDS = [
    "train",
    "eval",
    "compare",
    "data check",
    "data cache",
    "study",
    "diagnose",
    "convert",
    "interpolate",
    "encode",
    "demo",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom hnclip.cli import main\n"
        f"try: main([*'{command}'.split(), '--help'])\nexcept SystemExit: pass\nprint('\\nLOADED', *sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed, _, loaded = found.stdout.rpartition("LOADED")
    assert "usage: hnclip" in printed
    assert not set(loaded.split()) & {"torch", "transformers"}


def test_wrong_calls_say_what_is_wrong() -> None:
    unknown = run("trian")
    assert unknown.returncode == 2
    assert "no command 'trian'" in unknown.stderr
    assert run("--version").stdout.startswith("hnclip ")
    misspelt = run("train", "--optim.learning-rate", "1")
    assert misspelt.returncode == 2
    assert "--optim.learning-rate" in misspelt.stderr + misspelt.stdout
    for wrong, said in (
        (["--alpha", "0.5", "1.5"], "between 0"),
        (["--alpha"], "between 0"),
        (["--data"], "at least one"),
    ):
        refused = run("interpolate", "bundled", "bundled", *wrong)
        assert refused.returncode == 2
        assert said in refused.stderr
    impossible = run("train", "--objective.gamma", "-1")
    assert impossible.returncode == 2
    assert "gamma" in impossible.stderr
    assert "greater than or equal to 0" in impossible.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "--model", "nowhere"], "model 'nowhere': no such file"),
        (["eval", "--data", "photos"], "'photos' is not known"),
        (["train", "--data", "scenes/moon", "--out", "OUT"], "domain must be one of park, shelf"),
        (["train", "--resume", "OUT"], "holds no run to resume"),
        (["train", "--resume", "OUT", "--optim.epochs", "5"], "holds no run to resume"),
        (["train", "--config", "OUT/none.json"], "none.json"),
        (["eval", "--device", "warp"], "device 'warp'"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_directory: Path
) -> None:
    if "--model" not in arguments and "--resume" not in arguments:
        arguments = [*arguments, "--model", str(model_directory)]
    code = main([argument.replace("OUT", str(tmp_path / "run")) for argument in arguments])
    error = capsys.readouterr().err
    assert code == 1
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "run" / "config.json").exists()  # nothing stands in the way of the corrected call


def test_train_eval_resume_and_rerun(model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program trains, reads the JSON, evaluates the best model, and repeats the run from its saved configuration."""
    out, again = tmp_path / "run", tmp_path / "again"
    options = ["--model", str(model_directory), "--limit", "12", "--optim.epochs", "1", "--threads", "1", "--json"]
    assert main(["train", "--recipe", "tiny", "--out", str(out), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["out"] == str(out)
    assert result["steps"] == 1
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert main(["train", "--resume", str(out), "--json", "--device", "cpu", "--save-minutes", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == result

    stored = tmp_path / "results.json"
    assert main(["eval", "--model", str(out), "--split", "validation", "--out", str(stored), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(stored.read_text())
    (metrics,) = found["results"]  # one epoch is the best and the last
    assert metrics["model"] == f"{out} (best and last, epoch 1)"
    evaluation = read_metrics(out, "evaluation")[-1]
    assert metrics["text_to_image"]["R@1"] == evaluation["text_to_image"]["R@1"]
    assert metrics["images"] == 400
    low, high = metrics["text_to_image"]["R@10_interval"]
    assert low <= metrics["text_to_image"]["R@10"] <= high

    assert main(["train", "--config", str(out / "config.json"), "--out", str(again), "--quiet"]) == 0
    capsys.readouterr()
    same = [(run / "last" / "model.safetensors").read_bytes() for run in (out, again)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (3e-4, 4)),
        (["--model", "bundled"], (3e-4, 4)),
        (["--model", "elsewhere"], (2e-6, 10)),
        (["--model", "elsewhere", "--adapt.method", "lora"], (5e-5, 10)),
        (["--adapt.method=dora"], (5e-5, 10)),
        (["--model", "elsewhere", "--recipe", "demo", "--recipe", "lora"], (5e-5, 10)),
        (["--model", "elsewhere", "--optim.lr", "1e-3"], (1e-3, 10)),
    ],
)
def test_defaults_follow_the_model(
    arguments: list[str], expected: tuple[float, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def train(config: TrainConfig, options: RunOptions) -> None:
        asked.append((config.optim.lr, config.optim.epochs))
        raise ValueError("enough")

    monkeypatch.setattr(loop, "train", train)
    assert main(["train", *arguments]) == 1
    assert asked == [expected]


@pytest.mark.parametrize("data", ["mine", "scenes/mine", "docci"])
def test_own_data_need_a_model(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if data != "docci":
        (tmp_path / data).mkdir(parents=True)
    assert main(["train", "--data", data, "--out", str(tmp_path / "run")]) == 1
    assert "need a --model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_that_improves_nothing_says_so(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a run"
    options = ["--model", str(model_directory), "--recipe", "tiny", "--limit", "12", "--optim.lr", "1e-15"]
    assert main(["train", *options, "--out", str(out), "--optim.epochs", "1", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "no epoch was better" in said
    for command in ("hnclip eval --model", "hnclip index IMAGES --model", "hnclip train --resume"):
        assert f"{command} '{out}'" in said


@pytest.mark.parametrize(
    "wrong", [["--optim.lr", "1"], ["--seed", "7"], ["--out", "elsewhere"], ["--recipe", "tiny"], ["--limit", "3"]]
)
def test_resuming_refuses_another_configuration(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(to_json(tiny()))
    assert main(["train", "--resume", str(run), *wrong]) == 1
    error = capsys.readouterr().err
    assert "--resume continues with the run's own configuration: only --device, --threads, --speed" in error
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_resuming_takes_other_options_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not given is as it was saved, but for the directory, which may have moved."""
    run, asked = tmp_path / "run", []
    run.mkdir()
    (run / "config.json").write_text(to_json(tiny()))
    (run / "options.json").write_text(to_json(RunOptions(out=Path("before"), threads=3, evaluate_batch=7)))

    def resume(out: Path, options: RunOptions) -> None:
        asked.append((out, options))
        raise ValueError("no run")

    monkeypatch.setattr(loop, "resume", resume)
    words = ["--device", "cpu", "--speed.parallel", "fsdp", "--save-minutes", "3", "--tensorboard"]
    assert main(["train", "--resume", str(run), *words]) == 1
    speed = SpeedConfig(parallel="fsdp")
    expected = RunOptions(
        out=run, device="cpu", threads=3, speed=speed, save_minutes=3.0, evaluate_batch=7, tensorboard=True
    )
    assert asked == [(run, expected)]


@pytest.mark.parametrize("flag", ["--config", "--resume"])
def test_a_configuration_that_is_wrong_is_named_with_its_field(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"optim": {"epochs": 0}, "outt": "x"}')
    assert main(["train", flag, str(path if flag == "--config" else tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: optim.epochs: Input should be greater than or equal to 1, got 0; outt: there is no such" in line


def test_a_lora_run_is_an_adapter_that_is_evaluated_merged_and_interpolated(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hnclip.models.load import load

    base, run_directory = str(model_directory), tmp_path / "run"
    arguments = ["--recipe", "tiny", "--model", base, "--limit", "16", "--optim.epochs", "1", "--adapt.method", "lora"]
    assert main(["train", *arguments, "--adapt.rank", "4", "--optim.scale-lr", "0", "--out", str(run_directory)]) == 0
    said = capsys.readouterr().err
    assert "parameters train" in said
    assert "temperature fixed" in said
    assert "hnclip train --recipe paper" in (run_directory / "best" / "README.md").read_text(encoding="utf-8")

    assert main(["convert", str(run_directory / "best"), str(tmp_path / "merged"), "--json"]) == 0
    output = capsys.readouterr()
    assert "LoRA" in json.loads(output.out)["recognised"]
    assert output.err == ""
    merged = load(tmp_path / "merged")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert merged.provenance is not None
    assert "--adapt.method lora" in merged.provenance.command
    assert main(["convert", base, str(tmp_path / "merged")]) == 1
    assert "exists already; choose another directory or pass --replace" in capsys.readouterr().err
    assert main(["convert", base, str(tmp_path / "merged"), "--replace", "--context", "300"]) == 1
    assert "248 positions, more than the 77" in capsys.readouterr().err
    assert load(tmp_path / "merged").source == merged.source  # nothing was lost

    common = ["interpolate", base, str(run_directory / "last"), "--alpha"]
    assert main([*common, "0.5"]) == 1
    assert "would do nothing: give --out" in capsys.readouterr().err
    assert main([*common, "0.5", "--out", str(tmp_path / "half")]) == 0
    capsys.readouterr()
    start, half = dict(load(base).named_parameters()), dict(load(tmp_path / "half").named_parameters())
    tuned = dict(load(run_directory / "last").named_parameters())
    moved = "backbone.text_model.encoder.layers.0.self_attn.q_proj.weight"
    assert not tuned[moved].equal(start[moved])
    assert half[moved].allclose((start[moved] + tuned[moved]) / 2, atol=1e-7)
    assert main([*common, "0", "1", "--out", str(tmp_path / "chosen"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scores = {float(a): data["scenes/park"]["mean_R@1"] for a, data in found["results"].items()}
    assert scores.keys() == {0.0, 1.0}
    assert "R@1_interval" not in found["results"]["0.0"]["scenes/park"]["text_to_image"]  # they choose nothing
    assert found["alpha"] == max(scores, key=lambda alpha: scores[alpha])
    assert found["split"] == "validation"
    assert load(tmp_path / "chosen").context == merged.context


def test_a_sweep_prints_a_table(model_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(model_directory)
    assert main(["interpolate", model, model, "--alpha", "0", "0.5", "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "scenes/park, validation split" in printed
    assert "α 0.5" in printed
    assert "best mean R@1: α 0" in printed


def test_a_log_file_has_messages_and_errors_also_of_a_quiet_command(
    tmp_path: Path, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "hnclip.log", tmp_path / "out"
    command = ["convert", str(model_directory), str(out), "--quiet", "--log-file", str(log)]
    assert [main(command), main(command)] == [0, 1]
    printed = capsys.readouterr()
    assert printed.out == f"written: {out}\n"
    assert printed.err.startswith(f"hnclip convert: {out} exists already")
    first, second = log.read_text().splitlines()
    assert "INFO hnclip: recognised: CLIP" in first
    assert "ERROR hnclip: hnclip convert: " in second
