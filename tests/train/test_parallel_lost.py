"""A worker that is lost or hangs: the others end, one of them says so, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import together
import torch
from test_parallel import config_for, options_for, plain, weights

import hnclip.train.loop as loop
from hnclip.config import RunOptions, TrainConfig
from hnclip.data.scenes import scene_records
from hnclip.train.log import read_metrics
from hnclip.train.loop import resume, train
from hnclip.train.lost import WorkerLost, is_loss


def hurt(number: int, config: TrainConfig, options: RunOptions, victim: int, sign: int) -> str:
    """A run in which one process gets a signal after its third step; what becomes of the others."""
    original = loop.Run._step

    def struck(self: loop.Run, *arguments: object, **others: object) -> float:
        loss = original(self, *arguments, **others)  # type: ignore[arg-type]
        if self.step == 3 and number == victim:
            os.kill(os.getpid(), sign)
        return loss

    patch = plain(double=False)
    patch.setattr(loop.Run, "_step", struck)
    try:
        train(config, options)
    except WorkerLost as error:
        return f"said: {error}"
    except SystemExit as exit:
        return f"silent {exit.code}"
    return "finished"


def go_on(number: int, out: Path) -> None:
    plain(double=False)
    resume(out)


def go_through(number: int, config: TrainConfig, options: RunOptions) -> None:
    plain(double=False)
    train(config, options)


@pytest.mark.parametrize(
    ("world", "victim", "sign", "mode"),
    [
        (2, 1, signal.SIGKILL, "ddp"),
        pytest.param(4, 2, signal.SIGKILL, "fsdp", marks=pytest.mark.slow),
        pytest.param(2, 1, signal.SIGSTOP, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_the_others_end_and_the_run_goes_on(
    world: int, victim: int, sign: int, mode: str, model_directory: Path, tmp_path: Path
) -> None:
    config = config_for(model_directory)
    options = replace(options_for(tmp_path / "run", mode), save_every=2)
    patience = "5" if sign == signal.SIGSTOP else "120"
    processes = together.start(world, hurt, tmp_path / "found", config, options, victim, sign, HNCLIP_TIMEOUT=patience)
    others = [process for number, process in enumerate(processes) if number != victim]
    try:
        together.finish(others)
    finally:
        processes[victim].kill()
        processes[victim].join()
    ends = [together.found(tmp_path / "found", number) for number in range(world) if number != victim]
    (said,) = [end for end in ends if end.startswith("said")]
    assert set(ends) - {said} <= {"silent 1"}
    assert "a process of the job was lost, does not answer" in said
    assert re.search(r"[34] of 4 steps were done, the checkpoint is of step 2", said)
    assert f"torchrun --nproc-per-node {world} -m hnclip train --resume {tmp_path / 'run'}" in said

    if world > 2:
        return  # that runs of four processes go on is seen elsewhere
    together.run(world, go_on, tmp_path / "again", tmp_path / "run")
    together.run(world, go_through, tmp_path / "unhurt", config, replace(options, out=tmp_path / "whole"))
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "run")[name], value), name
    assert [entry["step"] for entry in read_metrics(tmp_path / "run", "step")] == [1, 2, 3, 4]


def test_only_broken_connections_are_a_loss() -> None:
    assert is_loss(torch.distributed.DistNetworkError("gone"))
    assert is_loss(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"))
    assert not is_loss(RuntimeError("shape '[2]' is invalid"))
    assert not is_loss(torch.OutOfMemoryError("out of memory"))


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """Pictures with captions, as a user has them."""
    folder = tmp_path / "album"
    folder.mkdir()
    rows = []
    for split, families in (("train", 5), ("validation", 2)):
        for record in scene_records("park", split, families=families, members=4):
            name = re.sub(r"\W+", "-", record.id) + ".png"
            (folder / name).write_bytes(record.image.read())
            rows.append({"image": name, "caption": record.captions[0], "split": split})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "pairs.jsonl"


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the workers in /proc")
def test_torchrun(album: Path, model_directory: Path, tmp_path: Path) -> None:
    """The command itself: a worker is killed, torchrun ends with an error, one message says how to go on."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hnclip", "train"]
    options = ["--out", str(out), "--model", str(model_directory), "--data", str(album), "--device", "cpu"]
    options += ["--optim.micro-batch", "4", "--optim.accumulate", "2", "--save-every", "2", "--optim.epochs", "2000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment) as job:
        deadline = time.monotonic() + together.SECONDS
        log = out / "metrics.jsonl"
        while not (log.exists() and log.read_text().count('"kind": "step"') > 3):
            assert job.poll() is None, job.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(max(children(job.pid)), signal.SIGKILL)
        said = job.stderr.read()  # type: ignore[union-attr]
        assert job.wait() != 0
    assert said.count("a process of the job was lost") == 1
    assert said.count("20 training pairs") == 1
    assert f"continue, with any number of processes: torchrun --nproc-per-node 2 -m hnclip train --resume {out}" in said
    assert (out / "checkpoint.pt").exists()
