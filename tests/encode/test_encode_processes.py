"""Several real processes and one directory: the same bytes as one process, also if some are killed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from encode_helpers import contents, encode_all, options, start, write_table
from hnclip.encode import shards
from hnclip.encode.embeddings import open_embeddings
from hnclip.encode.options import EncodeOptions
from hnclip.encode.shards import encode

SECONDS = 300


@pytest.fixture(scope="module")
def job(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EncodeOptions]:
    """23 records, two of them with damaged images: 5 shards, the last of 3 records."""
    data = write_table(tmp_path_factory.mktemp("data"), 23)
    (data.parent / "06.png").write_bytes(b"no image")
    (data.parent / "22.png").write_bytes(b"")
    return lambda out, **changed: options(data, model_directory, out, max_bad=0.2, **changed)


@pytest.fixture(scope="module")
def alone(job: Callable[..., EncodeOptions], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    encode(job(out))
    return contents(out)


def wait_for(process: BaseProcess) -> None:
    process.join(SECONDS)
    assert process.exitcode == 0


@pytest.mark.parametrize("partitions", [["0/3", "1/3", "2/3"], ["0/1"] * 3])
def test_processes_write_what_one_process_writes(
    partitions: list[str], job: Callable[..., EncodeOptions], alone: dict[str, bytes], tmp_path: Path
) -> None:
    for process in [start(encode_all, job(tmp_path / "out", partition=partition)) for partition in partitions]:
        wait_for(process)
    assert contents(tmp_path / "out") == alone


def hang(given: EncodeOptions, name: str, sign: Path) -> None:
    """EncodeOptions, but stop before a file gets its name."""

    @contextmanager
    def hanging(path: Path) -> Iterator[Path]:
        with replace_file(path) as partial:
            yield partial
            if path.name == name:
                sign.touch()
                time.sleep(10 * SECONDS)

    replace_file, shards.replace_file = shards.replace_file, hanging  # type: ignore[assignment]
    encode(given)


@pytest.mark.parametrize("name", ["img_emb_2.npy", "metadata_2.parquet", "manifest_2.json"])
def test_a_killed_process_loses_its_shard_only(
    name: str, job: Callable[..., EncodeOptions], alone: dict[str, bytes], tmp_path: Path
) -> None:
    out, sign = tmp_path / "out", tmp_path / "sign"
    process = start(hang, job(out), name, sign)
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
    result = encode(job(out))
    assert (result.encoded, result.kept) == (3, 2)
    assert (out / "img_emb/img_emb_1.npy").stat().st_mtime_ns == before
    assert contents(out) == alone


def limited(given: EncodeOptions, said: Path) -> None:
    """A disk with room for files of 500 bytes."""
    import transformers  # noqa: F401  what it writes at import may be larger

    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        encode(given)
    except OSError as error:
        said.write_text(str(error)[:400])


def test_a_full_disk_is_reported_and_loses_nothing(
    job: Callable[..., EncodeOptions], alone: dict[str, bytes], tmp_path: Path
) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    encode(job(out, partition="0/5"))
    wait_for(start(limited, job(out), said))
    assert "shard 1 of" in said.read_text()
    assert "the same command continues" in said.read_text()
    assert encode(job(out)).kept == 1
    assert contents(out) == alone
