"""`hnclip encode`: the vectors, and what is refused, skipped or encoded again."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from encode_helpers import contents, options, save_picture, write_table
from hnclip.cli import main
from hnclip.data.batching import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.sources import open_data
from hnclip.encode.embeddings import open_embeddings
from hnclip.encode.shards import encode
from hnclip.models.load import load

RECORDS = 13


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data"), RECORDS)


@pytest.fixture(scope="module")
def encoded(table: Path, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "all"
    encode(options(table, model_directory, out))
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
    assert [row["image_path"] for row in found.records()] == [record.image.key for record in records]
    assert [row["caption"] for row in found.records()] == [record.captions[0] for record in records]


def test_other_programs_read_the_layout_of_clip_retrieval(encoded: Path) -> None:
    """As docs/encode.md shows it."""
    parquet = pytest.importorskip("pyarrow.parquet")
    images, captions = (
        np.concatenate([np.load(file) for file in sorted((encoded / kind).glob("*.npy"))])
        for kind in ("img_emb", "text_emb")
    )
    rows = parquet.read_table(encoded / "metadata").to_pylist()
    owners = np.repeat(np.arange(len(rows)), [len(row["captions"]) for row in rows])
    for actual, expected in zip((images, captions), vectors(encoded), strict=True):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(owners, open_embeddings(encoded).owners)
    assert (encoded / "img_emb/img_emb_0.npy").exists()


def test_half_precision_and_metadata_without_pyarrow(
    table: Path, encoded: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    out = tmp_path / "half"
    encode(options(table, model_directory, out, dtype="float16"))
    ids = open_embeddings(out, verify=True).ids
    assert (out / "metadata/metadata_0.jsonl").exists()
    monkeypatch.undo()
    assert ids == open_embeddings(encoded).ids
    for half, full in zip(vectors(out), vectors(encoded), strict=True):
        assert half.dtype == np.float16
        np.testing.assert_array_equal(half, full.astype(np.float16))


def test_existing_shards_are_kept(table: Path, encoded: Path, model_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = encode(options(table, model_directory, out, partition="1/2"))
    assert (first.encoded, first.kept, first.missing, first.counts) == (1, 0, (0, 2), None)
    assert "2 of 3 shards missing (0, 2)" in first.to_text()
    written = (out / "img_emb/img_emb_1.npy").stat().st_mtime_ns
    second = encode(options(table, model_directory, out))
    assert (second.encoded, second.kept, second.missing) == (2, 1, ())
    assert (out / "img_emb/img_emb_1.npy").stat().st_mtime_ns == written
    third = encode(options(table, model_directory, out, partition="7/9"))  # more partitions than shards
    assert (third.encoded, third.kept) == (0, 0)
    assert third.counts == {"rows": RECORDS, "captions": 25, "truncated": 0, "skipped": 0}
    assert contents(out) == contents(encoded)


def test_a_changed_image_changes_its_shard_only(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 7), tmp_path / "out"
    encode(options(data, model_directory, out))
    before, opened = contents(out), open_embeddings(out)
    old = np.concatenate(opened.images)[6]
    save_picture(data.parent / "06.png", 99)
    result = encode(options(data, model_directory, out))
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
        ({"split": "train", "partition": "1/4"}, "data"),
        ({"model": "bundled"}, "model"),
    ],
)
def test_another_job_is_refused(table: Path, encoded: Path, model_directory: Path, changed: dict, name: str) -> None:
    before = contents(encoded)
    with pytest.raises(ValueError, match=f"differ in .*{name}"):
        encode(options(table, changed.pop("model", model_directory), encoded, **changed))
    assert contents(encoded) == before


def test_directories_that_cannot_be_used_are_refused(table: Path, model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with pytest.raises(ValueError, match="other files"):
        encode(options(table, model_directory, tmp_path / "letters"))
    with pytest.raises(NotADirectoryError):
        encode(options(table, model_directory, tmp_path / "letters/dear.txt/out"))


def test_bad_images_are_skipped_listed_and_limited(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 12), tmp_path / "out"
    (data.parent / "01.png").write_bytes(b"no image")
    (data.parent / "07.png").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match="1 of 12 records"):
            encode(options(data, model_directory, out, max_bad=0.05))
    assert [path.name for path in (out / "manifest").iterdir()] == ["manifest_0.json"]  # it stopped at once
    parts = [options(data, model_directory, tmp_path / "parts", max_bad=0.1, partition=f"{k}/3") for k in range(3)]
    assert encode(parts[0]).missing == (1, 2)
    assert encode(parts[1]).missing == (2,)
    with pytest.raises(ValueError, match="2 of 12 records"):  # all partitions together have too many
        encode(parts[2])
    result = encode(options(data, model_directory, out, max_bad=0.2))
    assert result.counts == {"rows": 10, "captions": 20, "truncated": 0, "skipped": 2}
    assert "2 records skipped" in result.to_text()
    found = open_embeddings(out, verify=True)
    assert [id[:2] for id in found.ids] == [f"{row:02}" for row in range(12) if row not in (1, 7)]
    assert [found.ids[row][:2] for row in found.owners] == [text.split()[0].zfill(2) for text in found.texts]
    listed = [json.loads(line) for line in (out / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["kind"], row["where"][:2]) for row in listed] == [("corrupt image", "01"), ("missing image", "07")]
    save_picture(data.parent / "01.png", 1)
    save_picture(data.parent / "07.png", 7)
    result = encode(options(data, model_directory, out))
    assert (result.encoded, result.kept, result.counts and result.counts["skipped"]) == (2, 1, 0)
    assert not (out / "skipped.jsonl").exists()


@pytest.mark.parametrize("only", ["both", "captions"])
def test_captions_without_a_word_are_skipped(only: str, model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 4)
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[2:7] = ["01.png,<|endoftext|>", "01.png,a tree", "02.png,<|endoftext|>"]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = encode(options(data, model_directory, tmp_path / "out", max_bad=0.5, only=only))
    assert result.counts is not None
    assert (result.counts["rows"], result.counts["skipped"]) == (3, 1)
    assert open_embeddings(tmp_path / "out").texts[1] == "a tree"


@pytest.mark.parametrize(("name", "only"), [("photos", "both"), ("scenes/mine", "images")])
def test_a_folder_without_captions_encodes_its_images(
    name: str, only: str, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, file in enumerate(("b/one.png", "a.png", "b/one.jpg", "b/.hidden.png")):
        save_picture(Path(name, file), number)
    result = encode(options(name, model_directory, tmp_path / "out", only=only))
    assert "3 images" in result.to_text()
    found = open_embeddings(tmp_path / "out", verify=True)
    assert found.ids == ("a.png", "b/one.jpg", "b/one.png")
    assert (found.captions, found.owners.tolist()) == ((), [])
    assert [row["caption"] for row in found.records()] == [None] * 3
    assert np.concatenate(found.images).shape == (3, 32)
    with pytest.raises(ValueError, match="no split 'test'"):
        encode(options(name, model_directory, tmp_path / "split", only=only, split="test"))


def test_a_folder_with_captions_encodes_both_unless_told_otherwise(model_directory: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        save_picture(tmp_path / "data" / f"{name}.png", number)
        (tmp_path / "data" / f"{name}.txt").write_text(f"a tree {name}")
    both = encode(options(tmp_path / "data", model_directory, tmp_path / "both")).counts
    images = encode(options(tmp_path / "data", model_directory, tmp_path / "images", only="images")).counts
    assert both is not None
    assert images is not None
    assert (both["rows"], both["captions"], images["rows"], images["captions"]) == (2, 2, 2, 0)


def test_captions_alone_need_no_images(table: Path, encoded: Path, model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data" / "pairs.csv"
    copy.parent.mkdir()
    copy.write_bytes(table.read_bytes())
    encode(options(copy, model_directory, tmp_path / "out", only="captions"))
    found, both = open_embeddings(tmp_path / "out"), open_embeddings(encoded)
    assert not found.images
    np.testing.assert_array_equal(np.concatenate(found.captions), vectors(encoded)[1])
    np.testing.assert_array_equal(found.owners, both.owners)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--partition", "2/2"], "K from 0 to N - 1"),
        (["--partition", "half"], "K from 0 to N - 1"),
        (["--batch", "0"], "batch"),
        (["--shard-size", "0"], "shard_size"),
        (["--threads", "-1"], "threads"),
        (["--workers", "2"], "--engine ray"),
    ],
)
def test_wrong_options(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["encode", "scenes/park", "--out", "nowhere", *arguments])
    assert ended.value.code == 2
    assert name in " ".join(capsys.readouterr().err.split())


def test_the_command(table: Path, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"objective": {}, "optim": {}}), encoding="utf-8")
    (run / "best").symlink_to(model_directory)  # the best epoch of a run is used
    words = ["encode", str(table), "--model", str(run), "--out", str(out), "--threads", "1", "--shard-size", "9"]
    assert main([*words, "--partition", "0/2", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert not printed.err
    assert (result["complete"], result["missing"], result["encoded"]) == (False, [1], 1)
    assert main(shlex.split(result["command"])[1:]) == 0
    assert f"complete: {out}: {RECORDS} images, 25 captions" in capsys.readouterr().out
    assert main([*words, "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    file = out / "text_emb/text_emb_1.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main([*words, "--verify"]) == 1
    assert str(file) in (error := capsys.readouterr().err)
    assert len(error.splitlines()) == 1
    assert main(["encode", "nowhere.csv", "--out", str(tmp_path / "no")]) == 1
    assert not (tmp_path / "no").exists()
