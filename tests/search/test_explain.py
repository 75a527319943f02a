"""Words and patches: literal late interaction, where patches lie, and pictures that are not there any more."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from small_index import bundled, small_index

from hnclip.core import Record
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.data.scenes import scene_records
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.explain import Explanation, explain, patch_side, seen_box
from hnclip.search.find import Finder, open_finder
from hnclip.search.index.reader import Index, Item
from hnclip.search.patches import patch_batches
from small_families import write_siglip, write_two_towers

RECORDS = scene_records("park", "test", families=2)
TEXT = "A mid-sized red umbrella stands under the pink tree, and a house."


@pytest.fixture(scope="module")
def model() -> DualEncoder:
    return bundled()


@pytest.fixture(scope="module")
def folder(model: DualEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three indexes of the same pictures: files, files with stored patches, and scenes without a place."""
    folder = tmp_path_factory.mktemp("explain")
    small_index(folder / "files.hnc", model, RECORDS, files=folder / "files")
    small_index(folder / "stored.hnc", model, RECORDS, files=folder / "files", tokens=True)
    small_index(folder / "scenes.hnc", model, RECORDS[:3])
    return folder


@pytest.fixture
def finder(folder: Path) -> Iterator[Finder]:
    with open_finder(folder / "files.hnc") as finder:
        yield finder


def items_of(finder: Finder) -> list[Item]:
    return list(finder.index.all_items())


def scores(explanation: Explanation) -> torch.Tensor:
    return torch.tensor([word.patches for word in explanation.words])  # [W, P]


def test_every_number_is_the_literal_one(model: DualEncoder, finder: Finder) -> None:
    items = [items_of(finder)[place] for place in (7, 2)]
    with torch.no_grad():
        said = model.encode_texts(model.tokenize([TEXT]), tokens=True)
        seen = model.encode_images(
            model.preprocess_images([RECORDS[place].image.load() for place in (7, 2)]), tokens=True
        )
    assert said.tokens is not None
    assert seen.tokens is not None
    (offsets,) = model.text_transform.offsets([TEXT])
    explained = explain(finder, TEXT, items)
    assert [each.item for each in explained] == items
    for explanation, patches in zip(explained, seen.tokens):
        assert (explanation.text, explanation.rows, explanation.columns) == (TEXT, 6, 6)
        assert (explanation.box, explanation.approximate) == ((0, 0, 1, 1), False)
        assert [word.text for word in explanation.words][1:4] == ["mid-sized", "red", "umbrella"]
        for word in explanation.words:
            inside = [place + 1 for place, (a, b) in enumerate(offsets) if a < word.stop and b > word.start]
            cosines = [(patches @ said.tokens[0, token]).tolist() for token in inside]  # of each token, [P]
            expected = [sum(column) / len(column) for column in zip(*cosines)]
            assert word.patches == pytest.approx(expected, abs=1e-5)
            assert word.score == max(word.patches)


def test_stored_patches_are_those_of_the_pictures(folder: Path, finder: Finder) -> None:
    items = items_of(finder)[:5]
    for picture in (folder / "files").iterdir():
        assert picture.suffix == ".png"
    with open_finder(folder / "stored.hnc") as stored:
        assert stored.index.about.patches == 36
        kept = explain(stored, TEXT, items_of(stored)[:5])
    for one, other in zip(explain(finder, TEXT, items), kept):
        torch.testing.assert_close(scores(one), scores(other), atol=6e-3, rtol=0)
        assert not other.approximate


def test_stored_patches_are_asked_of_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_finder(folder / "stored.hnc") as stored:
        monkeypatch.setattr(Index, "content", lambda *_: pytest.fail("read a picture"))
        (batch,) = patch_batches(stored, items_of(stored)[4:6])
    torch.testing.assert_close(batch.vectors.norm(dim=2), torch.ones(2, 36))


