"""Words and patches: literal late interaction, places of patches, thumbnails, separating words, re-ranking."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
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
from hnclip.models.dual_encoder import DualEncoder
from hnclip.search.explain import (
    LEAST_SPREAD,
    SEPARATORS,
    explain,
    patch_side,
    rerank,
    separate,
    token_scores,
    visible_box,
)
from hnclip.search.near_duplicates import Hit, Separation
from hnclip.search.reader import IndexedImage
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


def files_of(index: Searcher) -> list[IndexedImage]:
    return all_files(index.reader)


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
    files = [files_of(index)[number % 8] for number in range(7, 27)]
    explained = explain(bundled(), index.reader, TEXT, files)
    assert [one.file for one in explained] == files
    for explanation, number in zip(explained[:2], (7, 0)):
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
    by_file = {one.file: one for one in explained[:8]}
    for one in explained[8:]:  # the same whatever the batch
        for word, other in zip(one.words, by_file[one.file].words):
            assert word.patches == pytest.approx(other.patches, abs=1e-5)


@pytest.mark.parametrize("call", [explain, separate, rerank])
def test_no_images_give_nothing_and_a_text_without_words_is_refused(call: Callable[..., Any], index: Searcher) -> None:
    files: list[Any] = files_of(index)[:2]
    given = [Hit(file, 0, 0.5) for file in files] if call is rerank else files
    assert call(bundled(), index.reader, TEXT, []) in ([], Separation())
    with pytest.raises(ValueError, match="no words"):
        call(bundled(), index.reader, "...", given)


def test_a_missing_or_changed_image_is_explained_by_its_thumbnail(index: Searcher, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    small_index(tmp_path / "x.hnc", RECORDS[:4], files=folder)
    small_index(tmp_path / "x.hnc", RECORDS[4:6])  # they have no files
    names = sorted(path.name for path in folder.iterdir())
    (folder / names[0]).unlink()
    shutil.copy(folder / names[2], folder / names[1])
    with open_index(tmp_path / "x.hnc") as changed:
        explained = explain(bundled(), changed.reader, TEXT, files_of(changed))
        hits = changed.search(TEXT, rerank=True).hits
        assert changed.separate(TEXT, [one.file.id for one in explained]).approximate
        assert not changed.separate(TEXT, [one.file.id for one in explained[2:4]]).approximate
    approximate = {one.file.name: one.approximate for one in explained}
    assert list(approximate.values()) == [True, True, False, False, True, True]
    assert {hit.file.name: hit.approximate for hit in hits} == approximate
    for one, other in zip(explained, explain(bundled(), index.reader, TEXT, files_of(index)[:6])):
        scores = [np.ravel([word.patches for word in each.words]) for each in (one, other)]
        assert np.corrcoef(*scores)[0, 1] > 0.9  # those of another image differ as much as words do


def stub(transform: ImageTransform, patch: int | None = 16) -> DualEncoder:
    vision = SimpleNamespace() if patch is None else SimpleNamespace(patch_size=patch)
    family = SimpleNamespace(grid=lambda backbone, size: size // patch if patch else None)
    backbone = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    return SimpleNamespace(  # type: ignore[return-value]
        image_transform=transform, image_size=transform.size, family=family, backbone=backbone, source="a stub"
    )


@pytest.mark.parametrize("shape", [(320, 240), (211, 500), (96, 96), (1000, 97)])
@pytest.mark.parametrize(
    "transform",
    [
        ImageTransform(96),
        ImageTransform(96, 110),
        ImageTransform(96, squash=True),
        ImageTransform(110),  # six patches of 16 pixels leave 14 out
    ],
)
def test_the_box_is_where_the_pixels_come_from(transform: ImageTransform, shape: tuple[int, int]) -> None:
    """A red square drawn where the box puts a patch reaches the model as that patch, and as no other."""
    width, height = shape
    left, top, right, bottom = visible_box(stub(transform), *shape)
    for row, column in ((0, 0), (2, 4), (5, 5)):
        image = np.zeros((height, width, 3), np.uint8)
        across = [round((left + place / 6 * (right - left)) * width) for place in (column, column + 1)]
        down = [round((top + place / 6 * (bottom - top)) * height) for place in (row, row + 1)]
        image[slice(*down), slice(*across), 0] = 255
        pixels = preprocess_image(Image.fromarray(image), transform)[0, :96, :96].float() / 255
        shares = pixels.reshape(6, 16, 6, 16).mean(dim=(1, 3))  # [6, 6]
        assert shares[row, column] > 0.85
        assert shares.sum() - shares[row, column] < 0.5


def test_patches_that_form_no_square_are_refused() -> None:
    assert patch_side(stub(ImageTransform(96)), 36) == 6
    assert patch_side(stub(ImageTransform(96), patch=None), 49) == 7  # the tower does not say, but the number does
    assert visible_box(stub(ImageTransform(96), patch=None), 400, 200) == (0.25, 0, 0.75, 1)
    for patch, count in ((16, 37), (None, 50)):
        with pytest.raises(ValueError, match=f"a stub has {count} vectors"):
            patch_side(stub(ImageTransform(96), patch), count)


def test_words_that_separate_images_have_the_largest_differences(index: Searcher) -> None:
    text = "The umbrella and the balloon stand under a pink tree, a tent, a house, the flag, an apple and the Balloon."
    files, spreads = files_of(index)[4:7], dict[str, float]()
    for words in zip(*(one.words for one in explain(bundled(), index.reader, text, files))):
        scores, word = [word.score for word in words], words[0].text.lower()
        spreads[word] = max(spreads.get(word, 0), max(scores) - min(scores))
    expected = sorted((word for word in spreads if word not in STOP_WORDS), key=lambda word: -spreads[word])
    assert len([word for word in expected if spreads[word] >= LEAST_SPREAD]) > SEPARATORS
    found = separate(bundled(), index.reader, text, files)
    assert found.ids == tuple(file.id for file in files)
    assert [word.lower() for word, _ in found.words] == expected[:SEPARATORS]
    for word, scores in found.words:
        assert max(scores) - min(scores) == pytest.approx(spreads[word.lower()])
        assert len(scores) == 3


def test_equal_images_and_function_words_separate_nothing(index: Searcher) -> None:
    files = files_of(index)
    one, bytes_equal, pixels_equal, other = files[5], files[8], files[9], files[4]
    assert one.image == bytes_equal.image != pixels_equal.image
    for some in ([one], [one, bytes_equal], [one, pixels_equal]):
        assert separate(bundled(), index.reader, TEXT, some).words == ()
    assert separate(bundled(), index.reader, "the of", [one, other]).words == ()
    found = separate(bundled(), index.reader, TEXT, [one, bytes_equal, other]).words
    assert found
    assert all(scores[0] == scores[1] != scores[2] for _, scores in found)


def test_the_token_score_is_the_mean_over_tokens_of_the_best_patch() -> None:
    generator = torch.Generator().manual_seed(0)
    words, patches = (torch.nn.functional.normalize(torch.randn(2, n, 8, generator=generator), dim=2) for n in (5, 4))
    by_text = torch.stack([token_scores(text, patches) for text in words])  # [2, 2]
    literal = [[np.mean([max(float(w @ p) for p in image) for w in text]) for image in patches] for text in words]
    torch.testing.assert_close(by_text, torch.tensor(literal, dtype=torch.float32))
    by_image = torch.stack([token_scores(image, words) for image in patches])  # with the roles exchanged
    expected = sum(torch.nn.functional.cross_entropy(3 * one, torch.arange(2)) for one in (by_text, by_image)) / 2
    masks = torch.ones(2, 4).bool(), torch.ones(2, 5).bool()
    torch.testing.assert_close(token_loss(patches, words, *masks, 3.0), expected)


@pytest.mark.parametrize("weight", [0.05, 3.0, -1.0])
def test_re_ranked_hits_are_in_the_order_of_both_scores(weight: float, index: Searcher) -> None:
    hits = index.search(TEXT, k=50).hits
    found = rerank(bundled(), index.reader, TEXT, hits, weight=weight)
    both = [hit.score + weight * (hit.token_score or 0) for hit in found]
    assert both == sorted(both, reverse=True)
    scores = {hit.file.id: hit.score for hit in hits}
    assert {hit.file.id: hit.score for hit in found} == scores
    for hit in found:
        cosines = [row for *_, row in literal_cosines(TEXT, decode_image(index.reader.content(hit.file), ""))]
        assert hit.token_score == pytest.approx(float(torch.stack(cosines).amax(dim=1).mean()), abs=1e-5)
    rows = [hit.row for hit in found if hit.file.name in ("a", "b") or hit.file.image == files_of(index)[5].image]
    assert rows == [5, 5, 8]  # of equal hits the first row comes first


def test_hits_beyond_the_best_stay_where_they_are(index: Searcher, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = index.search(TEXT, k=50).hits
    monkeypatch.setattr("hnclip.search.explain.MOST", 4)
    found = rerank(bundled(), index.reader, TEXT, hits, weight=5.0)
    assert tuple(found[4:]) == hits[4:]
    assert {hit.file for hit in found[:4]} == {hit.file for hit in hits[:4]}
    assert all(hit.token_score is not None for hit in found[:4])
