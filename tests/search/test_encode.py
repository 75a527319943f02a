"""`hnclip encode`: what is in the vectors, and what is refused, left out or made again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from encode_helpers import contents, options, save_picture, write_table

from hnclip.cli import main
from hnclip.data.batching import pad_texts
from hnclip.data.images import preprocess_image
from hnclip.data.sources import open_data
from hnclip.models.load import load
from hnclip.search import encode as encode_module
from hnclip.search.embeddings import open_embeddings
from hnclip.search.encode import Outcome, encode

RECORDS = 13


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("data"), RECORDS)


@pytest.fixture(scope="module")
def encoded(table: Path, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("encoded") / "all"
    encode(options(table, model_directory, out))
    return out


def lost(outcome: Outcome) -> tuple[int, int]:
    found = outcome.to_dict()
    return found["rows"], found["left_out"]


def one_by_one(table: Path, model_directory: Path) -> tuple[np.ndarray, np.ndarray, list[str], list[int]]:
    """The slow twin: every picture and every caption alone, padded to the model's context."""
    model = load(model_directory).eval()
    images, captions, texts, owners = [], [], [], []
    with torch.no_grad():
        for row, record in enumerate(open_data(str(table)).records):
            pixels = preprocess_image(record.image.load(), model.image_transform)[None]
            images.append(model.encode_images(pixels).vectors[0])
            for text in record.captions:
                (ids,) = model.text_transform([text])
                padded = pad_texts([ids, (0,) * model.context], model.text_transform.pad)
                captions.append(model.encode_texts(padded).vectors[0])
                texts.append(text)
                owners.append(row)
    return torch.stack(images).numpy(), torch.stack(captions).numpy(), texts, owners


def test_vectors_are_those_of_each_picture_and_caption_alone(table: Path, encoded: Path, model_directory: Path) -> None:
    images, captions, texts, owners = one_by_one(table, model_directory)
    found = open_embeddings(encoded, check=True)
    assert found.images is not None
    assert found.captions is not None
    assert found.images.shape == (RECORDS, 32)
    assert len(found.captions) == len(texts) > RECORDS
    np.testing.assert_allclose(found.images[:], images, atol=2e-6)
    np.testing.assert_allclose(found.captions[:], captions, atol=2e-6)
    assert found.texts == tuple(texts)
    assert found.owners.tolist() == owners
    records = open_data(str(table)).records
    assert found.ids == tuple(record.id for record in records)
    assert [record["image"] for record in found.records()] == [record.image.key for record in records]
    # And with numpy alone, as docs/encode.md says.
    shard = np.load(encoded / "shards/00002/images.npy", mmap_mode="r")
    np.testing.assert_array_equal(shard, found.images[10:])
    np.testing.assert_array_equal(np.load(encoded / "shards/00001/owners.npy") + 5, found.owners[9:19])


def test_half_precision_and_the_picture_cache(
    table: Path, encoded: Path, model_directory: Path, tmp_path: Path
) -> None:
    full = open_embeddings(encoded)
    (table.parent / "03.png").touch()  # not to be read from the cache by its old name
    given = options(table, model_directory, tmp_path / "half", dtype="float16", cache=True, read_cache=str(tmp_path))
    encode(given)
    half = open_embeddings(tmp_path / "half")
    assert full.images is not None
    assert full.captions is not None
    assert half.images is not None
    assert half.captions is not None
    assert half.images.dtype == half.captions[:].dtype == np.float16
    np.testing.assert_array_equal(half.images[:], full.images[:].astype(np.float16))
    np.testing.assert_array_equal(half.captions[:], full.captions[:].astype(np.float16))
    assert list(tmp_path.glob("images/*/pixels.u8"))


