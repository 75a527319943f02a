"""`hnclip encode`: the vectors, several processes and one directory, damage, and what is skipped or refused."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encode_helpers import contents, run, save_image, start, write_table
from hnclip.cli import main
from hnclip.data.batching import pad_texts
from hnclip.data.image_sources import FileImage
from hnclip.data.images import preprocess_image
from hnclip.data.sources import open_data
from hnclip.encode import shards
from hnclip.encode.embeddings import manifest_bytes, open_embeddings
from hnclip.encode.loop import encode_images
from hnclip.encode.ray_engine import ShardActor, divide_resources
from hnclip.encode.shards import EncodeSettings
from hnclip.models.load import load

SECONDS = 300
Job = Callable[..., Any]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 records in 3 shards. An image of the second shard is damaged."""
    data = write_table(tmp_path_factory.mktemp("data"), 13)
    (data.parent / "06.png").write_bytes(b"no image")
    return data


@pytest.fixture(scope="module")
def job(table: Path, model_directory: Path) -> Job:
    return partial(run, table, model_directory, max_bad=0.2)


@pytest.fixture(scope="module")
def encoded(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process writes."""
    out = tmp_path_factory.mktemp("encoded") / "all"
    job(out)
    return out


@pytest.fixture
def copy(encoded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "copy"))


def vectors(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    found = open_embeddings(directory, verify=True)
    return np.concatenate(found.images), np.concatenate(found.captions)


def test_vectors_are_those_of_each_image_and_caption_alone(table: Path, encoded: Path, model_directory: Path) -> None:
    """The slow twin encodes every image and every caption alone, padded to the model's context."""
    model = load(model_directory).eval()
    records = [record for record in open_data(str(table)).records if "06.png" not in record.image.key]
    images, captions, owners = [], [], []
    with torch.no_grad():
        for row, record in enumerate(records):
            pixels = preprocess_image(record.image.load(), model.image_transform)[None]
            images.append(model.encode_images(pixels).vectors[0].numpy())
            for text in record.captions:
                padded = pad_texts([*model.text_transform([text]), (0,) * model.context], model.text_transform.pad)
                captions.append(model.encode_texts(padded).vectors[0].numpy())
                owners.append(row)
    found = open_embeddings(encoded)
    for actual, expected in zip(vectors(encoded), (images, captions), strict=True):
        np.testing.assert_allclose(actual, np.stack(expected), atol=2e-6)
    assert found.texts == tuple(text for record in records for text in record.captions)
    assert found.owners.tolist() == owners
    assert found.ids == tuple(record.id for record in records)
    rows = pytest.importorskip("pyarrow.parquet").read_table(encoded / "metadata").to_pylist()  # as documented
    assert [(row["image_path"], row["caption"]) for row in rows] == [(r.image.key, r.captions[0]) for r in records]


def test_the_loop_keeps_the_order_and_reports_bad_images(table: Path, model_directory: Path) -> None:
    model = load(model_directory).train()
    files = [table.parent / f"{name}.png" for name in ("00", "06", "01", "00", "missing", "02", "03")]
    found = encode_images(model, [FileImage(file) for file in files], batch=3)
    assert found.kept == (0, 2, 3, 5, 6)
    assert {row: problem.kind for row, problem in found.problems.items()} == {1: "corrupt image", 4: "missing image"}
    assert model.training
    expected = model.encode([files[row] for row in found.kept], to="torch")
    torch.testing.assert_close(found.vectors, expected, atol=2e-6, rtol=0)


def test_half_precision_captions_alone_and_metadata_without_pyarrow(
    table: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions alone need no images."""
    (tmp_path / "pairs.csv").write_bytes(table.read_bytes())
    write = partial(run, tmp_path / "pairs.csv", model_directory, only="captions")
    write(tmp_path / "full")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path / "half", dtype="float16")
    full, half = (open_embeddings(tmp_path / name, verify=True) for name in ("full", "half"))
    assert not half.images
    assert (half.ids, half.texts) == (full.ids, full.texts)
    np.testing.assert_array_equal(np.concatenate(half.captions), np.concatenate(full.captions).astype(np.float16))


def test_of_a_folder_without_captions_the_images_are_encoded(model_directory: Path, tmp_path: Path) -> None:
    for number, file in enumerate(("val/one.png", "a.png", "val/one.jpg", "val/.hidden.png")):
        save_image(tmp_path / "images" / file, number)
    for split, ids in {
        "all": ("a.png", "val/one.jpg", "val/one.png"),
        "validation": ("val/one.jpg", "val/one.png"),
    }.items():
        run(tmp_path / "images", model_directory, tmp_path / split, split=split)
        assert open_embeddings(tmp_path / split, verify=True).ids == ids


# Several processes and one directory --------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [["1/3", "2/3", "3/3"], ["1/1"] * 2])
def test_processes_write_what_one_process_writes(
    partitions: list[str], job: Job, encoded: Path, tmp_path: Path
) -> None:
    for process in [start(job, tmp_path / "out", partition=partition) for partition in partitions]:
        process.join(SECONDS)
        assert process.exitcode == 0
    assert contents(tmp_path / "out") == contents(encoded)


def encode_and_hang(job: Job, out: Path, sign: Path) -> None:
    """Encode, but stop before the manifest of the second shard gets its name."""

    @contextmanager
    def hanging(path: Path) -> Iterator[Path]:
        with replace_file(path) as partial:
            yield partial
            if path.name == "manifest_1.json":
                sign.touch()
                time.sleep(10 * SECONDS)

    replace_file, shards.replace_file = shards.replace_file, hanging  # type: ignore[assignment]
    job(out)


def test_a_killed_process_loses_its_shard_only(job: Job, encoded: Path, tmp_path: Path) -> None:
    out, sign = tmp_path / "out", tmp_path / "sign"
    process = start(encode_and_hang, job, out, sign)
    while not sign.exists():
        process.join(0.05)
        assert process.exitcode is None
    process.kill()
    process.join(SECONDS)
    with pytest.raises(ValueError, match=r"2 of 3 shards missing \(1, 2\)"):
        open_embeddings(out)
    for leftover in out.glob("*/.*"):
        os.utime(leftover, (0, 0))
    result = job(out)
    assert (result.encoded, result.kept) == (2, 1)
    assert contents(out) == contents(encoded)


def encode_on_a_full_disk(job: Job, out: Path, message: Path) -> None:
    """There is room for files of 500 bytes."""
    import transformers  # noqa: F401  what it writes at import may be larger

    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        job(out)
    except OSError as error:
        message.write_text(str(error)[:400])


def test_a_full_disk_is_reported_and_loses_nothing(job: Job, encoded: Path, tmp_path: Path) -> None:
    out, message = tmp_path / "out", tmp_path / "message"
    job(out, partition="1/3")
    start(encode_on_a_full_disk, job, out, message).join(SECONDS)
    assert "shard 1 of" in message.read_text()
    assert job(out).kept == 1
    assert contents(out) == contents(encoded)


def test_a_changed_image_changes_its_shard_only(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 7), tmp_path / "out"
    run(data, model_directory, out)
    before, old = contents(out), vectors(out)[0][6]
    save_image(data.parent / "06.png", 99)
    result = run(data, model_directory, out)
    assert (result.encoded, result.kept) == (1, 1)
    changed = {name for name, content in contents(out).items() if before[name] != content}
    assert changed == {"manifest/manifest_1.json", "img_emb/img_emb_1.npy"}
    assert not np.allclose(vectors(out)[0][6], old)


# Ray ----------------------------------------------------------------------------------------------------------


def test_an_actor_writes_what_a_process_writes(model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 12)
    run(data, model_directory, tmp_path / "local")
    given = {"shard_size": 5, "batch": 4, "threads": 1, "device": "cpu"}
    actor = ShardActor(EncodeSettings(str(data), tmp_path / "actors", str(model_directory), **given), str(tmp_path))  # type: ignore[arg-type]
    done = actor({"shard": np.array([2, 0, 1])})
    assert (list(done["shard"]), done["error"]) == ([2, 0, 1], [""] * 3)
    assert contents(tmp_path / "actors") == contents(tmp_path / "local")
    (tmp_path / "data/06.png").write_bytes(b"no image")  # errors are rows
    assert "1 of 12 records" in actor({"shard": np.array([1])})["error"][0]
    assert divide_resources({"CPU": 16.0, "GPU": 2.0}, EncodeSettings("", Path()), None, 9) == (2, 8, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_writes_what_one_process_writes(job: Job, encoded: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'hnclip[scale]'")
    job(tmp_path, engine="ray", workers=2)
    assert contents(tmp_path) == contents(encoded)


# Damage and bad input -----------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["img_emb_1.npy", "text_emb_1.npy", "metadata_1.parquet", "manifest_1.json"])
def test_damage_is_found_and_the_same_command_repairs_it(
    name: str, damage: Callable[[Path], None], copy: Path, encoded: Path, job: Job
) -> None:
    (file,) = copy.glob(f"*/{name}")
    damage(file)
    missing = name.startswith("manifest") and damage is Path.unlink
    with pytest.raises(ValueError, match="1 of 3 shards missing" if missing else name):
        open_embeddings(copy, verify=True)
    assert job(copy).encoded == 1
    assert contents(copy) == contents(encoded)


def test_directories_of_other_files_or_another_format_are_refused(copy: Path, job: Job, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no embeddings"):
        open_embeddings(tmp_path)
    with pytest.raises(ValueError, match="other files"):
        job(tmp_path)
    file = copy / "manifest/manifest_0.json"
    content = json.loads(file.read_bytes())
    del content["checksum"]
    file.write_bytes(manifest_bytes({**content, "job": {**content["job"], "format": 7}}))
    with pytest.raises(ValueError, match="version"):
        open_embeddings(copy)


def test_another_job_is_refused(table: Path, encoded: Path, model_directory: Path) -> None:
    for changed in ({"batch": 3}, {"model": "bundled"}):
        with pytest.raises(ValueError, match=f"differ in .*{next(iter(changed))}"):
            run(table, out=encoded, **{"model": model_directory, **changed})


def test_bad_images_are_skipped_listed_and_limited(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 12), tmp_path / "out"
    (data.parent / "01.png").write_bytes(b"no image")
    (data.parent / "07.png").unlink()
    with pytest.raises(ValueError, match="1 of 12 records"):
        run(data, model_directory, out, max_bad=0.05)
    assert [path.name for path in (out / "manifest").iterdir()] == ["manifest_0.json"]  # it stopped at once
    part = partial(run, data, model_directory, tmp_path / "parts", max_bad=0.1)
    assert [part(partition=f"{k}/3").missing for k in (1, 2)] == [(1, 2), (2,)]
    with pytest.raises(ValueError, match="2 of 12 records"):  # all partitions together have too many
        part(partition="3/3")
    result = run(data, model_directory, out, max_bad=0.2)
    assert result.counts == {"rows": 10, "captions": 20, "truncated": 0, "skipped": 2}
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["kind"], row["where"][:2]) for row in listed] == [("corrupt image", "01"), ("missing image", "07")]


def test_the_command_of_a_partition_names_the_one_that_completes_it(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_table(tmp_path / "data", 7), tmp_path / "out"
    words = ["encode", str(data), "--model", str(model_directory), "--out", str(out), "--shard-size", "5"]
    assert main([*words, "--partition", "1/2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["complete"], result["missing"], result["encoded"]) == (False, [1], 1)
    assert main(shlex.split(result["command"])[1:]) == 0
    truncate(out / "text_emb/text_emb_1.npy")
    assert main([*words, "--verify"]) == 1
    assert "text_emb_1.npy" in capsys.readouterr().err
