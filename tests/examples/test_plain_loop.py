from __future__ import annotations

import ast
from pathlib import Path

import plain_loop
import torch

from hnclip.core import ViewEmbeddings
from hnclip.data.scenes import scene_records


def test_it_trains(monkeypatch, capsys):
    monkeypatch.setattr(plain_loop, "scene_records", lambda *args, **_: scene_records(*args, families=4, members=4))
    plain_loop.main(steps=2, batch=8)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["R@1 before", "step  0", "step  1", "R@1 after"]


class Fixed(torch.nn.Module):
    """A model of two pictures and two captions; both captions are closest to the first picture."""

    def encode_images(self, images):
        return ViewEmbeddings(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))

    def encode_texts(self, texts):
        return ViewEmbeddings(torch.tensor([[1.0, 0.0], [0.9, 0.1]]))


def test_recall_counts_captions_that_find_their_picture():
    model = Fixed()
    assert plain_loop.recall_at_1(model, None, None) == 50
    assert not model.training


def test_it_stays_short():
    """At most thirty lines of code: what is not blank, a comment or a docstring."""
    source = Path(plain_loop.__file__).read_text()
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    code = [
        line for number, line in enumerate(source.splitlines(), start=1) if line.strip() and number not in docstrings
    ]
    assert len(code) <= 30
