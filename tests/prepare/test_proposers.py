"""Proposers without a network: which boxes they give, and that all of them can be cropped."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hnclip.data.views.shrink import shrunk
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hnclip.data.parts import scale_box
from hnclip.data.scenes import scene_records
from hnclip.prepare.proposal import Proposal, Proposer
from hnclip.prepare.proposers import Felzenszwalb, Grid, Together, proposer
from hnclip.prepare.proposers.boxes import distinct, fitting_share, overlap, usable

DEFAULT = Together((Felzenszwalb(), Grid()))

boxes = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def patches(size: tuple[int, int], *boxes: tuple[int, int, int, int]) -> Image.Image:
    """Boxes of different colours on grey."""
    picture = Image.new("RGB", size, (120, 120, 120))
    for number, box in enumerate(boxes):
        picture.paste(((250, 20, 20), (20, 250, 20), (20, 20, 250))[number], box)
    return picture


def found(proposals: list[Proposal]) -> set[tuple[int, int, int, int]]:
    return {proposal.box for proposal in proposals}


def pixels(box: tuple[int, int, int, int]) -> set[tuple[int, int]]:
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@given(boxes, boxes)
def test_overlap_counts_pixels(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> None:
    one, other = pixels(first), pixels(second)
    assert overlap(first, second) == pytest.approx(len(one & other) / len(one | other))
    assert overlap(first, second) == overlap(second, first)


@given(st.integers(1, 12), st.integers(1, 40))
def test_boxes_come_back_with_every_pixel_that_they_touch(small: int, large: int) -> None:
    """Pixel i of a picture shrunk to `small` is made from [i, i + 1)·large / small."""
    for left in range(small):
        for right in range(left + 1, small + 1):
            touched = [
                pixel for pixel in range(large) if pixel * small < right * large and (pixel + 1) * small > left * large
            ]
            expected = (touched[0], 0, touched[-1] + 1, 7)
            assert scale_box((left, 0, right, 7), (small, 7), (large, 7)) == expected
            turned = scale_box((0, left, 7, right), (7, small), (7, large))
            assert turned == (0, touched[0], 7, touched[-1] + 1)


def test_shares_and_sides() -> None:
    assert [fitting_share(area, (20, 10)) for area in (1, 2, 160, 161)] == [False, True, True, False]
    assert [usable(box, (20, 10)) for box in ((0, 0, 2, 2), (0, 0, 1, 10), (0, 0, 20, 1))] == [True, False, False]
    assert not usable((0, 0, 20, 10), (20, 10))
    assert usable((0, 0, 20, 9), (20, 10))


def test_of_boxes_nearly_the_same_the_first_stays() -> None:
    whole, close, apart = (0, 0, 10, 10), (0, 0, 10, 9), (0, 0, 10, 8)  # overlaps of 0.9 and 0.8 with the first
    first, second, third, again = (Proposal(box, source) for box, source in zip((whole, close, apart, whole), "abcd"))
    assert distinct([first, second, third, again]) == [first, third]
    assert distinct([second, first, third]) == [second, third]  # 8 / 9 is not enough


def test_shrinking_keeps_the_shape_and_never_enlarges() -> None:
    kind = Image.Resampling.BILINEAR
    assert shrunk(noise(40, 30), (40, 30), kind).size == (40, 30)
    assert shrunk(noise(40, 30), (400, 20), kind).size == (27, 20)
    assert shrunk(noise(40, 30), (10, 99), kind).size == (10, 8)
    assert shrunk(noise(90, 1), (9, 9), kind).size == (9, 1)


def test_cells_of_a_grid() -> None:
    assert [proposal.box for proposal in Grid(((2, 2),))(noise(40, 30))] == [
        (0, 0, 20, 15),
        (20, 0, 40, 15),
        (0, 15, 20, 30),
        (20, 15, 40, 30),
    ]
    assert len(Grid()(noise(40, 30))) == 4 + 9
    assert len(Grid(((1, 1),))(noise(40, 30))) == 0  # that would be the whole picture
    assert [proposal.box for proposal in Grid(((1, 2),))(noise(9, 8))] == [(0, 0, 9, 4), (0, 4, 9, 8)]


@pytest.mark.parametrize(("width", "height"), [(41, 29), (7, 50), (640, 427)])
def test_cells_cover_each_pixel_once(width: int, height: int) -> None:
    cover = np.zeros((height, width), dtype=int)
    for proposal in Grid(((3, 2),))(noise(width, height)):
        left, top, right, bottom = proposal.box
        cover[top:bottom, left:right] += 1
    assert (cover == 1).all()


def test_segments_are_found_where_they_are() -> None:
    places = [(20, 10, 80, 50), (120, 70, 180, 130), (40, 80, 90, 140)]
    boxes = found(Felzenszwalb()(patches((200, 150), *places)))
    for place in places:
        assert max(overlap(place, box) for box in boxes) > 0.85
    assert (0, 0, 200, 150) not in boxes  # the box of the background


def test_segments_of_a_large_picture_come_back_in_its_pixels() -> None:
    places = [(200, 100, 800, 500), (1200, 700, 1801, 1303)]
    boxes = found(Felzenszwalb()(patches((2003, 1501), *places)))
    for place in places:
        assert max(overlap(place, box) for box in boxes) > 0.85


def test_the_rule_is_on_the_area_of_the_segment_not_of_its_box(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.zeros((30, 20), dtype=np.int64)  # the ground: its box is the whole picture
    labels[1:29, 1:19] = 1  # a ring, from here …
    labels[3:27, 3:17] = 2  # … to here: 28 % in a box of 84 %
    labels[8:10, 6:9] = 3  # 6 pixels, exactly a hundredth
    labels[20:25, 5:6] = 4  # 5 pixels
    monkeypatch.setattr("skimage.segmentation.felzenszwalb", lambda *_, **__: labels)
    ring, inner, speck = (1, 1, 19, 29), (3, 3, 17, 27), (6, 8, 9, 10)
    assert [proposal.box for proposal in Felzenszwalb((1,))(noise(20, 30))] == [ring, inner, speck]
    labels[:] = 1
    labels[:6] = 0  # a fifth, and 80 %
    assert [proposal.box for proposal in Felzenszwalb((1,))(noise(20, 30))] == [(0, 0, 20, 6), (0, 6, 20, 30)]
    labels[5, 0] = 1  # a pixel more than 80 %
    assert [proposal.box for proposal in Felzenszwalb((1,))(noise(20, 30))] == [(0, 0, 20, 6)]


def test_larger_scales_give_fewer_segments() -> None:
    picture = noise(12, 9).resize((240, 180), Image.Resampling.BICUBIC)
    counts = [len(Felzenszwalb((scale,))(picture)) for scale in (30, 300, 3000)]
    assert counts[0] > counts[1] > counts[2]
    several = Felzenszwalb((30, 300, 3000))(picture)
    assert max(counts) < len(several) <= sum(counts)
    assert several == distinct(several)


@pytest.mark.parametrize("maker", [Felzenszwalb(), Grid(), DEFAULT])
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 300), (300, 1), (2, 2), (3, 2), (5, 7), (97, 31), (31, 97), (600, 4), (4000, 3), (290, 41)]
)
@pytest.mark.parametrize("kind", ["noise", "flat", "grey", "patches"])
def test_every_box_can_be_cropped(maker: Proposer, size: tuple[int, int], kind: str) -> None:
    picture = {
        "noise": noise(*size),
        "flat": Image.new("RGB", size, (9, 90, 200)),
        "grey": noise(*size).convert("L"),
        "patches": patches(size, (0, 0, size[0] // 2, size[1] // 3), (size[0] // 2, size[1] // 2, *size)),
    }[kind]
    proposals = maker(picture)
    assert proposals == maker(picture)
    for proposal in proposals:
        left, top, right, bottom = proposal.box
        assert all(type(value) is int for value in proposal.box)
        assert 0 <= left <= right - 2 <= size[0] - 2
        assert 0 <= top <= bottom - 2 <= size[1] - 2
        assert (right - left) * (bottom - top) >= 0.01 * size[0] * size[1]
        assert proposal.box != (0, 0, *size)
        assert proposal.source in ("felzenszwalb", "grid")
    if kind == "flat":
        assert all(proposal.source == "grid" for proposal in proposals)
    if kind == "noise" and min(size) >= 31:
        assert proposals


def test_together_is_both_without_doubles() -> None:
    """The picture's quarters are segments and cells."""
    picture = patches((200, 160), (0, 0, 100, 80), (100, 80, 200, 160), (100, 0, 200, 80))
    segments, cells, both = Felzenszwalb()(picture), Grid()(picture), DEFAULT(picture)
    assert both[: len(segments)] == segments
    assert set(both) <= {*segments, *cells}
    assert len(both) < len(segments) + len(cells)
    assert both == distinct(both)
    quarter = [proposal.source for proposal in both if overlap(proposal.box, (0, 0, 100, 80)) > 0.8]
    assert quarter == ["felzenszwalb"]
    assert Together((Grid(), Felzenszwalb()))(picture)[:13] == cells


