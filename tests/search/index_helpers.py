"""Indexes without a model: pictures are numbers, and all that an index keeps of one follows from its number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

from hnclip.search.index.catalogue import content_hash
from hnclip.search.index.changes import Change, NewItem, NewPicture
from hnclip.search.index.layout import About, Storage
from hnclip.search.index.reader import Index
from hnclip.search.index.vectors import from_bf16, quantise, to_bf16
from hnclip.search.index.writer import IndexWriter

WIDTH, PATCHES = 24, 3

Shown = tuple[int, tuple[str, ...]]  # the number of a picture, and captions
Content = Mapping[str, Shown]  # by name: what an index shows


def about(*, storage: Storage = "bf16", patches: int = PATCHES) -> About:
    return About("bundled", "a model", "0123", {}, WIDTH, storage, patches, "pictures of a test", None)


def image_vector(number: int) -> np.ndarray:
    """[D] of length 1"""
    return _unit(np.random.default_rng(number).normal(size=WIDTH))


def text_vector(text: str) -> np.ndarray:
    """[D] of length 1"""
    return _unit(np.random.default_rng(list(content_hash(text.encode()))).normal(size=WIDTH))


def _unit(vector: np.ndarray) -> np.ndarray:
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def picture_tokens(number: int) -> np.ndarray:
    """[P, D]"""
    return np.random.default_rng([number, 1]).normal(size=(PATCHES, WIDTH)).astype(np.float32)


def picture_thumbnail(number: int) -> bytes:
    return f"thumbnail {number}".encode() * (1 + number % 5)


def content_of(number: int) -> bytes:
    return content_hash(f"picture {number}".encode())


def new_picture(number: int, *, patches: int = PATCHES) -> NewPicture:
    tokens = picture_tokens(number) if patches else None
    shape = (100 + number, 200 + number)
    return NewPicture(content_of(number), image_vector(number), shape, picture_thumbnail(number), tokens)


def new_item(name: str, shown: Shown) -> NewItem:
    number, captions = shown
    return NewItem(name, content_of(number), json.dumps({"file": name}), f"stamp {number}", captions)


def change_to(writer: IndexWriter, before: Content, after: Content) -> Change:
    """What makes `after` of an index that shows `before`."""
    items = [new_item(name, shown) for name, shown in after.items() if before.get(name) != shown]
    known = writer.contents()
    numbers = {after[item.name][0] for item in items}
    texts = {text for item in items for text in item.captions}
    return Change(
        pictures=[
            new_picture(number, patches=writer.about.patches)
            for number in sorted(numbers)
            if content_of(number) not in known
        ],
        captions={text: text_vector(text) for text in sorted(texts - writer.known_texts(sorted(texts)))},
        items=items,
        gone=[name for name in before if name not in after],
    )


def commit_all(writer: IndexWriter, *contents: Content) -> None:
    """One version after the other; of a new index."""
    before: Content = {}
    for content in contents:
        writer.commit(change_to(writer, before, content))
        before = content


def check_index(index: Index, expected: Content) -> None:
    """Everything that an index keeps is that of its pictures and captions, and nothing else can be found."""
    items = list(index.all_items())
    assert index.count() == len(items)
    numbers = {content_of(number): number for number, _ in expected.values()}
    contents = dict(index._ask("SELECT row, content FROM pictures"))
    assert {item.name: (numbers[contents[item.row]], item.captions) for item in items} == dict(expected)
    for item in items:
        number = expected[item.name][0]
        assert item.shape == (100 + number, 200 + number)
        assert index.thumbnail(item.row) == picture_thumbnail(number)
        assert index.item(item.id) == item
        assert item in index.items([item.row])[item.row]
        assert same(index.vectors("images").rows(np.array([item.row]))[0], image_vector(number), index)
        if index.about.patches:
            assert (index.tokens([item.row]) == from_bf16(to_bf16(picture_tokens(number)))).all()
    assert living(index, "images") == {item.row for item in items}
    captions = index.captions(sorted(living(index, "captions")))
    said = {caption.text: {item.name for item in caption.items} for caption in captions.values()}
    assert said == _owners(expected)
    for row, caption in captions.items():
        assert same(index.vectors("captions").rows(np.array([row]))[0], text_vector(caption.text), index)


def living(index: Index, kind: str) -> set[int]:
    return set(range(len(index.vectors(kind)))) - set(index.dead(kind).tolist())  # type: ignore[arg-type]


def same(stored: np.ndarray, vector: np.ndarray, index: Index) -> bool:
    kept = from_bf16(to_bf16(vector))
    if index.about.storage == "int8":
        codes, scales = quantise(kept[None])
        kept = (codes * from_bf16(scales)[:, None])[0]
    return bool((stored == kept).all())


def _owners(expected: Content) -> dict[str, set[str]]:
    owners: dict[str, set[str]] = {}
    for name, (_, captions) in expected.items():
        for text in captions:
            owners.setdefault(text, set()).add(name)
    return owners


def random_content(random: np.random.Generator, before: Content, *, names: int = 30, numbers: int = 60) -> Content:
    """Some items more, some less, some other ones: copies, moves and returns of what was gone among them."""
    after = dict(before)
    for name in _some(random, [*after], 0.2):
        del after[name]
    for _ in range(int(random.integers(1, 8))):
        texts = [f"caption {number}" for number in random.integers(0, 20, int(random.integers(0, 3)))]
        after[f"{random.integers(names):02}.jpg"] = (int(random.integers(numbers)), tuple(dict.fromkeys(texts)))
    return after


def _some(random: np.random.Generator, names: Iterable[str], share: float) -> list[str]:
    return [name for name in names if random.random() < share]
