"""Result lists of every query against a list that is sorted by hand, with ties made on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_galleries import evaluation_of, gallery_of, model_on, tied_vectors
from test_ranks import LargestTensor
from torch import Tensor

from hnclip.evaluate import Query, query_results, read_queries, write_queries

OWNER = torch.tensor([0, 0, 1, 2, 2, 2, 3])


def literal_lists(image: Tensor, text: Tensor, owner: Tensor) -> list[tuple[str, str, int | None, int, list]]:
    """For every query the whole list of (score, is right, record, caption), by looking at every pair in fp64."""
    scores = F.normalize(text.double(), dim=1) @ F.normalize(image.double(), dim=1).T  # [T, I]
    numbers = [int((owner[:t] == owner[t]).sum()) for t in range(len(owner))]
    found = []
    for t, own in enumerate(owner.tolist()):
        entries = [(float(scores[t, i]), i == own, f"r{i}", None) for i in range(len(image))]
        found.append(("text_to_image", f"r{own}", numbers[t], ordered(entries)))
    for i in range(len(image)):
        entries = [
            (float(scores[t, i]), bool(owner[t] == i), f"r{int(owner[t])}", numbers[t]) for t in range(len(text))
        ]
        found.append(("image_to_text", f"r{i}", None, ordered(entries)))
    return found


def ordered(entries: list) -> list:
    """By falling score; of equal ones the wrong before the right."""
    return sorted(entries, key=lambda entry: (-round(entry[0], 9), entry[1]))


@settings(max_examples=80)
@given(tied_vectors(), st.sampled_from([1, 2, 5, 40]), st.sampled_from([1, 3, 64]))
def test_equals_sorting_every_pair_with_ties(vectors, k, chunk):
    image, text, owner = vectors
    queries = list(query_results(gallery_of(owner), evaluation_of(*vectors), k, chunk=chunk))
    literal = literal_lists(image, text, owner)
    assert len(queries) == len(literal) == len(text) + len(image)
    for query, (direction, record, caption, entries) in zip(queries, literal):
        assert (query.direction, query.record, query.caption) == (direction, record, caption)
        place = [right for _, right, *_ in entries].index(True)
        assert query.rank == 1 + place
        assert query.score == pytest.approx(entries[place][0], abs=2e-6)
        assert len(query.top) == min(k, len(entries))
        # Scores and who is right are fixed place by place; which of several tied wrong ones stands there is not.
        known = {(name, number): score for score, _, name, number in entries}
        for found, (score, right, *_) in zip(query.top, entries):
            assert found.score == pytest.approx(score, abs=2e-6)
            assert (found.record == record) == right
            assert found.score == pytest.approx(known[found.record, found.caption], abs=2e-6)
        assert len({(found.record, found.caption) for found in query.top}) == len(query.top)


@pytest.mark.parametrize("chunk", [2, 1000])
def test_equal_wrong_candidates_stand_in_the_order_of_the_gallery(chunk):
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    queries = query_results(gallery_of(torch.arange(4)), evaluation_of(image, image, torch.arange(4)), chunk=chunk)
    lists = [[found.record for found in query.top] for query in queries]
    assert lists == 2 * [
        ["r0", "r1", "r2", "r3"],
        ["r2", "r3", "r1", "r0"],
        ["r1", "r3", "r2", "r0"],
        ["r1", "r2", "r3", "r0"],
    ]


def test_rank_one_exactly_when_the_list_begins_with_a_right_answer():
    found = model_on(OWNER, 3.0, 1)
    queries = list(query_results(gallery_of(OWNER), found))
    assert [query.rank for query in queries] == [*found.ranks.text_to_image, *found.ranks.image_to_text]
    assert {query.rank == 1 for query in queries} == {True, False}
    for query in queries:
        assert (query.top[0].record == query.record) == (query.rank == 1)


def test_the_list_follows_the_reported_rank_within_rounding():
    """The wrong image is worse by less than the tolerance: the rank counts it as a tie, so the list puts it first."""
    image = torch.tensor([[0.8, 0.6], [0.8 - 1e-6, 0.6]])
    text = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    first = next(query_results(gallery_of(torch.arange(2)), evaluation_of(image, text, torch.arange(2))))
    assert first.rank == 2
    assert [found.record for found in first.top] == ["r1", "r0"]


def test_further_right_answers_give_way_to_ties_as_well():
    """The wrong caption is worse than the second own one, but by rounding alone."""
    image = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6 - 1e-6, 0.8]])
    owner = torch.tensor([0, 0, 1])
    query = list(query_results(gallery_of(owner), evaluation_of(image, text, owner)))[3]
    assert (query.direction, query.record, query.rank) == ("image_to_text", "r0", 1)
    assert [(found.record, found.caption) for found in query.top] == [("r0", 0), ("r1", 0), ("r0", 1)]


def test_file_and_back(tmp_path: Path):
    gallery, found = gallery_of(OWNER, ["family", None, "family", None]), model_on(OWNER, 3.0, 1)
    path = tmp_path / "new" / "queries.jsonl"
    write_queries(path, gallery, found, k=3)
    queries = read_queries(path)
    assert queries == list(query_results(gallery, found, 3))
    assert [query.group for query in queries[-4:]] == ["family", None, "family", None]
    assert list(path.parent.iterdir()) == [path]
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == ["direction", "record", "caption", "group", "rank", "score", "top"]
    assert list(first["top"][0]) == ["record", "caption", "score"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "queries.jsonl"
    write_queries(path, gallery_of(OWNER), model_on(OWNER, 1.0, 1))
    before = path.read_bytes()
    unknown = gallery_of(OWNER)
    unknown.records[3] = object()  # no id: fails after the first lines are written
    with pytest.raises(AttributeError):
        write_queries(path, unknown, model_on(OWNER, 2.0, 1))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_memory_is_bounded_by_the_tile():
    owner = torch.arange(300)
    found, gallery = model_on(owner, 1.0, 1), gallery_of(owner)
    with LargestTensor() as seen:
        query_results(gallery, found, 5, chunk=60)
    assert seen.largest == 300 * 16  # the vectors: more than a tile, far less than 300 × 300


def valid() -> dict[str, object]:
    top = [{"record": "b", "caption": None, "score": 0.5}]
    numbers = {"caption": 0, "rank": 2, "score": 0.25}
    return {"direction": "text_to_image", "record": "a", "group": None, "top": top, **numbers}


@pytest.mark.parametrize(
    "changed",
    [
        {"direction": "sideways"},
        {"rank": 0},
        {"rank": 1.5},
        {"rank": "1"},
        {"record": 3},
        {"group": 3},
        {"caption": None},
        {"direction": "image_to_text"},
        {"score": None},
        {"top": None},
        {"top": [{"record": "b"}]},
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, changed):
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps(valid()) + "\n" + json.dumps(valid() | changed) + "\n")
    with pytest.raises(ValueError, match=r"queries\.jsonl, line 2 is not a query"):
        read_queries(path)


@pytest.mark.parametrize("line", ["{", "[1]", "3", "null", "{}", "\udcff"])
def test_lines_that_are_no_queries_at_all_are_named(tmp_path: Path, line):
    path = tmp_path / "queries.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=r"queries\.jsonl, line 1 is not a query"):
        read_queries(path)


def test_further_fields_are_left_aside(tmp_path: Path):
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps(valid() | {"note": "a mirror"}) + "\n")
    (query,) = read_queries(path)
    assert isinstance(query, Query)
    assert query.top[0].record == "b"


def test_errors_name_the_argument(tmp_path: Path):
    found = model_on(OWNER, 1.0, 1)
    with pytest.raises(ValueError, match=r"^k must be at least 1"):
        query_results(gallery_of(OWNER), found, 0)
    with pytest.raises(ValueError, match=r"^gallery and evaluation do not belong together"):
        write_queries(tmp_path / "queries.jsonl", gallery_of(OWNER.flip(0)), found)
    assert not (tmp_path / "queries.jsonl").exists()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no queries"):
        read_queries(tmp_path / "empty.jsonl")
