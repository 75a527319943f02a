"""`hnclip encode`: the vectors, and what is refused, skipped or encoded again."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encode_helpers import contents, run, save_picture, write_table
from hnclip.cli import main
from hnclip.data.batching import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.sources import open_data
from hnclip.encode.embeddings import open_embeddings
from hnclip.models.load import load

RECORDS = 13


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data"), RECORDS)


@pytest.fixture(scope="module")
def encoded(table: Path, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "all"
    run(table, model_directory, out)
    return out


def vectors(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    found = open_embeddings(directory, verify=True)
    return np.concatenate(found.images), np.concatenate(found.captions)


def test_vectors_are_those_of_each_image_and_caption_alone(table: Path, encoded: Path, model_directory: Path) -> None:
    """The slow twin encodes every image and every caption alone, padded to the model's context."""
    model = load(model_directory).eval()
    records = open_data(str(table)).records
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
    rows = (
        pytest.importorskip("pyarrow.parquet").read_table(encoded / "metadata").to_pylist()
    )  # as hnclip docs encode shows
    assert rows == list(found.records())
    assert [(row["image_path"], row["caption"]) for row in rows] == [(r.image.key, r.captions[0]) for r in records]
    files = sorted((encoded / "text_emb").glob("*.npy"))
    np.testing.assert_array_equal(np.concatenate([np.load(file) for file in files]), vectors(encoded)[1])


def test_half_precision_and_metadata_without_pyarrow(
    table: Path, encoded: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    run(table, model_directory, tmp_path, dtype="float16")
    ids = open_embeddings(tmp_path, verify=True).ids
    assert (tmp_path / "metadata/metadata_0.jsonl").exists()
    monkeypatch.undo()
    assert ids == open_embeddings(encoded).ids
    for half, full in zip(vectors(tmp_path), vectors(encoded), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_array_equal(half, full.astype(np.float16))


def test_captions_alone_need_no_images(table: Path, encoded: Path, model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_bytes(table.read_bytes())
    run(tmp_path / "pairs.csv", model_directory, tmp_path / "out", only="captions")
    found = open_embeddings(tmp_path / "out")
    assert not found.images
    np.testing.assert_array_equal(np.concatenate(found.captions), vectors(encoded)[1])
    np.testing.assert_array_equal(found.owners, open_embeddings(encoded).owners)


def test_existing_shards_are_kept(table: Path, encoded: Path, model_directory: Path, tmp_path: Path) -> None:
    again = partial(run, table, model_directory, tmp_path)
    first = again(partition="2/2")
    assert (first.encoded, first.kept, first.missing, first.counts) == (1, 0, (0, 2), None)
    written = (tmp_path / "img_emb/img_emb_1.npy").stat().st_mtime_ns
    second = again()
    assert (second.encoded, second.kept, second.missing) == (2, 1, ())
    assert (tmp_path / "img_emb/img_emb_1.npy").stat().st_mtime_ns == written
    third = again(partition=(7, 9))  # more partitions than shards
    assert (third.encoded, third.kept) == (0, 0)
    assert third.counts == {"rows": RECORDS, "captions": 25, "truncated": 0, "skipped": 0}
    assert contents(tmp_path) == contents(encoded)


def test_a_changed_image_changes_its_shard_only(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 7), tmp_path / "out"
    run(data, model_directory, out)
    before, opened = contents(out), open_embeddings(out)
    old = np.concatenate(opened.images)[6]
    save_picture(data.parent / "06.png", 99)
    result = run(data, model_directory, out)
    assert (result.encoded, result.kept) == (1, 1)
    changed = {name for name, content in contents(out).items() if before[name] != content}
    assert changed == {"manifest/manifest_1.json", "img_emb/img_emb_1.npy"}
    assert not np.allclose(vectors(out)[0][6], old)
    np.testing.assert_array_equal(np.concatenate(opened.images)[6], old)  # an open directory does not change


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"batch": 3}, "batch"),
        ({"shard_size": 1}, "shard-size"),
        ({"dtype": "float16"}, "dtype"),
        ({"only": "images"}, "only"),
        ({"split": "train", "partition": "2/4"}, "data"),
        ({"model": "bundled"}, "model"),
    ],
)
def test_another_job_is_refused(
    table: Path, encoded: Path, model_directory: Path, changed: dict[str, Any], name: str
) -> None:
    before = contents(encoded)
    with pytest.raises(ValueError, match=f"differ in .*{name}"):
        run(table, out=encoded, **{"model": model_directory, **changed})
    assert contents(encoded) == before


def test_directories_of_other_files_are_refused(table: Path, model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "dear.txt").write_text("dear")
    with pytest.raises(ValueError, match="other files"):
        run(table, model_directory, tmp_path)
    with pytest.raises(NotADirectoryError):
        run(table, model_directory, tmp_path / "dear.txt/out")


