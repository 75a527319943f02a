"""The other tables and the curve of a study: seeds, epochs, held-out pairs, the choice of the epoch, γ."""

from __future__ import annotations

import json
import re
from statistics import fmean

import pytest
import torch
from small_studies import FEWER_RESAMPLES, findings, queries, result, training

from hnclip.studies.catalogue import STUDIES
from hnclip.studies.outcome import show as outcome_of
from hnclip.studies.parts import FigurePart, TablePart, WordsPart
from hnclip.studies.shows import curve, epochs, held_out, seeds, selection
from hnclip.studies.statistics import MEAN, Spread, Standings
from hnclip.studies.study import Study
from hnclip.studies.variant import Variant


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch):
    monkeypatch.setattr("hnclip.studies.statistics.crossed_bootstrap", FEWER_RESAMPLES)


def study(*rows: Variant, **changes) -> Study:
    return Study("small", "A small study", "Which is best?", rows, **{"shows": (), "ks": (1, 5), **changes})


def parts(shown, kind):
    return [part for part in shown.parts if isinstance(part, kind)]


def cells(part: TablePart) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in part.rows if row}


TWO = (Variant("zero", trained=False), Variant("base"), Variant("ours", against=("base",)))


def by_skill(skill):
    def measure(row, domain, gallery, seed):
        number = 7 if row == "zero" else 10 * seed + len(row)
        return result(queries(skill(row, seed), number))

    return measure


def test_every_seed_has_its_row(tmp_path):
    found = findings(tmp_path, study(*TWO), by_skill(lambda row, seed: 0.5), seeds=(1, 2, 3))
    shown = seeds.show(found)
    (part,) = parts(shown, TablePart)
    names = [row[0] if row else "" for row in part.rows]
    assert names[:7] == ["zero", "", "base, seed 1", "base, seed 2", "base, seed 3", "base, mean ± std", ""]
    assert len(part.headers) == 1 + 4 + 2
    assert sum(columns for _, columns in part.spans) == 6
    each = [float(cells(part)[f"base, seed {seed}"][0]) for seed in (1, 2, 3)]
    assert cells(part)["base, mean ± std"][0].startswith(f"{fmean(each):.2f} ± ")
    gaps = [
        max(column) - min(column)
        for column in zip(*(map(float, cells(part)[f"base, seed {seed}"][:4]) for seed in (1, 2, 3)))
    ]
    assert float(cells(part)["base, mean ± std"][-1]) == pytest.approx(max(gaps), abs=0.011)
    assert json.loads(json.dumps(shown.data)) == shown.data


@pytest.mark.parametrize(
    ("skill", "said"),
    [
        (lambda row, seed: 0.9 if row == "ours" else 0.1, "all 2 seeds put the methods into the same order"),
        (
            lambda row, seed: 0.9 if (row == "ours") == (seed == 1) else 0.1,
            "changes with the seed. seed 1: ours > base",
        ),
    ],
)
def test_the_order_under_every_seed(tmp_path, skill, said):
    (words,) = parts(seeds.show(findings(tmp_path, study(*TWO), by_skill(skill), seeds=(1, 2))), WordsPart)
    assert said in words.sentences[0]
    assert words.sentences[0].startswith("a: ")


def test_equal_rows_are_said_to_be_equal():
    same = queries(0.5, 1)
    assert seeds.orders_of(Standings({"a": {1: same}, "b": {1: same}, "c": {None: same}})) == {1: "a = b"}
    noise = {"a": {1: 50.1}, "b": {1: 50.1 + 1e-14}, "c": {1: 50.2}}
    standings = Standings({row: {1: same} for row in noise})
    standings.recall = lambda row, *cell: Spread(noise[row])
    assert seeds.orders_of(standings) == {1: "c > a = b"}
    worse = queries(0.1, 2)
    assert seeds.orders_of(Standings({"a": {1: worse, 2: same}, "b": {1: same}})) == {1: "b > a"}


def test_the_papers_seeds_stand_apart_or_below(tmp_path):
    replicated = STUDIES["seeds"]
    *_, apart = parts(seeds.show(findings(tmp_path / "other", replicated, lambda *place: None)), TablePart)
    assert cells(apart)["DOCCI T→I"][apart.headers.index("HN-CLIP") - 1] == "88.36 ± 0.14"

    def any_row(row, *place):
        return result(queries(0.5, len(row)))

    (part,) = parts(seeds.show(findings(tmp_path / "own", replicated, any_row, domains=("docci",))), TablePart)
    assert cells(part)["paper, Table A11: HN-CLIP, mean of 3 seeds"][0] == "88.36 ± 0.14"


