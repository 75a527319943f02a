"""One long caption from the several short ones of each image, and splits by hash.

    python scripts/joined_captions.py coco_k5.jsonl joined.jsonl --validation 600 --test 1000

reads JSON lines with an "image" and its "captions", and writes lines with "image", "caption" and "split", which
`--data joined.jsonl` opens. Five sentences about one image, by five people, make a caption of some fifty words, as
long captions are. The splits that the rows declare are set aside; the hash of an image's name decides, so they are the
same on every machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from hnclip.util.files import replace_file


def join(captions: Sequence[str]) -> str:
    """Sentences one after the other, each with one full stop."""
    return " ".join(f"{caption.strip().rstrip(' .')}." for caption in captions if caption.strip(" ."))


def prepare(lines: Sequence[str], *, validation: int, test: int) -> list[dict[str, str]]:
    """Rows by the hashes of their images' names: `test` of them, then `validation`, then the training ones."""
    rows = [json.loads(line) for line in lines if line.strip()]
    names = [row["image"] for row in rows]
    if len(set(names)) < len(names):
        raise ValueError("several rows name the same image: it could end up in two splits")
    if validation + test >= len(rows):
        raise ValueError(f"{validation} + {test} rows are held out of {len(rows)}: none are left to train on")
    rows.sort(key=lambda row: sha256(row["image"].encode()).digest())
    splits = ["test"] * test + ["validation"] * validation + ["train"] * (len(rows) - test - validation)
    return [
        {"image": row["image"], "caption": join(row["captions"]), "split": split} for row, split in zip(rows, splits)
    ]


def main(source: Path, target: Path, *, validation: int, test: int) -> None:
    rows = prepare(source.read_text(encoding="utf-8").splitlines(), validation=validation, test=test)
    with replace_file(target) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = sum(len(row["caption"].split()) for row in rows) / len(rows)
    train = len(rows) - validation - test
    print(f"{len(rows):,} rows, {words:.0f} words each: train {train:,}, validation {validation:,}, test {test:,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--validation", type=int, default=600)
    parser.add_argument("--test", type=int, default=1000)
    given = parser.parse_args()
    try:
        main(given.source, given.target, validation=given.validation, test=given.test)
    except (ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