def test_bad_images_are_skipped_listed_and_limited(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 12), tmp_path / "out"
    (data.parent / "01.png").write_bytes(b"no image")
    (data.parent / "07.png").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="1 of 12 records"):
            run(data, model_directory, out, max_bad=0.05)
    assert [path.name for path in (out / "manifest").iterdir()] == ["manifest_0.json"]  # it stopped at once
    part = partial(run, data, model_directory, tmp_path / "parts", max_bad=0.1)
    assert [part(partition=f"{k}/3").missing for k in (1, 2)] == [(1, 2), (2,)]
    with pytest.raises(ValueError, match="2 of 12 records"):  # all partitions together have too many
        part(partition="3/3")
    result = run(data, model_directory, out, max_bad=0.2)
    assert result.counts == {"rows": 10, "captions": 20, "truncated": 0, "skipped": 2}
    assert "2 records skipped" in result.to_text()
    found = open_embeddings(out, verify=True)
    assert [id[:2] for id in found.ids] == [f"{row:02}" for row in range(12) if row not in (1, 7)]
    assert [found.ids[row][:2] for row in found.owners] == [text.split()[0].zfill(2) for text in found.texts]
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["kind"], row["where"][:2]) for row in listed] == [("corrupt image", "01"), ("missing image", "07")]
    for number in (1, 7):
        save_picture(data.parent / f"{number:02}.png", number)
    result = run(data, model_directory, out)
    assert (result.encoded, result.kept, result.counts and result.counts["skipped"]) == (2, 1, 0)
    assert not (out / "skipped.jsonl").exists()


@pytest.mark.parametrize("only", ["both", "captions"])
def test_captions_without_a_word_are_skipped(only: str, model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 4)
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[2:7] = ["01.png,<|endoftext|>", "01.png,a tree", "02.png,<|endoftext|>"]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    counts = run(data, model_directory, tmp_path / "out", max_bad=0.5, only=only).counts
    assert counts is not None
    assert (counts["rows"], counts["skipped"]) == (3, 1)
    assert open_embeddings(tmp_path / "out").texts[1] == "a tree"


@pytest.mark.parametrize(("name", "only"), [("photos", "both"), ("scenes/mine", "images"), ("captioned", "images")])
def test_a_folder_of_images(
    name: str, only: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without captions, images are encoded alone; with captions, only if they are asked for alone."""
    monkeypatch.chdir(tmp_path)
    for number, file in enumerate(("b/one.png", "a.png", "b/one.jpg", "b/.hidden.png")):
        save_picture(Path(name, file), number)
    if name == "captioned":
        Path(name, "a.txt").write_text("a tree")
    result = run(name, model_directory, tmp_path / "out", only=only)
    assert "3 images" in result.to_text()
    found = open_embeddings(tmp_path / "out", verify=True)
    assert found.ids == ("a.png", "b/one.jpg", "b/one.png")
    assert (found.captions, found.owners.tolist()) == ((), [])
    assert [row["caption"] for row in found.records()] == [None] * 3
    assert np.concatenate(found.images).shape == (3, 32)
    with pytest.raises(ValueError, match="no split 'test'"):
        run(name, model_directory, tmp_path / "split", only=only, split="test")
    if name == "captioned":
        both = run(name, model_directory, tmp_path / "both", max_bad=0.9).counts
        assert both is not None
        assert (both["rows"], both["captions"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--partition", "0/4"], "0/4"),
        (["--partition", "half"], "K/N"),
        (["--batch", "0"], "batch"),
        (["--shard-size", "0"], "shard-size"),
        (["--threads", "-1"], "threads"),
        (["--workers", "2"], "--engine ray"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["encode", "scenes/park", "--out", "nowhere", *arguments])
    assert ended.value.code == 2
    assert name in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("partition", ["0/4", "5/4", "1/0", "1", "", "1/4/2", (4, 4), (-1, 2)])
def test_a_partition_is_one_of_n(partition: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/N|k < N"):
        run("nowhere", "nowhere", tmp_path / "out", partition=partition)


def test_the_command(table: Path, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"objective": {}, "optim": {}}), encoding="utf-8")
    (tmp_path / "best").symlink_to(model_directory)  # the best epoch of a run is used
    out = tmp_path / "out"
    words = ["encode", str(table), "--model", str(tmp_path), "--out", str(out), "--threads", "1", "--shard-size", "9"]
    assert main([*words, "--partition", "1/2", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert not printed.err
    assert (result["complete"], result["missing"], result["encoded"]) == (False, [1], 1)
    assert main(shlex.split(result["command"])[1:]) == 0
    assert f"{RECORDS} images, 25 captions" in capsys.readouterr().out
    assert main([*words, "--verify"]) == 0
    file = out / "text_emb/text_emb_1.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main([*words, "--verify"]) == 1
    assert str(file) in capsys.readouterr().err
    assert main(["encode", "nowhere.csv", "--out", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()