def test_things_of_scenes_are_among_the_proposals() -> None:
    hits = []
    for record in scene_records("shelf", "train", families=3, members=4):
        proposed = found(Felzenszwalb()(record.image.load()))
        hits += [max(overlap(region.box, box) for box in proposed) > 0.5 for region in record.regions]
    assert np.mean(hits) > 0.6


def test_versions_say_all_that_boxes_depend_on() -> None:
    import PIL
    import skimage

    makers: list[Proposer] = [Felzenszwalb(), Felzenszwalb((100,)), Felzenszwalb(longest=128), Grid(), Grid(((2, 3),))]
    assert len({maker.version for maker in makers}) == len(makers)
    assert skimage.__version__ in makers[0].version
    assert PIL.__version__ in makers[0].version
    assert DEFAULT.name == "felzenszwalb+grid"
    assert Felzenszwalb().version in DEFAULT.version
    assert Grid().version in DEFAULT.version


def test_proposers_compare_and_pickle() -> None:
    assert Felzenszwalb() == Felzenszwalb((100, 300, 900))
    assert Felzenszwalb().version == Felzenszwalb((100, 300, 900)).version
    copy = pickle.loads(pickle.dumps(DEFAULT))
    assert copy == DEFAULT
    assert hash(copy) == hash(DEFAULT)
    assert copy(noise(60, 40)) == DEFAULT(noise(60, 40))


