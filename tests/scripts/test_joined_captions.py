from __future__ import annotations

import json

import joined_captions
import pytest

from hnclip.config import ReadConfig
from hnclip.data.sources import open_data


def line(number: int) -> str:
    return json.dumps({"image": f"{number}.jpg", "captions": [f"One {number} .", "Two", " "], "karpathy_split": "test"})


def test_sentences_end_with_one_full_stop() -> None:
    assert joined_captions.join(["A dog .", " a cat", "Two cats..", "", " . "]) == "A dog. a cat. Two cats."


def test_splits_depend_on_names_alone() -> None:
    rows = joined_captions.prepare([line(n) for n in range(10)], validation=3, test=2)
    assert [row["split"] for row in rows] == ["test"] * 2 + ["validation"] * 3 + ["train"] * 5
    assert rows == joined_captions.prepare([line(n) for n in reversed(range(10))], validation=3, test=2)
    assert {row["caption"] for row in rows} == {f"One {n}. Two." for n in range(10)}


def test_hnclip_reads_the_file(tmp_path, capsys) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(map(line, range(10))))
    joined_captions.main(tmp_path / "in.jsonl", tmp_path / "out.jsonl", validation=3, test=2)
    assert capsys.readouterr().out == "10 rows, 3 words each: train 5, validation 3, test 2\n"
    data = open_data(str(tmp_path / "out.jsonl"), ReadConfig(images=str(tmp_path)))
    assert data.splits() == {"test": 2, "validation": 3, "train": 5}


def test_rows_that_cannot_be_split_raise() -> None:
    with pytest.raises(ValueError, match="train"):
        joined_captions.prepare([line(n) for n in range(5)], validation=3, test=2)
    with pytest.raises(ValueError, match="same image"):
        joined_captions.prepare([line(1), line(1)], validation=0, test=1)
