"""Models × benchmarks: every cell in its place, and no mark that the queries do not support."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from small_galleries import gallery_of, model_on

from hnclip.evaluate import Ranks, compare_ranks, published
from hnclip.evaluate.held_out import restrict
from hnclip.evaluate.marks import clear_marks, highest_marks
from hnclip.evaluate.matrix import Results
from hnclip.evaluate.result import PerQuery, Result, result_of
from hnclip.evaluate.retrieval import group_numbers

OWNER = torch.arange(80)
GALLERY = gallery_of(OWNER, [f"family {i // 2}" for i in range(80)])


def by_number(model: str, data: str, first: float, second: float, **changes: object) -> Result:
    """A result of which only the numbers are known."""
    metrics = {
        "text_to_image": {"R@1": first, "R@5": 90.0, "queries": 10},
        "image_to_text": {"R@1": second, "R@5": 95.0, "queries": 10},
    }
    values = {"images": 10, "captions": 10, "truncated": 0, "skipped": 0, "metrics": metrics, **changes}
    return Result(model=model, data=data, split="test", **values)  # type: ignore[arg-type]


def measured(model: str, noise: float, seed: int, data: str = "docci") -> Result:
    return result_of(model, data, "test", GALLERY, model_on(OWNER, noise, seed))


def cells(text: str) -> list[list[str]]:
    """The table in a Markdown text."""
    lines = [line for line in text.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


CROSS = Results(
    (
        by_number("on A", "a", 80.0, 70.123),
        by_number("on A", "b", 50.0, 40.0),
        by_number("on B", "b", 60.0, 40.0),
        by_number("on B", "a", 55.0, 70.12),
        by_number("zero-shot", "a", 30.0, 20.0),
    )
)


def test_rows_are_models_and_columns_are_benchmarks():
    assert cells(CROSS.to_markdown()) == [
        ["model", "a T→I R@1", "a I→T R@1", "b T→I R@1", "b I→T R@1"],
        ["on A", "**80.00**", "**70.12**", "*50.00*", "40.00"],
        ["on B", "*55.00*", "**70.12**", "**60.00**", "40.00"],
        ["zero-shot", "30.00", "*20.00*", "–", "–"],
    ]
    assert cells(CROSS.to_markdown(ks=(1, 5)))[0] == [
        "model",
        *(f"{data} {arrow} R@{k}" for data in "ab" for arrow in ("T→I", "I→T") for k in (1, 5)),
    ]


def test_marks_without_queries_say_that_they_claim_nothing():
    for text in (CROSS.to_text(), CROSS.to_markdown(), CROSS.to_latex()):
        assert "not compared query by query: such a mark claims no difference" in text
        assert "interval" not in text


def test_text_and_latex_hold_the_same_table():
    assert CROSS.to_text().split("\n")[2].split() == ["on", "A", "80.00*", "70.12*", "50.00+", "40.00"]
    latex = CROSS.to_latex(label="tab:cross")
    assert r"& \multicolumn{2}{c}{a} & \multicolumn{2}{c}{b} \\" in latex
    assert r"on B & \underline{55.00} & \textbf{70.12} & \textbf{60.00} & 40.00 \\" in latex
    assert r"\label{tab:cross}" in latex
    assert r"\caption{Recall in percent. a test: 10 images, 10 captions. b test: " in latex


def test_a_mark_needs_a_supported_difference():
    """Three models: the first far ahead, the other two alike. Nobody is marked second."""
    results = Results((measured("good", 0.5, 1), measured("bad", 5.0, 4), measured("as bad", 5.0, 6)))
    text = results.to_markdown()
    rows = cells(text)
    assert [cell.startswith("**") for cell in rows[1]] == [False, True, True]
    assert not any("*" in cell for row in rows[2:] for cell in row)
    assert "zero outside the paired 95 % interval of each difference" in text
    assert "claims no difference" not in text


def test_a_lead_that_may_be_chance_is_not_marked():
    results = Results((measured("one", 3.0, 1), measured("other", 3.0, 2)))
    values = [float(row[1]) for row in cells(results.to_markdown())[1:]]
    assert values[0] != values[1]
    assert not any("*" in cell for row in cells(results.to_markdown()) for cell in row)
    plain = Results(tuple(replace(result, queries=None) for result in results.results))
    assert any("**" in cell for row in cells(plain.to_markdown()) for cell in row)


@pytest.mark.parametrize(
    "noises", [(0.5, 2.0, 6.0), (2.0, 2.1, 6.0), (0.5, 4.0, 4.2), (1.0, 1.1, 1.2), (9.0, 0.5, 2.0)]
)
def test_marks_are_what_pairwise_comparisons_support(noises):
    """The rule, spelled out with `compare_ranks`."""
    groups = group_numbers(GALLERY.records)
    models = {row: model_on(OWNER, noise, row + 5).ranks for row, noise in enumerate(noises)}
    marks = clear_marks({row: PerQuery(ranks, groups) for row, ranks in models.items()}, "image_to_text", 1)

    def clearly_above(row: int, others: list[int]) -> bool:
        found = [compare_ranks(models[row], models[other], groups=groups)[1] for other in others]
        return all(one.clear and one.difference.mean > 0 for one in found)

    best, second, third = sorted(models, key=lambda row: -int((models[row].image_to_text == 1).sum()))
    expected = {}
    if clearly_above(best, [second, third]):
        expected[best] = "best"
        if clearly_above(second, [third]):
            expected[second] = "second"
    assert marks == expected


def test_the_best_must_be_clear_of_every_other_and_not_only_of_the_next():
    """The second misses eight of the best's hits and nothing else; the third hits others, so its distance is noise."""
    hits = torch.zeros(3, 200, dtype=torch.bool)
    hits[0, :100] = True
    hits[1, :92] = True
    hits[2, 100:191] = True
    ranks = [Ranks(row, row, torch.arange(200)) for row in torch.where(hits, 1, 2)]
    queries = [PerQuery(row, torch.arange(200)) for row in ranks]
    assert clear_marks(dict(enumerate(queries[:2])), "text_to_image", 1) == {0: "best"}
    assert clear_marks(dict(enumerate(queries)), "text_to_image", 1) == {}


