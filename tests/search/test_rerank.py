"""Re-ranking: literal scores, whose order changes and whose does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_index import bundled, small_index

from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.losses.tokens import token_loss
from hnclip.search import rerank as module
from hnclip.search.description import token_vectors
from hnclip.search.find import Finder, Hit, open_finder
from hnclip.search.patches import patch_batches
from hnclip.search.rerank import WEIGHT, rerank, token_score

RECORDS = scene_records("shelf", "test", families=4)
TEXT = RECORDS[5].captions[0]


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finder]:
    """Scenes as files, the last of them under four names: twice the same bytes, and twice the same pixels."""
    folder = tmp_path_factory.mktemp("rerank")
    twins = folder / "twins"
    twins.mkdir()
    records: list[Record] = []
    for name, level in (("a", 1), ("b", 9), ("c", 1)):
        RECORDS[-1].image.load().save(twins / f"{name}.png", compress_level=level)
        records.append(Record(f"twins/{name}.png", FileImage(twins / f"{name}.png"), (), None))
    small_index(folder / "a.hnc", bundled(), [*RECORDS, *records], tokens=True)
    with open_finder(folder / "a.hnc") as finder:
        yield finder


@pytest.fixture(scope="module")
def hits(finder: Finder) -> list[Hit]:
    return finder.images(finder.text_vectors([TEXT]), 50)[0]


def test_the_score_is_the_mean_over_words_of_the_best_patch() -> None:
    generator = torch.Generator().manual_seed(0)
    words, patches = torch.randn(5, 7, generator=generator), torch.randn(3, 4, 7, generator=generator)
    for scored, picture in zip(token_score(words, patches), patches):
        best = [max(float(word @ patch) for patch in picture) for word in words]
        assert float(scored) == pytest.approx(sum(best) / len(best), abs=1e-5)


def test_the_score_is_that_of_the_token_loss() -> None:
    """Of two captions and two pictures, the loss of scores that are made by hand is the loss."""
    generator = torch.Generator().manual_seed(1)
    patches = torch.nn.functional.normalize(torch.randn(2, 4, 8, generator=generator), dim=2)
    words = torch.nn.functional.normalize(torch.randn(2, 5, 8, generator=generator), dim=2)
    by_text = torch.stack([token_score(text, patches) for text in words])  # [2, 2]
    by_image = torch.stack([token_score(image, words) for image in patches])  # the same with the roles exchanged
    own = torch.arange(2)
    expected = sum(torch.nn.functional.cross_entropy(3 * scores, own) for scores in (by_text, by_image)) / 2
    everything = torch.ones(2, 4).bool(), torch.ones(2, 5).bool()
    torch.testing.assert_close(token_loss(patches, words, *everything, 3.0), expected)


def test_hits_are_in_the_order_of_both_scores(finder: Finder, hits: list[Hit], monkeypatch: pytest.MonkeyPatch) -> None:
    words = token_vectors(finder.model, TEXT)
    tokens = {
        item.id: float(score)
        for batch in patch_batches(finder, [hit.item for hit in hits])
        for item, score in zip(batch.items, token_score(words, batch.vectors))
    }
    for weight in (WEIGHT, 3.0, -1.0):
        monkeypatch.setattr(module, "WEIGHT", weight)
        found = rerank(finder, TEXT, hits)
        assert {hit.item.id for hit in found} == {hit.item.id for hit in hits}
        for hit in found:
            assert hit.tokens == pytest.approx(tokens[hit.item.id], abs=1e-5)
        both = [hit.score + weight * (hit.tokens or 0) for hit in found]
        assert both == sorted(both, reverse=True)
        scores = {hit.item.id: hit.score for hit in hits}
        assert all(hit.score == scores[hit.item.id] for hit in found)
    assert [hit.item.id for hit in found] != [hit.item.id for hit in hits]


@pytest.mark.parametrize("most", [1, 7])
def test_hits_beyond_the_best_stay_where_they_are(
    finder: Finder, hits: list[Hit], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHT", 5.0)
    found = rerank(finder, TEXT, hits, most=most)
    assert found[most:] == hits[most:]
    assert all(hit.tokens is None for hit in found[most:])
    assert all(hit.tokens is not None for hit in found[:most])
    assert {hit.item.id for hit in found[:most]} == {hit.item.id for hit in hits[:most]}


def test_of_equal_hits_the_first_row_comes_first(finder: Finder) -> None:
    same = [item for item in finder.index.all_items() if item.name.startswith("twins/")]
    assert [item.row for item in same] == [len(RECORDS), len(RECORDS) + 1, len(RECORDS)]  # a and c are the same bytes
    found = rerank(finder, TEXT, [Hit(item, 0.5) for item in (same[1], same[2], same[0])])
    assert [hit.item.name[-5] for hit in found] == ["c", "a", "b"]
    assert len({hit.tokens for hit in found[:2]}) == 1


def test_files_of_the_same_content_are_looked_at_once(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = module.patch_batches
    monkeypatch.setattr(module, "patch_batches", lambda *given: looked.append(len(given[1])) or real(*given))
    same = [item for item in finder.index.all_items() if item.name.startswith("twins/")]
    rerank(finder, TEXT, [Hit(item, 0.5) for item in same])
    assert looked == [2]


def test_nothing_and_a_text_without_words(finder: Finder, hits: list[Hit]) -> None:
    assert rerank(finder, TEXT, []) == []
    with pytest.raises(ValueError, match="no word"):
        rerank(finder, "!", hits)


def test_pictures_without_stored_patches_are_read_again(finder: Finder, hits: list[Hit], tmp_path: Path) -> None:
    small_index(tmp_path / "a.hnc", finder.model, RECORDS[:4], files=tmp_path / "files")
    (tmp_path / "files" / f"{RECORDS[3].id.replace('/', '-')}.png").unlink()
    with open_finder(tmp_path / "a.hnc") as read:
        again = {hit.item.name: hit for hit in rerank(read, TEXT, read.images(read.text_vectors([TEXT]), 9)[0])}
    stored = {hit.item.name: hit for hit in rerank(finder, TEXT, hits)}
    assert not any(hit.approximate for hit in stored.values())
    assert [hit.item.name for hit in again.values() if hit.approximate] == [f"{RECORDS[3].id.replace('/', '-')}.png"]
    for record in RECORDS[:3]:
        name = f"{record.id.replace('/', '-')}.png"
        assert again[name].tokens == pytest.approx(stored[record.id].tokens, abs=5e-3)
        assert replace(again[name], tokens=None, item=stored[record.id].item).score == stored[record.id].score
