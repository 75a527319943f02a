"""Differing captions, on a gallery whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from PIL import Image

from hnclip.analysis.examples import count_differences, differing_examples
from hnclip.core import Record
from hnclip.evaluation import retrieval_ranks
from hnclip.evaluation.retrieval import EvaluationResult


def gallery(groups: str) -> list[Record]:
    """One image of one grey per letter; the letter is its group, and a dot is an image without one."""
    images = [SimpleNamespace(load=lambda grey=grey: Image.new("L", (2, 2), grey)) for grey in range(len(groups))]
    return [
        Record(str(number), image, (f"caption {number}",), "test", group=None if letter == "." else letter)
        for number, (letter, image) in enumerate(zip(groups, images))
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


def test_an_example_shows_the_right_image_and_both_answers():
    (example,) = differing_examples({"A": answers(0, 0, 2), "B": answers(0, 1, 2)}, gallery("abc"))
    assert (example.caption, example.right.getpixel((0, 0))) == ("caption 1", 1)
    assert [(image.getpixel((0, 0)), correct) for image, correct in example.answers.values()] == [(0, False), (1, True)]


def test_kinds_take_turns_and_a_group_appears_once():
    """The rarer kind begins. A alone finds 1 to 4, B alone 5 and 6."""
    a, b = answers(0, 1, 2, 3, 4, 0, 0), answers(0, 0, 0, 0, 0, 5, 6)
    expected = ["caption 5", "caption 1", "caption 6", "caption 2", "caption 3", "caption 4"]
    assert shown({"A": a, "B": b}, "abcdefg") == shown({"B": b, "A": a}, ".......") == expected
    assert shown({"A": a, "B": b}, "abcdefg", limit=3) == expected[:3]
    assert count_differences({"A": a, "B": b}) == {"both": 1, "only A": 4, "only B": 2, "neither": 0}
    assert shown({"A": a, "B": b}, "xyyyzyz") == ["caption 5", "caption 4"]
