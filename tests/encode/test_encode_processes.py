"""Several real processes and one directory: the same bytes as one process, also if some are killed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from encode_helpers import contents, run, start, write_table
from hnclip.encode import shards
from hnclip.encode.embeddings import open_embeddings

SECONDS = 300
Job = Callable[..., Any]


@pytest.fixture(scope="module")
def job(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """23 records, two of them with damaged images: 5 shards, the last of 3 records."""
    data = write_table(tmp_path_factory.mktemp("data"), 23)
    (data.parent / "06.png").write_bytes(b"no image")
    (data.parent / "22.png").write_bytes(b"")
    return partial(run, data, model_directory, max_bad=0.2)


@pytest.fixture(scope="module")
def alone(job: Job, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    job(out)
    return contents(out)


def wait_for(process: BaseProcess) -> None:
    process.join(SECONDS)
    assert process.exitcode == 0


@pytest.mark.parametrize("partitions", [["1/3", "2/3", "3/3"], ["1/1"] * 2])
def test_processes_write_what_one_process_writes(
    partitions: list[str], job: Job, alone: dict[str, bytes], tmp_path: Path
) -> None:
    for process in [start(job, tmp_path / "out", partition=partition) for partition in partitions]:
        wait_for(process)
    assert contents(tmp_path / "out") == alone


def encode_and_hang(job: Job, out: Path, name: str, sign: Path) -> None:
    """Encode, but stop before a file gets its name."""

    @contextmanager
    def hanging(path: Path) -> Iterator[Path]:
        with replace_file(path) as partial:
            yield partial
            if path.name == name:
                sign.touch()
                time.sleep(10 * SECONDS)

    replace_file, shards.replace_file = shards.replace_file, hanging  # type: ignore[assignment]
    job(out)


@pytest.mark.parametrize("name", ["img_emb_2.npy", "manifest_2.json"])
def test_a_killed_process_loses_its_shard_only(name: str, job: Job, alone: dict[str, bytes], tmp_path: Path) -> None:
    out, sign = tmp_path / "out", tmp_path / "sign"
    process = start(encode_and_hang, job, out, name, sign)
    end = time.monotonic() + SECONDS
    while not sign.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    with pytest.raises(ValueError, match=r"3 of 5 shards missing \(2, 3, 4\)"):
        open_embeddings(out)
    before = (out / "img_emb/img_emb_1.npy").stat().st_mtime_ns
    for leftover in out.glob("*/.*"):
        os.utime(leftover, (0, 0))
    result = job(out)
    assert (result.encoded, result.kept) == (3, 2)
    assert (out / "img_emb/img_emb_1.npy").stat().st_mtime_ns == before
    assert contents(out) == alone


def encode_on_a_full_disk(job: Job, out: Path, message: Path) -> None:
    """There is room for files of 500 bytes."""
    import transformers  # noqa: F401  what it writes at import may be larger

    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        job(out)
    except OSError as error:
        message.write_text(str(error)[:400])


def test_a_full_disk_is_reported_and_loses_nothing(job: Job, alone: dict[str, bytes], tmp_path: Path) -> None:
    out, message = tmp_path / "out", tmp_path / "message"
    job(out, partition="1/5")
    wait_for(start(encode_on_a_full_disk, job, out, message))
    assert "shard 1 of" in message.read_text()
    assert job(out).kept == 1
    assert contents(out) == alone
