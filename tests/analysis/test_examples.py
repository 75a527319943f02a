"""Differing captions, on a gallery whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image

from hnclip.analysis.examples import count_differences, differing_examples
from hnclip.core import Record
from hnclip.evaluation import retrieval_ranks
from hnclip.evaluation.retrieval import EvaluationResult
from hnclip.report.caption_figures import Example


@dataclass(frozen=True)
class Flat:
    """An image of one grey, which tells the test which record it belongs to."""

    number: int

    @property
    def key(self) -> str:
        return str(self.number)

    def load(self) -> Image.Image:
        return Image.new("L", (2, 2), self.number)


def gallery(groups: str) -> list[Record]:
    """One image per letter; the letter is its group, and a dot is an image without one."""
    return [
        Record(str(number), Flat(number), (f"caption {number}",), "test", group=None if letter == "." else letter)
        for number, letter in enumerate(groups)
    ]


def answers(*chosen: int) -> EvaluationResult:
    """A model whose caption i is closest to image chosen[i], then to its own, then to the last, whose vector is the
    longest: lengths must not matter."""
    images = len(chosen)
    owner = torch.arange(images)
    text = 2 * torch.eye(images)[list(chosen)] + torch.eye(images)[owner] + 0.5 * torch.eye(images)[-1]
    image = torch.eye(images) * torch.linspace(1, 9, images)[:, None]
    ranks = retrieval_ranks(image, text, owner)
    return EvaluationResult(ranks, torch.arange(len(image)), (), image=image, text=text)


def shown(models: dict[str, EvaluationResult], groups: str, **options: int) -> list[str]:
    return [example.caption for example in differing_examples(models, gallery(groups), **options)]


def test_counts_add_up():
    a, b = answers(0, 1, 2, 0, 0, 0), answers(0, 0, 0, 3, 0, 0)
    assert count_differences({"A": a, "B": b}) == {"both": 1, "only A": 2, "only B": 1, "neither": 2}


def pixels(example: Example) -> list[tuple[int, bool]]:
    """What each model answers: the grey of its image, and whether it is correct."""
    return [(image.getpixel((0, 0)), correct) for image, correct in example.answers.values()]


def test_an_example_shows_the_right_image_and_both_answers():
    (example,) = differing_examples({"A": answers(0, 0, 2), "B": answers(0, 1, 2)}, gallery("abc"))
    assert (example.caption, example.right.getpixel((0, 0))) == ("caption 1", 1)
    assert pixels(example) == [(0, False), (1, True)]


def test_kinds_take_turns_and_the_rarer_begins():
    a = answers(0, 1, 2, 3, 4, 0, 0)  # A alone finds 1 to 4, B alone 5 and 6
    b = answers(0, 0, 0, 0, 0, 5, 6)
    expected = ["caption 5", "caption 1", "caption 6", "caption 2", "caption 3", "caption 4"]
    assert shown({"A": a, "B": b}, "abcdefg") == expected
    assert shown({"B": b, "A": a}, "abcdefg") == expected
    assert shown({"A": a, "B": b}, "abcdefg", limit=3) == expected[:3]


def test_a_group_appears_once():
    a = answers(0, 1, 2, 3, 0, 0)  # A alone finds 1, 2 and 3, B alone 4 and 5
    b = answers(0, 0, 0, 0, 4, 5)
    assert shown({"A": a, "B": b}, "xyyzyz") == ["caption 4", "caption 3"]
    assert len(shown({"A": a, "B": b}, "......")) == 5  # each image without a group is one of its own


def test_a_tie_is_answered_with_the_wrong_image():
    image = torch.tensor([[1.0, 0.0], [1.0, 0.0]])  # two copies: neither caption can have its own first
    ranks = retrieval_ranks(image, torch.eye(2), torch.arange(2))
    tied = EvaluationResult(ranks, torch.arange(2), (), image=image, text=torch.eye(2))
    found = differing_examples({"A": tied, "B": answers(0, 1)}, gallery(".."))
    assert [pixels(example)[0] for example in found] == [(1, False), (0, False)]
