"""Several real processes and one directory: the same bytes as one process, whoever is killed and whenever."""

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

from hnclip.options import Encode
from hnclip.search import encode as encode_module
from hnclip.search import shards
from hnclip.search.embeddings import open_embeddings
from hnclip.search.encode import encode

SECONDS = 300


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 records, two of them without a picture: 5 shards, the last of 3 records."""
    data = write_table(tmp_path_factory.mktemp("data"), 23)
    (data.parent / "06.png").write_bytes(b"no picture")
    (data.parent / "22.png").write_bytes(b"")
    return data


@pytest.fixture(scope="module")
def job(table: Path, model_directory: Path) -> Callable[..., Encode]:
    return lambda out, **changed: options(table, model_directory, out, max_bad=0.2, **changed)


@pytest.fixture(scope="module")
def alone(job: Callable[..., Encode], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert encode(job(out)).to_dict()["left_out"] == 2
    return contents(out)


def wait_for(process: BaseProcess) -> None:
    process.join(SECONDS)
    assert process.exitcode == 0


def wait_until(found: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_partitions_write_what_one_process_writes(
    job: Callable[..., Encode], alone: dict[str, bytes], tmp_path: Path
) -> None:
    processes = [start(encode_all, job(tmp_path, partition=f"{number}/3")) for number in range(3)]
    for process in processes:
        wait_for(process)
    assert contents(tmp_path) == alone


def test_processes_that_do_the_same_do_not_disturb_each_other(
    job: Callable[..., Encode], alone: dict[str, bytes], tmp_path: Path
) -> None:
    processes = [start(encode_all, job(tmp_path)) for _ in range(3)]
    for process in processes:
        wait_for(process)
    assert contents(tmp_path) == alone


def hang(given: Encode, where: str, sign: Path) -> None:
    """Encode, but stop for ever in shard 2: before its vectors are made, or when all but the rename is done."""

    def forever() -> None:
        sign.touch()
        time.sleep(10 * SECONDS)

    @contextmanager
    def hanging(path: Path) -> Iterator[Path]:
        with replace_directory(path) as partial:
            yield partial
            if path.name == "00002":
                forever()

    replace_directory, encode_records = shards.replace_directory, encode_module.encode_records
    if where == "writing":
        shards.replace_directory = hanging  # type: ignore[assignment]
    else:
        encode_module.encode_records = lambda records, *rest: (  # type: ignore[assignment]
            forever() if records[0].id.startswith("10") else encode_records(records, *rest)
        )
    encode(given)


@pytest.mark.parametrize("where", ["encoding", "writing"])
def test_a_killed_process_loses_its_shard_only(
    where: str, job: Callable[..., Encode], alone: dict[str, bytes], tmp_path: Path
) -> None:
    out, sign = tmp_path / "out", tmp_path / "sign"
    process = start(hang, job(out), where, sign)
    wait_until(sign.exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(SECONDS)
    left = sorted(path.name for path in (out / "shards").iterdir())
    assert [name for name in left if not name.startswith(".")] == ["00000", "00001"]
    assert any(name.startswith(".00002.new-") for name in left) == (where == "writing")
    with pytest.raises(ValueError, match=r"3 of 5 shards missing \(2, 3, 4\)") as incomplete:
        open_embeddings(out)
    assert str(incomplete.value).endswith(f"--shard-size 5 --batch 4 --threads 1 --read.max-bad 0.2 --out {out}")
    before = (out / "shards/00001/images.npy").stat().st_mtime_ns
    result = encode(job(out))
    assert (result.encoded, result.kept) == (3, 2)
    assert (out / "shards/00001/images.npy").stat().st_mtime_ns == before
    assert contents(out) == alone


def test_a_process_that_comes_second_keeps_what_is_there(
    job: Callable[..., Encode], alone: dict[str, bytes], tmp_path: Path
) -> None:
    """It hangs before the rename, another process does all the work and clears up, then it goes on."""
    out = tmp_path / "out"

    def others() -> None:
        monkey.undo()
        encode(job(out))

    real = shards.write_shard

    def write(directory: Path, number: int, *rest: object) -> object:
        if number == 0:
            others()
        return real(directory, number, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(encode_module, "write_shard", write)
        encode(job(out))
    assert contents(out) == alone

    @contextmanager
    def swept(path: Path) -> Iterator[Path]:
        with replace_directory(path) as partial:
            shards._clear_leftovers(out)
            yield partial

    replace_directory = shards.replace_directory
    info = shards.read_shard(out, 1)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(shards, "replace_directory", swept)
        empty = shards.Shard([], None, None, None, 0, 0, [])  # type: ignore[arg-type]
        shards.write_shard(out, 1, empty, {})
        assert shards.read_shard(out, 1) == info
        shards.remove_shard(out, 1)
        with pytest.raises(OSError, match=r"could not write shard 1 of .* the same command goes on"):
            shards.write_shard(out, 1, empty, {})


def limited(given: Encode, said: Path) -> None:
    """A disk on which no file of more than 500 bytes has room."""
    import transformers  # noqa: F401  what it writes at import may be larger

    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        encode(given)
    except OSError as error:
        said.write_text(str(error)[:400])


def test_a_full_disk_is_said_and_survived(job: Callable[..., Encode], alone: dict[str, bytes], tmp_path: Path) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    encode(job(out, partition="0/5"))
    wait_for(start(limited, job(out), said))
    assert "could not write shard 1 of" in said.read_text()
    assert "the same command goes on" in said.read_text()
    assert {path.name for path in (out / "shards").iterdir()} == {"00000"}
    encode(job(out))
    assert contents(out) == alone