def test_names_are_understood() -> None:
    for name, expected in [
        ("auto", DEFAULT),
        ("felzenszwalb+grid", DEFAULT),
        ("felzenszwalb", Felzenszwalb()),
        ("grid", Grid()),
    ]:
        assert proposer(name, weights=None) == expected


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no proposer is called 'yolo': use auto, sam, felzenszwalb, grid, felz"):
        proposer("yolo")
    with pytest.raises(ValueError, match="sam needs weights: name a directory of them with --weights"):
        proposer("sam")
    with pytest.raises(ValueError, match="grid takes no weights"):
        proposer("grid", weights=tmp_path)
    with pytest.raises(ValueError, match=r"is no directory of SAM's weights: it has no config\.json"):
        proposer("auto", weights=tmp_path)


def test_settings_that_mean_nothing() -> None:
    for wrong in ((), (0,), (-1.0,), (float("nan"),)):
        with pytest.raises(ValueError, match="scales must be finite numbers greater than 0"):
            Felzenszwalb(wrong)
    with pytest.raises(ValueError, match="longest"):
        Felzenszwalb(longest=1)
    for grids in ((), ((0, 2),)):
        with pytest.raises(ValueError, match="grids must hold"):
            Grid(grids)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ValueError, match=r"needs the package skimage: pip install 'hnclip\[views\]'"):
        proposer("auto")
    assert proposer("grid").name == "grid"