def test_epochs(tmp_path):
    found = findings(tmp_path, STUDIES["frozen"], lambda row, *place: result(queries(0.5, 1)), seeds=(1, 2))
    for place, job in found.jobs.items():
        best = 1 if place.row == "Ḡ frozen" else 3
        training(found.store.home(job), best=best, epochs={1: 40.0 + place.seed, 2: 41.0, 3: 42.25})
    shown = epochs.show(found)
    ours, printed = parts(shown, TablePart)
    assert cells(ours)["Ḡ frozen, a, seed 2"] == ("1 of 3", "42.00", "42.25")
    assert cells(ours)["Ḡ recomputed, a, seed 1"] == ("3 of 3", "42.25", "42.25")
    assert cells(printed)["paper, Table A2: HN-CLIP, Ḡ recomputed"] == ("6", "5", "10", "4")
    assert shown.data["runs"][0]["best"]["epoch"] == 3
    missing = epochs.show(findings(tmp_path / "none", study(*TWO), lambda *place: None))
    (part,) = parts(missing, TablePart)
    assert cells(part) == {"base, a": ("–",) * 3, "ours, a": ("–",) * 3}


def test_epochs_chosen_in_three_ways():
    watched = [{"epoch": epoch, "mean_R@1": recall} for epoch, recall in ((0, 90.0), (1, 50.0), (2, 53.0), (3, 51.0))]
    found = selection.chosen(1, watched)
    assert found == selection.Chosen((1, 50.0), (3, 51.0), (2, 53.0))
    assert found.optimism == 3.0
    assert selection.chosen(1, []) is None
    # 50.1 as the mean of other halves is not another recall: the first of equal epochs is chosen.
    equal = [{"epoch": 1, "mean_R@1": 50.1}, {"epoch": 2, "mean_R@1": 50.1 + 1e-14}]
    assert selection.chosen(2, equal) == selection.Chosen((2, 50.1), (2, 50.1), (1, 50.1))


def test_optimism_of_runs(tmp_path):
    found = findings(tmp_path, study(*TWO[1:]), lambda row, *place: result(queries(0.5, 1)))
    for place, job in found.jobs.items():
        test = {"base": {0: 99.0, 1: 50.0, 2: 52.0}, "ours": {1: 60.0, 2: 55.0}}[place.row]
        training(found.store.home(job), best=1, epochs={1: 40.0, 2: 39.0}, watched=test)
    shown = selection.show(found)
    (part,) = parts(shown, TablePart)
    assert cells(part)["base, a"] == ("50.00 (epoch 1)", "52.00 (epoch 2)", "52.00 (epoch 2)", "2.00")
    assert cells(part)["ours, a"][-1] == "0.00"
    assert cells(part)["mean"] == ("55.00", "53.50", "56.00", "1.00")
    assert shown.data["mean_optimism"] == 1.0
    (words,) = parts(shown, WordsPart)
    assert words.sentences == (
        "Choosing among 2 epochs on the test split flatters R@1 by 1.00 points on average over 2 runs, by 2.00 at "
        "most.",
    )
    assert selection.show(findings(tmp_path / "none", study(*TWO[1:]), lambda *place: None)).data["runs"] == []


def memory(row, domain, gallery, seed):
    """`ours` remembers the first 40 of 60 pictures; of the other 20 it knows as much as `base`."""
    found = queries(0.5, 5, family=1)
    if row == "ours":
        for ranks in (found.ranks.text_to_image, found.ranks.image_to_text):
            ranks[:40] = 1
    apart = held_out.only_queries(found, set(found.ids[40:]))
    return result(found, apart=apart)


def test_an_advantage_that_is_memory_is_seen(tmp_path):
    shown = held_out.show(findings(tmp_path, study(*TWO[1:], whole=True), memory))
    part = parts(shown, TablePart)[-1]
    assert part.headers == ("", "all pairs", "other pairs", "held-out pairs", "held-out alone")
    whole, seen, unseen, alone = cells(part)["ours − base"]
    assert float(whole.split()[0]) > 0
    assert float(seen.split()[0]) > float(whole.split()[0])
    assert unseen == alone == "+0.0 [+0.0, +0.0]"
    assert {place for place in part.marks if place[0] == 3} == {(3, 1), (3, 2)}
    assert cells(part)["ours"][1] == "100.00"
    assert "20 images are held out" in part.notes[1]
    said = [sentence for words in parts(shown, WordsPart) for sentence in words.sentences]
    assert any(s.startswith("a, held-out queries among all pairs: ours minus base +0.0") for s in said)
    assert json.loads(json.dumps(shown.data)) == shown.data