def test_what_is_there_is_not_made_again(
    table: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = encode_module.encode_records
    monkeypatch.setattr(
        encode_module, "encode_records", lambda records, *rest: made.append(len(records)) or real(records, *rest)
    )
    out = tmp_path / "out"
    first = encode(options(table, model_directory, out, partition="1/2"))
    assert (first.encoded, first.kept, first.missing) == (1, 0, (0, 2))
    assert "2 of 3 shards missing (0, 2)" in first.to_text()
    assert f"--shard-size 5 --batch 4 --threads 1 --out {out}" in first.to_text()
    assert made == [5]
    second = encode(options(table, model_directory, out))
    assert (second.encoded, second.kept, second.missing) == (2, 1, ())
    assert made == [5, 5, 3]
    before = contents(out)
    third = encode(options(table, model_directory, out, partition="7/9"))  # more partitions than shards
    assert (third.encoded, third.kept) == (0, 0)
    assert (third.to_dict()["rows"], third.to_dict()["captions"]) == (RECORDS, 25)
    assert "nothing to encode" in third.to_text()
    assert contents(out) == before
    assert made == [5, 5, 3]


def test_a_changed_picture_costs_its_shard(table: Path, model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 7)
    out = tmp_path / "out"
    encode(options(data, model_directory, out))
    before, vectors = contents(out), open_embeddings(out)
    assert vectors.images is not None
    old = vectors.images[6].copy()
    save_picture(data.parent / "06.png", 99)
    result = encode(options(data, model_directory, out))
    assert (result.encoded, result.kept) == (1, 1)
    after = contents(out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"manifest.json", "shards/00001/images.npy", "shards/00001/shard.json"}
    now = open_embeddings(out, check=True).images
    assert now is not None
    assert not np.allclose(now[6], old)
    np.testing.assert_array_equal(vectors.images[6], old)  # whoever has the old ones open keeps them


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"batch": 3}, "--batch 4, not 3"),
        ({"shard_size": 6}, "--shard-size 5, not 6"),
        ({"dtype": "float16"}, "--dtype float32, not float16"),
        ({"only": "images"}, "--only both, not images"),
        ({"split": "train"}, "the records of"),
    ],
)
def test_other_options_are_refused(table: Path, encoded: Path, model_directory: Path, changed: dict, said: str) -> None:
    before = contents(encoded)
    with pytest.raises(ValueError, match="choose another directory") as refused:
        encode(options(table, model_directory, encoded, **changed))
    assert said in str(refused.value)
    assert contents(encoded) == before