def test_pictures_come_in_their_order_whatever_the_batches(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.patches.BATCH", 4)
    items = [*items_of(finder)[:2:-1], items_of(finder)[5]]
    batches = list(patch_batches(finder, items))
    assert [len(batch.items) for batch in batches] == [4, 2]
    assert [item for batch in batches for item in batch.items] == items
    together = torch.cat([batch.vectors for batch in batches])  # [n, P, D]
    alone = torch.cat([next(patch_batches(finder, [item])).vectors for item in items])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_a_picture_that_is_gone_or_another_is_explained_by_its_thumbnail(
    folder: Path, model: DualEncoder, tmp_path: Path
) -> None:
    pictures = tmp_path / "files"
    small_index(tmp_path / "a.hnc", model, RECORDS[:4], files=pictures)
    names = sorted(path.name for path in pictures.iterdir())
    (pictures / names[0]).unlink()
    shutil.copy(pictures / names[2], pictures / names[1])
    with open_finder(tmp_path / "a.hnc") as finder:
        explained = explain(finder, TEXT, items_of(finder))
    with open_finder(folder / "files.hnc") as whole:
        expected = explain(whole, TEXT, items_of(whole)[:4])
    assert [each.approximate for each in explained] == [True, True, False, False]
    for one, other in zip(explained, expected):
        assert (scores(one) - scores(other)).abs().max() < 0.25  # another picture's would differ as much as words do
        assert torch.corrcoef(torch.stack([scores(one).flatten(), scores(other).flatten()]))[0, 1] > 0.9


def test_scenes_without_a_place_are_explained_too(folder: Path) -> None:
    with open_finder(folder / "scenes.hnc") as finder:
        assert all(each.approximate for each in explain(finder, TEXT, items_of(finder)))


def test_bad_texts_and_nothing_to_explain(finder: Finder) -> None:
    assert explain(finder, TEXT, []) == []
    with pytest.raises(ValueError, match="no word"):
        explain(finder, "...", items_of(finder)[:1])


@pytest.mark.parametrize("write", [write_siglip, write_two_towers])
def test_other_families(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model = load(write(tmp_path / "model")).eval()
    records = [Record(each.id, each.image, ("a red dog lies on the grass",), None) for each in RECORDS[:2]]
    small_index(tmp_path / "a.hnc", model, records, files=tmp_path / "files", name=str(tmp_path / "model"))
    with open_finder(tmp_path / "a.hnc") as finder:
        explained = explain(finder, "a red dog near the large house", items_of(finder))
        (batch,) = patch_batches(finder, items_of(finder))
    for each in explained:
        assert [word.text for word in each.words] == ["a", "red", "dog", "near", "the", "large", "house"]
        assert all(len(word.patches) == each.rows * each.columns == batch.vectors.shape[1] for word in each.words)
        assert each.rows == each.columns > 1
        assert all(np.isfinite(word.score) for word in each.words)


def stub(transform: ImageTransform, patch: int | None = 16, side: int | None = None) -> DualEncoder:
    vision = SimpleNamespace() if patch is None else SimpleNamespace(patch_size=patch)
    family = SimpleNamespace(grid=lambda backbone, size: side or (size // patch if patch else None))
    backbone = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    found = SimpleNamespace(image_transform=transform, image_size=transform.size, family=family, backbone=backbone)
    found.source = "a stub"
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("transform", "shape", "box"),
    [
        (ImageTransform(96), (192, 192), (0, 0, 1, 1)),
        (ImageTransform(96), (400, 200), (0.25, 0, 0.75, 1)),
        (ImageTransform(96), (100, 400), (0, 0.375, 1, 0.625)),
        (ImageTransform(96, squash=True), (400, 200), (0, 0, 1, 1)),
        (ImageTransform(96, shortest=128), (300, 300), (0.125, 0.125, 0.875, 0.875)),
        (ImageTransform(96, shortest=128, squash=True), (900, 300), (0.125, 0.125, 0.875, 0.875)),
        (ImageTransform(100), (50, 50), (0, 0, 0.96, 0.96)),  # six patches of 16 leave 4 pixels out
    ],
)
def test_the_part_of_a_picture_that_patches_cover(
    transform: ImageTransform, shape: tuple[int, int], box: tuple[float, ...]
) -> None:
    assert seen_box(stub(transform), shape, 6) == pytest.approx(box)


@pytest.mark.parametrize("shape", [(320, 240), (211, 500), (96, 96), (1000, 97)])
@pytest.mark.parametrize("transform", [ImageTransform(96), ImageTransform(96, 110), ImageTransform(96, squash=True)])
def test_the_box_is_where_the_models_pixels_come_from(transform: ImageTransform, shape: tuple[int, int]) -> None:
    """A picture that grows brighter to the right, and redder to the bottom, says of each pixel where it lay."""
    width, height = shape
    across, down = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    picture = Image.fromarray((255 * np.stack([down, across, across], axis=2)).round().astype(np.uint8))
    pixels = preprocess_image(picture, transform).double() / 255  # [3, 96, 96]
    left, top, right, bottom = seen_box(stub(transform), shape, 6)
    middle = (torch.arange(96) + 0.5) / 96
    inside = slice(8, -8)  # filters bend at the edges
    expected = left + middle * (right - left), top + middle * (bottom - top)
    tolerance = 0.015
    assert (pixels[1].mean(dim=0) - expected[0])[inside].abs().max() < tolerance
    assert (pixels[0].mean(dim=1) - expected[1])[inside].abs().max() < tolerance


def test_patches_that_form_no_rectangle_are_an_error() -> None:
    assert patch_side(stub(ImageTransform(96)), 36) == 6
    assert patch_side(stub(ImageTransform(96), patch=None), 49) == 7  # the tower does not say, but the number does
    for model, count in ((stub(ImageTransform(96)), 37), (stub(ImageTransform(96), patch=None), 50)):
        with pytest.raises(ValueError, match=f"a stub makes {count} vectors of a picture, which form no rectangle"):
            patch_side(model, count)