def test_queries_of_some_pictures():
    found = queries(0.5, 3, pictures=6, captions=2)
    part = held_out.only_queries(found, {"r1", "r4"})
    assert part.ids == ("r1", "r4")
    assert part.ranks.owner.tolist() == [0, 0, 1, 1]
    assert part.ranks.text_to_image.tolist() == found.ranks.text_to_image[[2, 3, 8, 9]].tolist()
    assert part.ranks.image_to_text.tolist() == found.ranks.image_to_text[[1, 4]].tolist()
    assert part.groups.tolist() == found.groups[[1, 4]].tolist()
    whole = held_out.only_queries(found, set(found.ids))
    assert all(torch.equal(a, b) for a, b in zip(vars(whole.ranks).values(), vars(found.ranks).values()))


def test_galleries_without_a_held_out_part_are_left_out(tmp_path):
    def partly(row, domain, gallery, seed):
        return memory(row, domain, gallery, seed) if gallery == "long" else result(queries(0.5, 1))

    galleries = {"a": ("a", "long")}
    shown = held_out.show(findings(tmp_path, study(*TWO[1:]), partly, galleries=galleries))
    assert [part.title.rpartition(", ")[2].split()[-1] for part in parts(shown, TablePart)] == ["long"]
    nothing = held_out.show(findings(tmp_path / "none", study(*TWO[1:]), lambda *place: result(queries(0.5, 1))))
    assert parts(nothing, WordsPart)[0].sentences == ("No gallery of this study has a held-out part.",)


CURVE = tuple(
    Variant(f"γ {x:g}", set={"objective.gamma": x}, series="HN-CLIP", x=x, published=("HN-CLIP", f"γ = {x:g}"))
    for x in (0.5, 0.0, 0.25)
)


def test_points_of_a_curve(tmp_path):
    found = findings(tmp_path, study(*CURVE), by_skill(lambda row, seed: 0.2 * len(row) / 3), seeds=(1, 2))
    shown = curve.show(found)
    points = shown.data["columns"]["a"]["HN-CLIP"]
    assert [point["x"] for point in points] == [0.0, 0.25, 0.5]
    spread = Standings({"r": {s: found.result("γ 0.25", found.columns[0], s) for s in (1, 2)}}).recall("r", MEAN, 1)
    assert points[1]["recall"] == pytest.approx(spread.mean)
    assert points[1]["high"] - points[1]["low"] == pytest.approx(2 * spread.std)
    assert json.loads(json.dumps(shown.data)) == shown.data


def test_a_point_of_one_seed_has_the_interval_of_its_queries(tmp_path):
    found = findings(tmp_path, study(*CURVE), by_skill(lambda row, seed: 0.5))
    for point in curve.show(found).data["columns"]["a"]["HN-CLIP"]:
        assert point["low"] < point["recall"] < point["high"]


def test_figure_of_a_curve(tmp_path):
    rows = study(*CURVE, tables=("A6",), shows=("curve",))
    found = findings(tmp_path / "store", rows, by_skill(lambda row, seed: 0.5), domains=("a", "b_$x"), seeds=(1, 2))
    outcome = outcome_of(found)
    (part,) = outcome.figures
    ours, other, paper = part.figure.axes
    assert [axes.get_legend().get_title().get_text() for axes in (ours, other, paper)] == [
        "a",
        "b_$x",
        "paper (not measured here)",
    ]
    line = ours.lines[0]
    assert line.get_xdata().tolist() == [0.0, 0.25, 0.5]
    assert len(ours.lines) == 1 + 3  # a bar for every point
    assert len(paper.lines) == 4  # the paper has no bars
    assert {text.get_text() for text in paper.get_legend().get_texts()} == {"DOCCI", "DCI", "Long-DCI", "Urban-1K"}
    docci = paper.lines[0].get_ydata().tolist()
    assert docci[2] == pytest.approx((88.25 + 86.24) / 2)
    assert ours.get_xlabel() == "boost strength γ"
    assert "standard deviation over 2 seeds, of a point that has one seed the 95 % interval" in part.caption
    paths = outcome.write(tmp_path / "out")
    assert {path.suffix for path in paths} == {".txt", ".md", ".tex", ".json", ".svg", ".pdf"}
    assert all(path.stat().st_size > 0 for path in paths)
    assert r"\includegraphics" in outcome.to_latex()
    assert "![A small study. Average R@1](pictures/small-curve.svg)" in outcome.to_markdown(figures="pictures/")
    again = outcome_of(found).write(tmp_path / "again")
    svg = [path.read_bytes() for path in (*paths, *again) if path.suffix == ".pdf"]
    assert svg[0] == svg[1]


def test_nothing_to_draw_is_said(tmp_path):
    shown = curve.show(findings(tmp_path, study(*CURVE), lambda *place: None))
    assert re.match("3 of 3 runs are missing", parts(shown, WordsPart)[0].sentences[0])
    assert not parts(shown, FigurePart)
