"""Each method teaches the bundled model something in seconds, with its own global term and with L_HN.

The pictures are the negatives of scenes, which the model has never seen: it finds them by chance before, and after five
steps those that it was trained on far better. What scenes themselves, which the model knows, teach in minutes is in
docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image, ImageOps

import hnclip.train.run_data as run_data
from hnclip.config import RunOptions
from hnclip.core import ImageSource
from hnclip.data.records import DataSet
from hnclip.data.scenes import scene_records
from hnclip.objectives.registry import METHOD_CHOICES, apply_method
from hnclip.recipes import demo
from hnclip.train.log import read_metrics
from hnclip.train.loop import train

PAIRS = 12  # each of another family
TAG = b"#negative"


@dataclass(frozen=True)
class Negative(ImageSource):
    """A picture with every colour turned into its opposite."""

    base: ImageSource

    @property
    def key(self) -> str:
        return self.base.key + TAG.decode()

    def stamp(self) -> str:
        return self.base.stamp()

    def read(self) -> bytes:
        return self.base.read() + TAG

    def decode(self, content: bytes) -> Image.Image:
        return ImageOps.invert(self.base.decode(content[: -len(TAG)]).convert("RGB"))


def negatives() -> DataSet:
    """The same pairs to train and to look at."""
    records = scene_records("park", "train", families=PAIRS, members=1)
    return DataSet(
        "negatives",
        tuple(
            replace(record, image=Negative(record.image), split=split, id=f"{split} {record.id}")
            for split in ("train", "validation")
            for record in records
        ),
    )


@pytest.mark.parametrize("term", [pytest.param("own", marks=pytest.mark.slow), "hn"])
@pytest.mark.parametrize("method", METHOD_CHOICES)
def test_it_finds_more_than_before(method: str, term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (method, term) == ("hn_clip", "hn"):
        term = "infonce"  # its own is L_HN
    monkeypatch.setattr(run_data, "open_data", lambda source, read, splits: negatives())
    lr = 6e-3 if method in ("lora", "dora") else 1e-3
    base = demo("infonce")
    optim = replace(base.optim, epochs=5, micro_batch=PAIRS, accumulate=1, lr=lr, warmup=0.0)
    config = apply_method(replace(base, optim=optim), method)  # type: ignore[arg-type]
    if term != "own":
        config = replace(config, objective=replace(config.objective, global_loss=term))  # type: ignore[arg-type]
    result = train(config, RunOptions(out=tmp_path / "run", threads=1))
    before, *_, after = (entry["mean_R@1"] for entry in read_metrics(result.out, "evaluation"))
    assert before < 20
    assert after > 2 * before
