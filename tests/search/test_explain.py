"""Words and patches: literal late interaction, places of patches, thumbnails, separating words, re-ranking."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_index import bundled, small_index
from store_helpers import all_files

from hnclip.core import Record
from hnclip.data.image_sources import FileImage, decode_image
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.scenes import scene_records
from hnclip.losses.tokens import token_loss
from hnclip.search.explain import SEPARATORS, explain, rerank, separate, token_scores, visible_box
from hnclip.search.searcher import Searcher, open_index
from hnclip.util.text import STOP_WORDS

RECORDS = scene_records("park", "test", families=2)
TEXT = "A mid-sized red umbrella stands under the pink tree, and a house; the tree is 红色. <b> &amp;amp;amp;lt; dog"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searcher]:
    """Scenes as files, and one of them under two more names: with equal bytes, and with equal pixels only."""
    folder = tmp_path_factory.mktemp("explain")
    small_index(folder / "x.hnc", RECORDS, files=folder / "files")
    copies = []
    for name, level in (("a", 6), ("b", 9)):
        RECORDS[5].image.load().save(folder / f"{name}.png", compress_level=level)
        copies.append(Record(name, FileImage(folder / f"{name}.png"), (), None))
    small_index(folder / "x.hnc", copies)
    with open_index(folder / "x.hnc") as index:
        yield index


def literal_cosines(text: str, image: Image.Image) -> list[tuple[int, int, torch.Tensor]]:
    """Start and end of each token of a text, and its cosine with each patch of an image."""
    model = bundled()
    with torch.no_grad():
        tokens = model.encode_texts(model.tokenize([text]), tokens=True).tokens
        patches = model.encode_images(model.preprocess_images([image]), tokens=True).tokens
    assert tokens is not None
    assert patches is not None
    (offsets,) = model.text_transform.offsets([text])
    return [(*span, patches[0] @ tokens[0, 1 + number]) for number, span in enumerate(offsets)]  # after the start token


def test_the_score_of_a_word_is_the_best_mean_over_its_tokens(index: Searcher) -> None:
    """20 images, so that there is more than one batch."""
    files = [all_files(index.reader)[number % 8] for number in range(7, 27)]
    explained = explain(bundled(), index.reader, TEXT, files)
    assert [one.file for one in explained] == files
    for explanation, number in ((explained[0], 7), (explained[1], 0), (explained[-1], 2)):
        cosines = literal_cosines(TEXT, RECORDS[number].image.load())
        assert (explanation.rows, explanation.columns, explanation.box) == (6, 6, (0, 0, 1, 1))
        assert [word.text for word in explanation.words][1:4] == ["mid-sized", "red", "umbrella"]
        assert not explanation.approximate
        for word in explanation.words:
            assert explanation.text[word.start : word.stop] == word.text
            inside = [row for start, stop, row in cosines if start < word.stop and stop > word.start]
            assert word.patches == pytest.approx(torch.stack(inside).mean(dim=0).tolist(), abs=1e-5)
            assert word.score == max(word.patches)
            assert word.content == (word.text.lower() not in STOP_WORDS)


def test_a_missing_or_changed_image_is_explained_by_its_thumbnail(index: Searcher, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    small_index(tmp_path / "x.hnc", RECORDS[:4], files=folder)
    small_index(tmp_path / "x.hnc", RECORDS[4:6])  # they have no files
    names = sorted(path.name for path in folder.iterdir())
    (folder / names[0]).unlink()
    shutil.copy(folder / names[2], folder / names[1])
    with open_index(tmp_path / "x.hnc") as changed:
        explained = explain(bundled(), changed.reader, TEXT, all_files(changed.reader))
        assert [one.approximate for one in explained] == [True, True, False, False, True, True]
        assert {hit.file: hit.approximate for hit in changed.search(TEXT, rerank=True).hits} == {
            one.file: one.approximate for one in explained
        }
        assert changed.separate(TEXT, [one.file.id for one in explained]).approximate


@pytest.mark.parametrize("shape", [(211, 500), (96, 96), (1000, 97)])
@pytest.mark.parametrize("transform", [ImageTransform(96, 110), ImageTransform(96, squash=True), ImageTransform(110)])
def test_the_box_is_where_the_pixels_come_from(transform: ImageTransform, shape: tuple[int, int]) -> None:
    """A red square drawn where the box puts a patch reaches the model as that patch, and as no other. Six patches of 16
    pixels leave 14 of 110 out."""
    width, height = shape
    backbone = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(patch_size=16)))
    family = SimpleNamespace(grid=lambda backbone, size: size // 16)
    model: Any = SimpleNamespace(image_transform=transform, family=family, backbone=backbone)
    left, top, right, bottom = visible_box(model, *shape)
    for row, column in ((0, 0), (2, 4), (5, 5)):
        image = np.zeros((height, width, 3), np.uint8)
        across = [round((left + place / 6 * (right - left)) * width) for place in (column, column + 1)]
        down = [round((top + place / 6 * (bottom - top)) * height) for place in (row, row + 1)]
        image[slice(*down), slice(*across), 0] = 255
        pixels = preprocess_image(Image.fromarray(image), transform)[0, :96, :96].float() / 255
        shares = pixels.reshape(6, 16, 6, 16).mean(dim=(1, 3))  # [6, 6]
        assert shares[row, column] > 0.85
        assert shares.sum() - shares[row, column] < 0.5


def test_words_that_separate_images_have_the_largest_differences(index: Searcher) -> None:
    text = "The umbrella and the balloon stand under a pink tree, a tent, a house, the flag, an apple and the Balloon."
    files, spreads = all_files(index.reader), dict[str, float]()
    different = files[4:7]
    for words in zip(*(one.words for one in explain(bundled(), index.reader, text, different))):
        scores, word = [word.score for word in words], words[0].text.lower()
        if word not in STOP_WORDS:
            spreads[word] = max(spreads.get(word, 0), max(scores) - min(scores))
    found = separate(bundled(), index.reader, text, different)
    expected = sorted(spreads, key=lambda word: -spreads[word])[:SEPARATORS]
    assert [word.lower() for word, _ in found.words] == expected
    assert [max(scores) - min(scores) for _, scores in found.words] == pytest.approx([spreads[one] for one in expected])
    for some in (files[:1], [files[5], files[8]], [files[5], files[9]]):  # one image; equal bytes; equal pixels
        assert separate(bundled(), index.reader, text, some).words == ()


def test_the_token_score_is_that_of_the_token_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    words, patches = (torch.nn.functional.normalize(torch.randn(2, n, 8, generator=generator), dim=2) for n in (5, 4))
    by_text = torch.stack([token_scores(text, patches) for text in words])  # [2, 2]
    by_image = torch.stack([token_scores(image, words) for image in patches])  # with the roles exchanged
    expected = sum(torch.nn.functional.cross_entropy(3 * one, torch.arange(2)) for one in (by_text, by_image)) / 2
    masks = torch.ones(2, 4).bool(), torch.ones(2, 5).bool()
    torch.testing.assert_close(token_loss(patches, words, *masks, 3.0), expected)


def test_re_ranked_hits_are_in_the_order_of_both_scores(index: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits beyond the best stay where they are."""
    hits = index.search(TEXT, k=50).hits
    monkeypatch.setattr("hnclip.search.explain.MOST", 7)
    found = rerank(bundled(), index.reader, TEXT, hits, weight=-1.0)
    assert tuple(found[7:]) == hits[7:] != ()
    assert {hit.file: hit.score for hit in found} == {hit.file: hit.score for hit in hits}
    both = [hit.score - (hit.token_score or 0) for hit in found[:7]]
    assert both == sorted(both, reverse=True)
    for hit in found[:7]:
        cosines = [row for *_, row in literal_cosines(TEXT, decode_image(index.reader.content(hit.file), ""))]
        assert hit.token_score == pytest.approx(float(torch.stack(cosines).amax(dim=1).mean()), abs=1e-5)