def test_another_model_and_other_data_are_refused(
    table: Path, encoded: Path, model_directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"holds embeddings of model .*weights or transforms differ\), not bundled"):
        encode(options(table, "bundled", encoded))  # type: ignore[arg-type]
    other = table.with_name("other.csv")
    other.write_text(table.read_text(encoding="utf-8").replace("9 0", "9 9"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"as they were then, not those of .*other.csv as they are now"):
        encode(options(other, model_directory, encoded))
    other.unlink()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with pytest.raises(ValueError, match="holds other files"):
        encode(options(table, model_directory, tmp_path / "letters"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        encode(options(table, model_directory, tmp_path / "file" / "out"))


def test_before_the_first_shard_the_options_may_change(
    table: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that does not fit into memory is noticed in the first shard."""
    with monkeypatch.context() as patch:
        patch.setattr(encode_module, "encode_records", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            encode(options(table, model_directory, tmp_path / "out", batch=100))
    encode(options(table, model_directory, tmp_path / "out"))
    assert open_embeddings(tmp_path / "out").manifest["batch"] == 4


def test_two_jobs_that_began_at_once_are_noticed(
    table: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    encode(options(table, model_directory, out, dtype="float16", partition="0/3"))
    monkeypatch.setattr(encode_module, "claim", lambda directory, job: None)  # both found the directory empty
    for partition in ("0/1", "1/3"):  # its own shard, and that of another partition
        with pytest.raises(ValueError, match=r"shard 0 of .* is of another model, other data or other options"):
            encode(options(table, model_directory, out, partition=partition))


def test_bad_pictures_are_left_out_listed_and_limited(model_directory: Path, tmp_path: Path) -> None:
    data, out = write_table(tmp_path / "data", 12), tmp_path / "out"
    (data.parent / "01.png").write_bytes(b"no picture")
    (data.parent / "07.png").unlink()
    with pytest.raises(ValueError, match="1 of 12 records"):
        encode(options(data, model_directory, out, max_bad=0.05))
    with pytest.raises(ValueError, match="1 of 12 records"):  # and the same again
        encode(options(data, model_directory, out, max_bad=0.05))
    assert [path.name for path in (out / "shards").iterdir()] == ["00000"]  # there was no need to go on
    for number in range(3):  # no single process lost too many, but all of them together
        part = options(data, model_directory, tmp_path / "parts", max_bad=0.1, partition=f"{number}/3")
        if number < 2:
            assert encode(part).missing
        else:
            with pytest.raises(ValueError, match="2 of 12 records"):
                encode(part)
    with pytest.raises(ValueError, match=r"it has no manifest.json yet"):
        open_embeddings(tmp_path / "parts")
    result = encode(options(data, model_directory, out, max_bad=0.2))
    assert (result.encoded, result.kept, *lost(result)) == (2, 1, 10, 2)
    found = open_embeddings(out, check=True)
    assert [id[:2] for id in found.ids] == [f"{row:02}" for row in range(12) if row not in (1, 7)]
    assert [found.ids[row][:2] for row in found.owners] == [text.split()[0].zfill(2) for text in found.texts]
    listed = [json.loads(line) for line in (out / "left_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["kind"], row["where"][:2]) for row in listed] == [("corrupt image", "01"), ("missing image", "07")]

    cached = options(data, model_directory, tmp_path / "cached", max_bad=0.2, cache=True, read_cache=str(tmp_path))
    encode(cached)
    ours, theirs = contents(out), contents(tmp_path / "cached")
    assert {name: ours[name] for name in ours if "shards" in name} == {
        name: theirs[name] for name in theirs if "shards" in name
    }

    save_picture(data.parent / "01.png", 1)
    save_picture(data.parent / "07.png", 7)
    result = encode(options(data, model_directory, out))
    assert (result.encoded, result.kept, *lost(result)) == (2, 1, 12, 0)
    assert not (out / "left_out.jsonl").exists()


@pytest.mark.parametrize("only", ["both", "captions"])
def test_captions_without_a_word_are_left_out(only: str, model_directory: Path, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data", 4)
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[2:4] = ["01.png,<|endoftext|>", "01.png,a tree"]
    lines[4:7] = ["02.png,<|endoftext|>"]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = encode(options(data, model_directory, tmp_path / "out", max_bad=0.5, only=only))
    found = open_embeddings(tmp_path / "out")
    assert lost(result) == (3, 1)
    assert found.texts[1] == "a tree"
    assert [id[:2] for id in found.ids] == ["00", "01", "03"]
    listed = (tmp_path / "out" / "left_out.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["kind"] for line in listed.splitlines()] == ["empty caption"] * 2


def test_pictures_alone_need_no_captions(model_directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for number, name in enumerate(["b/one.png", "b/one.jpg", "a.png"]):
        save_picture(folder / name, number)
    (folder / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match="without captions by --only images"):
        encode(options(folder, model_directory, tmp_path / "no"))
    assert not (tmp_path / "no").exists()
    result = encode(options(folder, model_directory, tmp_path / "out", only="images"))
    found = open_embeddings(tmp_path / "out", check=True)
    assert result.to_text().endswith(": 3 pictures")
    assert found.ids == ("a.png", "b/one.jpg", "b/one.png")
    assert found.captions is None
    assert found.owners.shape == (0,)
    assert found.images is not None
    assert found.images.shape == (3, 32)
    with pytest.raises(ValueError, match="no split 'test'"):
        encode(options(folder, model_directory, tmp_path / "split", only="images", split="test"))


def test_captions_alone_need_no_pictures(table: Path, encoded: Path, model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data" / "pairs.csv"
    copy.parent.mkdir()
    copy.write_bytes(table.read_bytes())
    encode(options(copy, model_directory, tmp_path / "out", only="captions"))
    found, both = open_embeddings(tmp_path / "out"), open_embeddings(encoded)
    assert found.images is None
    assert found.captions is not None
    assert both.captions is not None
    np.testing.assert_array_equal(found.captions[:], both.captions[:])
    np.testing.assert_array_equal(found.owners, both.owners)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--partition", "3/2"], "K from 0 to N - 1"),
        (["--partition", "2/2"], "K from 0 to N - 1"),
        (["--partition", "-1/2"], "K from 0 to N - 1"),
        (["--partition", "half"], "K from 0 to N - 1"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--shard-size", "0"], "--shard-size must be at least 1"),
        (["--threads", "-1"], "--threads must not be negative"),
        (["--workers", "2"], "start one process per --partition"),
    ],
)
def test_wrong_options(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["encode", "scenes/park", "--out", "nowhere", *arguments])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command(table: Path, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["encode", str(table), "--model", str(model_directory), "--out", str(tmp_path / "out"), "--threads", "1"]
    words += ["--shard-size", "9", "--context", "20"]  # shorter than the model: left as it is
    assert main([*words, "--partition", "0/2", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert not printed.err
    assert (result["complete"], result["missing"], result["encoded"]) == (False, [1], 1)
    assert main(shlex.split(result["finish"])[1:]) == 0  # what it says is what finishes it
    printed = capsys.readouterr()
    assert f"complete: {tmp_path / 'out'}: {RECORDS} pictures, 25 captions" in printed.out
    assert f"{RECORDS} records of {table} in 2 shards" in printed.err
    assert main(["encode", "nowhere.csv", "--out", str(tmp_path / "no")]) == 1
    assert "there is no such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_the_best_epoch_of_a_run_is_taken(table: Path, model_directory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"objective": {}, "optim": {}}), encoding="utf-8")
    (run / "best").symlink_to(model_directory)
    encode(options(table, run, tmp_path / "out", only="captions"))
    assert open_embeddings(tmp_path / "out").manifest["width"] == 32