def test_marks_resample_the_captions_of_a_picture_together():
    """Twelve pictures with 30 captions each: a lead on one picture is 30 captions wide, and still one picture's."""
    owner = torch.arange(12).repeat_interleave(30)
    first, second = torch.ones(2, 360, dtype=torch.int64)
    second[:30] = 2
    ones = torch.ones(12, dtype=torch.int64)
    queries = {row: PerQuery(Ranks(ranks, ones, owner), torch.arange(12)) for row, ranks in enumerate((first, second))}
    assert clear_marks(queries, "text_to_image", 1) == {}
    alone = {
        row: PerQuery(Ranks(ranks, ranks, torch.arange(360)), torch.arange(360))
        for row, ranks in enumerate((first, second))
    }
    assert clear_marks(alone, "text_to_image", 1) == {0: "best"}


def test_one_family_alone_supports_nothing():
    ranks = [Ranks(torch.full((4,), k), torch.full((4,), k), torch.arange(4)) for k in (1, 2)]
    assert clear_marks({row: PerQuery(one, torch.zeros(4)) for row, one in enumerate(ranks)}, "image_to_text", 1) == {}


@pytest.mark.parametrize(
    ("values", "marks"),
    [
        ({0: "9.00", 1: "10.00"}, {1: "best", 0: "second"}),
        ({0: "9.00", 1: "9.00", 2: "8.00", 3: "7.00"}, {0: "best", 1: "best", 2: "second"}),
        ({0: "9.00", 1: "9.00"}, {}),
        ({0: "9.00"}, {}),
        ({}, {}),
    ],
)
def test_highest_numbers(values, marks):
    assert highest_marks(values) == marks


def test_mixed_columns_explain_both_kinds_of_marks():
    half = replace(measured("b", 5.0, 2, "dci"), queries=None)
    results = Results((measured("a", 0.5, 1), measured("b", 5.0, 2), measured("a", 0.5, 1, "dci"), half))
    text = results.to_text()
    assert "paired 95 % interval" in text
    assert "where the models cannot be compared query by query: such a mark claims no difference" in text


def test_rows_of_the_paper_stand_apart_and_unmarked():
    paper = [row for name in ("docci", "DCI") for row in published(name, table="1")]
    results = Results((measured("ours", 0.5, 1), measured("worse", 5.0, 2)))
    alone, beside = cells(results.to_markdown()), cells(results.to_markdown(paper=paper))
    assert beside[: len(alone)] == alone  # a higher number of the paper takes no mark away
    assert beside[len(alone)] == ["", "", ""]
    assert beside[-1] == ["paper, Table 1: HN-CLIP", "88.25", "86.24"]
    assert len(beside) == len(alone) + 1 + 5
    text = results.to_text(paper=paper).split("\n")
    assert set(text[4]) == {"-", " "}
    assert "were not measured here" in results.to_latex(paper=paper)
    assert "measured here" not in results.to_latex()


def test_rows_of_the_paper_are_for_its_own_galleries_only():
    paper = published("docci", table="1", method="HN-CLIP")
    for changed in ({"split": "validation"}, {"data": "docci/official"}, {"data": "scenes/park"}):
        result = replace(by_number("ours", "docci", 1.0, 1.0), **changed)
        assert "paper" not in Results((result,)).to_text(paper=paper)
    assert "paper" not in Results((by_number("ours", "docci", 1.0, 1.0),)).to_text(ks=(5,), paper=[])
    deep = cells(Results((by_number("ours", "docci", 1.0, 1.0),)).to_markdown(ks=(5,), paper=paper))
    assert deep[-1] == ["paper, Table 1: HN-CLIP", "98.45", "98.12"]


