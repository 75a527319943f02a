"""Proposers without a network: which boxes they find, and that all of them can be cropped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hnclip.prepare.proposers import SAME, felzenszwalb, grid_cells, is_region, open_proposer, overlap, union

BOTH = union(felzenszwalb, grid_cells)
boxes = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@given(boxes, boxes)
def test_overlap_counts_pixels(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> None:
    one, other = ({(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (first, second))
    assert overlap(first, second) == pytest.approx(len(one & other) / len(one | other))


def test_small_large_thin_and_nearly_equal_boxes_are_dropped() -> None:
    assert [is_region(area, (20, 10)) for area in (1, 2, 160, 161)] == [False, True, True, False]
    whole, close, apart = (0, 0, 10, 10), (0, 0, 10, 9), (0, 0, 10, 8)  # overlaps of 0.9 and 0.8 with the first
    thin = [(0, 0, 1, 10), (0, 0, 20, 1), (0, 0, 20, 20)]  # and the whole image
    assert union(lambda _: [whole, close, *thin], lambda _: [apart, whole])(noise(20, 20)) == [whole, apart]


def test_cells_cover_each_pixel_once_and_segments_are_found_in_pixels_of_the_image() -> None:
    cells = grid_cells(noise(41, 29))
    for part in (cells[:4], cells[4:]):
        cover = np.zeros((29, 41), dtype=int)
        for left, top, right, bottom in part:
            cover[top:bottom, left:right] += 1
        assert (cover == 1).all()
    places = [(200, 100, 800, 500), (1200, 700, 1800, 1300), (400, 800, 900, 1400)]
    image = Image.new("RGB", (2003, 1501), "grey")
    for colour, place in zip(("red", "green", "blue"), places):
        image.paste(colour, place)
    found = union(felzenszwalb)(image)
    assert all(max(overlap(place, box) for box in found) > 0.85 for place in places)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (3, 2), (97, 31), (4000, 3)])
def test_every_box_can_be_cropped(size: tuple[int, int]) -> None:
    for image in (noise(*size), noise(*size).convert("L"), Image.new("RGB", size, (9, 90, 200))):
        found = BOTH(image)
        for box in found:
            left, top, right, bottom = box
            assert 0 <= left <= right - 2 <= size[0] - 2
            assert 0 <= top <= bottom - 2 <= size[1] - 2
        assert not [box for box in found for other in found if box != other and overlap(box, other) >= SAME]


def test_proposers_by_name() -> None:
    with open_proposer("felzenszwalb+grid") as (find_boxes, settings):
        assert list(settings) == ["felzenszwalb", "grid"]
        assert find_boxes(noise(60, 40)) == BOTH(noise(60, 40))
    for name, word in (("yolo", "yolo"), ("sam", "weights")):
        with pytest.raises(ValueError, match=word), open_proposer(name):
            pass


KILLED = """
import multiprocessing, os, signal
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from hnclip.prepare.proposers import felzenszwalb, segment_workers

if __name__ == "__main__":
    image = Image.linear_gradient("L").convert("RGB").resize((700, 500))
    image.paste("red", (40, 60, 300, 400))
    with segment_workers(2) as segments, ThreadPoolExecutor(2) as pool:
        same = all(found == felzenszwalb(image) for found in pool.map(segments, [image] * 8))
        print(same, len(multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)  # a file: spawned processes import it again
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "killed.py")]
    # Returns when every process that inherited standard output has ended.
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (killed.returncode, killed.stdout) == (-9, "True 2\n")