def test_cross_domain_rows_of_the_paper_join_by_what_was_trained_on():
    results = Results((by_number("ours", "docci", 1.0, 1.0), by_number("ours", "dci", 2.0, 2.0)))
    paper = [row for name in ("DOCCI", "DCI") for row in published(name, table="A10", method="HN-CLIP")]
    assert cells(results.to_markdown(paper=paper))[3:] == [
        ["paper, Table A10: HN-CLIP, trained on DCI", "85.00", "83.14", "80.69", "78.84"],
        ["paper, Table A10: HN-CLIP, trained on DOCCI", "88.25", "86.24", "74.84", "75.64"],
    ]


CLOSE = [("better", 2.5), ("worse", 3.3)]


def test_held_out_part_has_its_own_columns_and_marks():
    ids = frozenset(f"r{i}" for i in range(30))
    found = {name: model_on(OWNER, noise, 7) for name, noise in (("good", 0.5), ("bad", 5.0))}
    results = Results(
        tuple(result_of(name, "long-dci", "test", GALLERY, one, held_out=ids) for name, one in found.items())
    )
    rows = cells(results.to_markdown(paper=published("long-dci", table="1", method="GOAL")))
    assert rows[0][3:] == ["long-dci held-out T→I R@1", "long-dci held-out I→T R@1"]
    part = restrict(found["bad"], GALLERY, ids).metrics
    assert rows[2][3:] == [f"{part.text_to_image.recall[1]:.2f}", f"{part.image_to_text.recall[1]:.2f}"]
    assert rows[1][3].startswith("**")
    close = [result_of(name, "x", "test", GALLERY, model_on(OWNER, noise, 9), held_out=ids) for name, noise in CLOSE]
    row = cells(Results(tuple(close)).to_markdown())[1]
    assert [cell.startswith("**") for cell in row] == [False, True, True, False, False]  # fewer queries, less is clear
    assert rows[-1] == ["paper, Table 1: GOAL", "74.11", "73.29", "–", "–"]
    assert "Held-out: queries and candidates are only the 30 images kept from training." in results.to_text()
    assert r"\multicolumn{2}{c}{long-dci held-out}" in results.to_latex()
    assert results.results[0].held_out_queries.groups.tolist() == [i // 2 for i in range(30)]


def test_notes_name_what_is_cut_and_left_out():
    result = by_number("long", "docci", 1.0, 1.0, skipped=3, images=5097, captions=5097)
    other = replace(result, model="short", truncated=1234)
    assert Results((result, other)).to_text().split("\n\n")[1].split("\n")[0] == (
        "docci test: 5,097 images, 5,097 captions. 3 records could not be used and are left out. Captions cut at the "
        "model's context: 1,234 for short."
    )


def test_result_of_an_evaluation():
    found = model_on(OWNER, 1.0, 1)
    similarity = {"pairwise": 0.5, "hardest": 0.9}
    result = result_of("m", "docci", "test", GALLERY, found, skipped=4, caption_similarity=similarity)
    assert result.metrics == found.metrics.to_dict()
    assert result.queries.ranks is found.ranks
    assert result.queries.groups_of("text_to_image").tolist() == [i // 2 for i in range(80)]
    values = result.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert {key: values[key] for key in values if key not in found.metrics.to_dict()} == {
        "model": "m",
        "data": "docci",
        "split": "test",
        "images": 80,
        "captions": 80,
        "truncated_captions": 2,
        "skipped_records": 4,
        "unread_rows": 0,
        "caption_similarity": similarity,
    }
    held_out = result_of("m", "docci", "test", GALLERY, found, held_out=frozenset({"r0", "r9"})).to_dict()["held_out"]
    assert held_out["image_to_text"]["queries"] == 2


def test_json():
    assert json.loads(CROSS.to_json()) == {"results": [result.to_dict() for result in CROSS.results]}


def test_results_that_cannot_share_a_table_are_refused():
    one = by_number("a", "docci", 1.0, 1.0)
    with pytest.raises(ValueError, match=r"^results is empty"):
        Results(())
    with pytest.raises(ValueError, match=r"^results has two of 'a' on docci test"):
        Results((one, one))
    with pytest.raises(ValueError, match=r"docci test are of different galleries: a has \(10, 10, 0\), b has \(9, 10"):
        Results((one, replace(one, model="b", images=9)))
    moved = replace(GALLERY_RESULT, model="b", queries=PerQuery(MOVED, torch.arange(80)))
    with pytest.raises(ValueError, match="belong to different images"):
        Results((GALLERY_RESULT, moved))
    Results((one, replace(one, split="validation", images=9)))  # another split is another gallery


GALLERY_RESULT = measured("a", 1.0, 1)
MOVED = replace(GALLERY_RESULT.queries.ranks, owner=OWNER.flip(0))


def test_ks_that_were_not_measured_are_named():
    with pytest.raises(ValueError, match=r"^ks asks for R@25, which on A has not on a"):
        CROSS.to_text(ks=(25,))
    with pytest.raises(ValueError, match=r"^ks must name"):
        CROSS.to_text(ks=())
