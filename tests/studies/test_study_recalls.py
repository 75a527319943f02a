"""The table of a study in every form: recalls, differences, the paper's rows; and no mark without support."""

from __future__ import annotations

import json
import re

import pytest
from small_studies import FEWER_RESAMPLES, findings, queries, result

from hnclip.evaluate.published import published
from hnclip.studies.catalogue import STUDIES
from hnclip.studies.outcome import show as outcome_of
from hnclip.studies.paper_rows import TITLE
from hnclip.studies.parts import TablePart, WordsPart
from hnclip.studies.shows.recalls import average, groups_of, show
from hnclip.studies.statistics import MEAN, Spread
from hnclip.studies.study import Study
from hnclip.studies.variant import Variant

SKILL = {"start": 0.3, "base": 0.5, "best": 0.95, "alike": 0.5}
ROWS = (
    Variant("start", trained=False),
    Variant("base", method="hn_clip"),
    Variant("alike", method="hn_clip", against=("base",)),
    Variant("best", method="hn_clip", against=("start", "base")),
)


@pytest.fixture(autouse=True)
def _fewer_resamples(monkeypatch):
    monkeypatch.setattr("hnclip.studies.statistics.crossed_bootstrap", FEWER_RESAMPLES)


def study(**changes) -> Study:
    values = {"rows": ROWS, "shows": ("recalls",), "ks": (1, 5), **changes}
    return Study("small", "A small study", "Which is best?", **values)


def measure(row, domain, gallery, seed):
    # The same ranks for an untrained model, whatever the seed and domain.
    salt = 0 if row == "start" else seed
    return result(queries(SKILL[row], 1000 * sorted(SKILL).index(row) + 10 * salt + len(gallery)), data=gallery)


def tables(shown) -> list[TablePart]:
    return [part for part in shown.parts if isinstance(part, TablePart)]


def cells(part: TablePart) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in part.rows if row}


def test_one_seed_and_one_domain(tmp_path):
    first, second = tables(show(findings(tmp_path, study(), measure)))
    assert first.headers == ("", "a")
    assert list(cells(first)) == ["start", "base", "alike", "best", "alike − base", "best − start", "best − base"]
    assert first.rows[4] == ()
    assert re.fullmatch(r"\d+\.\d\d", cells(first)["best"][0])
    assert re.fullmatch(r"\+\d+\.\d \[\+\d+\.\d, \+\d+\.\d\]", cells(first)["best − base"][0])
    assert second.headers == ("", "R@1", "R@5", "R@1", "R@5")
    assert second.spans == (("T→I", 2), ("I→T", 2))
    assert re.fullmatch(r"[+-]\d+\.\d", cells(second)["alike − base"][0])
    assert any("One seed (1)" in note for note in first.notes)
    assert second.notes == ("a test: 60 images, 60 captions.",)


def test_numbers_are_those_of_the_results(tmp_path):
    found = findings(tmp_path, study(), measure)
    _, part = tables(show(found))
    metrics = measure("best", "a", "a", 1).metrics
    expected = [f"{metrics[way][f'R@{k}']:.2f}" for way in ("text_to_image", "image_to_text") for k in (1, 5)]
    assert list(cells(part)["best"]) == expected
    assert cells(tables(show(found))[0])["best"] == (f"{metrics['mean_R@1']:.2f}",)


def test_seeds_and_domains(tmp_path):
    found = show(findings(tmp_path, study(), measure, domains=("a", "bcd"), seeds=(1, 2, 3)))
    first, second, third = tables(found)
    assert first.headers == ("", "a", "bcd", "Avg")
    assert "±" not in cells(first)["start"][0]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", cell) for cell in cells(first)["base"])
    assert not any("missing" in note for note in first.notes)
    assert "a test" in second.notes[0]
    assert "bcd test" in third.notes[0]
    means = [found.data["columns"][number]["rows"][3]["recall"][MEAN]["R@1"]["mean"] for number in (0, 1)]
    assert cells(first)["best"][2].startswith(f"{sum(means) / 2:.2f} ± ")
    changes = [found.data["columns"][number]["differences"][2]["difference"][MEAN]["R@1"] for number in (0, 1)]
    assert cells(first)["best − base"][2] == f"{(changes[0]['mean'] + changes[1]['mean']) / 2:+.1f}"
    assert not any(column == 3 for _, column in first.marks)
    sentences = next(part for part in found.parts if isinstance(part, WordsPart)).sentences
    assert len(sentences) == 6
    assert any(
        re.fullmatch(r"bcd: best minus base \+.* points of average R@1 \[.*\]: best is better", s) for s in sentences
    )


def test_marks_of_the_table_are_supported_by_its_data(tmp_path):
    found = show(findings(tmp_path, study(), measure, seeds=(1, 2)))
    first, second = tables(found)
    column = found.data["columns"][0]
    assert first.marks[3, 1] == "best"
    assert column["rows"][3]["marks"][MEAN]["R@1"] == "best"
    differences = {(one["row"], one["against"]): one["difference"] for one in column["differences"]}
    for part, places in (
        (first, [(MEAN, 1)]),
        (second, [(w, k) for w in ("text_to_image", "image_to_text") for k in (1, 5)]),
    ):
        for number, (way, k) in enumerate(places, start=1):
            for line, row in enumerate(part.rows):
                if row and " − " in row[0]:
                    one = differences[tuple(row[0].split(" − "))][way][f"R@{k}"]
                    assert ((line, number) in part.marks) == one["clear"]
                    assert one["clear"] == (one["low"] > 0 or one["high"] < 0)


def test_many_ks_take_a_table_for_each_direction(tmp_path):
    deep = study(rows=ROWS[1:3], ks=(1, 5, 10, 25))
    first, there, back = tables(show(findings(tmp_path, deep, measure)))
    assert (there.title, back.title) == tuple(f"A small study. Recall in percent, {w}, a" for w in ("T→I", "I→T"))
    assert (there.spans, back.spans) == ((("T→I", 4),), (("I→T", 4),))
    metrics = measure("base", "a", "a", 1).metrics
    assert cells(back)["base"] == tuple(f"{metrics['image_to_text'][f'R@{k}']:.2f}" for k in (1, 5, 10, 25))
    assert cells(there)["base"] == tuple(f"{metrics['text_to_image'][f'R@{k}']:.2f}" for k in (1, 5, 10, 25))
    assert first.headers == ("", "a")


def test_alike_rows_are_never_bold(tmp_path):
    rows = (Variant("base"), Variant("alike", against=("base",)))
    for part in tables(show(findings(tmp_path, study(rows=rows), measure, seeds=(1, 2)))):
        assert part.marks == {}


def test_missing_runs_are_said(tmp_path):
    def partly(row, domain, gallery, seed):
        return None if (row == "best" and seed == 2) or row == "base" else measure(row, domain, gallery, seed)

    found = findings(tmp_path, study(), partly, seeds=(1, 2))
    first, _ = tables(show(found))
    assert cells(first)["base"] == ("–",)
    assert cells(first)["best − base"] == ("–",)
    assert "±" not in cells(first)["best"][0]
    assert cells(first)["best − start"][0].endswith("]")
    # An untrained model is one run, whatever the seeds.
    assert any(note.startswith("3 of 7 runs are missing") for note in first.notes)
    data = show(found).data["columns"][0]
    assert data["rows"][1]["recall"][MEAN]["R@1"] is None
    assert [one["seeds"] for one in data["differences"]] == [[], [1], []]


def test_an_average_needs_all_columns(tmp_path):
    def partly(row, domain, gallery, seed):
        return None if (row, domain) == ("base", "b") else measure(row, domain, gallery, seed)

    found = findings(tmp_path, study(), partly, domains=("a", "b"))
    first = tables(show(found))[0]
    assert cells(first)["base"][1:] == ("–", "–")
    assert cells(first)["best − base"][1:] == ("–", "–")
    assert cells(first)["best − start"][2] != "–"
    assert any(note.startswith("1 of 7 runs are missing") for note in first.notes)


def test_a_run_that_did_not_finish_is_missing(tmp_path):
    found = findings(tmp_path, study(), measure)
    home = found.home("best", found.domains[0], 1)
    assert home is not None
    (home / "result.json").unlink()
    first, _ = tables(show(found))
    assert cells(first)["best"] == ("–",)
    assert any(note.startswith("1 of 4 runs are missing") for note in first.notes)


def test_a_row_in_its_own_domain_is_no_transfer(tmp_path):
    """Table 1 has HN-CLIP on DCI, trained on DCI: it says nothing about a model trained on DOCCI."""
    both = study(rows=(Variant("HN-CLIP", published=("HN-CLIP", "")),), tables=("1", "A10"))
    *_, apart = tables(show(findings(tmp_path, both, lambda *place: None)))
    there = apart.headers.index("DOCCI → DCI") - 1
    assert cells(apart)["paper, Table A10: HN-CLIP"][there] == "74.84 / 75.64"
    assert cells(apart)["paper, Table 1: HN-CLIP"][there] == "–"
    assert cells(apart)["paper, Table 1: HN-CLIP"][apart.headers.index("DCI") - 1] == "80.69 / 78.84"


def test_nothing_measured_is_still_a_table(tmp_path):
    shown = show(findings(tmp_path, study(), lambda *place: None))
    assert all(set(row[1:]) <= {"–"} for part in tables(shown) for row in part.rows)
    assert not any(isinstance(part, WordsPart) for part in shown.parts)


def test_truncated_captions_and_other_versions_are_said(tmp_path):
    def cut(row, *place):
        found = measure(row, *place)
        return result(found, truncated={"base": 7, "best": 9}.get(row, 0))

    found = findings(tmp_path, study(), cut, any_version=True)
    old = found.store.home(next(job for place, job in found.jobs.items() if place.row == "best"))
    old.rename(old.with_name(old.name[: -len("-v")] + "-old"))
    first, second = tables(show(found))
    assert "Captions cut at the model's context: 7 to 9." in second.notes[0]
    assert "1 of 4 runs were made by another version of the code." in first.notes


@pytest.mark.parametrize(
    ("name", "sizes"), [("plug", [2] * 6), ("samples", [1, 3, 3, 3, 3]), ("main", [6]), ("gamma", [5]), ("frozen", [2])]
)
def test_groups_of_rows(name, sizes):
    assert [len(group) for group in groups_of(STUDIES[name])] == sizes


def test_pairs_have_their_difference_below_them(tmp_path):
    rows = (
        Variant("base"),
        Variant("best", against=("base",)),
        Variant("start"),
        Variant("alike", against=("start",)),
    )
    first, second = tables(show(findings(tmp_path, study(rows=rows), measure)))
    for part in (first, second):
        assert [row[0] if row else "" for row in part.rows] == ["base", "best", "Δ", "", "start", "alike", "Δ"]
    assert first.marks[1, 1] == "best"
    assert first.marks[2, 1] == "best"
    assert "second" not in first.marks.values()


def test_the_papers_rows_stand_below_its_own_benchmarks(tmp_path):
    plug = STUDIES["plug"]
    galleries = {"docci": ("docci",), "dci": ("dci", "long-dci")}

    def any_row(row, domain, gallery, seed):
        return result(queries(0.5, len(row)))

    shown = show(findings(tmp_path, plug, any_row, domains=("docci", "dci"), galleries=galleries))
    _, docci, dci, long_dci = tables(shown)
    line = cells(docci)["paper, Table A4: FineLIP, with L_HN"]
    row = next(one for one in published("docci", table="A4", method="FineLIP") if one.setting == "with L_HN")
    assert line == tuple(f"{row.recall[w][k]:.2f}" for w in ("text_to_image", "image_to_text") for k in (1, 5, 10))
    assert not any(name.startswith("paper") for name in cells(dci))  # table A4 has no DCI
    assert "paper, Table A4: GOAL" in cells(long_dci)
    printed = {number for number, row in enumerate(docci.rows) if row and row[0].startswith("paper")}
    assert not any(number in printed for number, _ in docci.marks)
    assert any("not measured here" in note for note in docci.notes)


def test_the_papers_numbers_are_apart_for_other_data(tmp_path):
    """Nothing of the paper in a table of ours."""
    main = STUDIES["main"]
    shown = show(findings(tmp_path, main, lambda row, *place: result(queries(0.5, len(row)))))
    *ours, apart = tables(shown)
    assert apart.title == TITLE
    assert not any(name.startswith("paper") for part in ours for name in cells(part))
    assert apart.headers == ("R@1, T→I / I→T", "DOCCI", "DCI", "Long-DCI", "Urban-1K")
    assert cells(apart)["paper, Table 1: HN-CLIP"][0] == "88.25 / 86.24"
    assert cells(apart)["HN-CLIP − GOAL"][0] == "+6.72 / +5.38"
    assert cells(apart)["HN-CLIP − InfoNCE"][1] == "–"
    assert apart.marks == {}
    # The same numbers in two tables are one row; a replication is another.
    assert [name for name in cells(apart) if "GOAL" in name and name.startswith("paper")] == [
        "paper, Table 1: GOAL",
        "paper, Table A11: GOAL, mean of 3 seeds",
    ]
    assert {"row", "table", "benchmark", "recall"} <= shown.data["paper"][0].keys()
    assert json.loads(json.dumps(shown.data)) == shown.data


def test_deep_ranks_of_the_paper_stand_where_it_has_them(tmp_path):
    *_, transfer = tables(show(findings(tmp_path / "transfer", STUDIES["transfer"], lambda *place: None)))
    column = "DOCCI → Long-DCI"
    assert transfer.headers == ("T→I / I→T", *(f"{column}, R@{k}" for k in (1, 25, 50)))
    assert cells(transfer)["paper, Table A7: HN-CLIP"] == ("62.60 / 63.77", "89.88 / 89.05", "93.05 / 92.14")
    assert cells(transfer)["HN-CLIP − GOAL"] == ("+6.86 / +7.17", "+3.10 / +1.60", "+2.51 / +0.84")
    *_, ranks = tables(show(findings(tmp_path / "ranks", STUDIES["ranks"], lambda *place: None)))
    assert ranks.headers == ("R@1, T→I / I→T", "DOCCI", "DCI", "Long-DCI", "Urban-1K")
    assert "It has no R@25 and no R@50 for these rows." in ranks.notes[0]
    assert "It has no" not in transfer.notes[0]


def test_transfers_stand_beside_the_same_transfer(tmp_path):
    cross = STUDIES["cross-domain"]
    shown = show(
        findings(tmp_path, cross, lambda row, *place: result(queries(0.5, len(row))), domains=("docci", "dci"))
    )
    named = {part.title.rpartition(", ")[2]: cells(part) for part in tables(shown) if "average" not in part.title}
    first, second = (part for part in tables(shown) if "average" in part.title)
    assert [part.title.rpartition("trained on ")[2] for part in (first, second)] == ["docci", "dci"]
    assert (first.headers, second.headers) == (("", "docci", "dci", "Avg"), ("", "dci", "docci", "Avg"))
    assert named["docci → dci"]["paper, Table A10: HN-CLIP"][0] == "74.84"
    assert named["dci → docci"]["paper, Table A10: HN-CLIP"][0] == "85.00"
    assert named["docci"]["paper, Table A10: HN-CLIP"][0] == "88.25"
    assert named["dci → docci"]["paper, Table A10: Long-CLIP, released checkpoint"][0] == "78.78"
    *_, apart = tables(show(findings(tmp_path / "other", cross, lambda *place: None)))
    assert set(apart.headers[1:]) == {"DOCCI", "DCI → DOCCI", "DCI", "DOCCI → DCI"}
    assert cells(apart)["paper, Table A10: Long-CLIP, released checkpoint"][apart.headers.index("DOCCI → DCI") - 1] == (
        "67.83 / 64.13"
    )


def test_the_mean_of_columns_is_of_common_seeds():
    one, two = Spread({1: 10.0, 2: 20.0}), Spread({2: 40.0, 3: 80.0})
    assert average([one, two]) == Spread({2: 30.0})
    assert average([one, None]) is None
    assert average([one, Spread({3: 1.0})]) is None


def test_every_form(tmp_path):
    rows = (ROWS[0], Variant("base_1"), Variant("best", against=("base_1",)))

    def named(row, *place):
        return measure({"base_1": "base"}.get(row, row), *place)

    found = outcome_of(findings(tmp_path, study(rows=rows), named, seeds=(1, 2)))
    latex = found.to_latex()
    for piece in (r"\toprule", r"\midrule", r"\bottomrule", r"\multicolumn{2}{c}{T$\rightarrow$I}"):
        assert piece in latex
    assert re.search(r"^best & \\textbf\{\d+\.\d\d \$\\pm\$ \d+\.\d\d\} \\\\$", latex, re.MULTILINE)
    assert re.search(r"^best \$-\$ base\\_1 & \\textbf\{\+\d", latex, re.MULTILINE)
    assert re.search(r"^base\\_1 & \\underline\{", latex, re.MULTILINE)
    assert "Marked bold: above every other row" in latex
    markdown = found.to_markdown()
    assert "|  | T→I R@1 | T→I R@5 | I→T R@1 | I→T R@5 |" in markdown
    assert re.search(r"^\| best \| \*\*\d+\.\d\d ± \d+\.\d\d\*\* \|$", markdown, re.MULTILINE)
    assert "- a: best minus base_1 +" in markdown
    text = found.to_text()
    assert "Marked *: above every other row" in text
    assert max(len(line) for line in text.split("\n")) <= 120
    for form in (latex, markdown, text):
        assert "{best}" not in form
        assert "{second}" not in form


def test_json_round_trip_and_files(tmp_path):
    found = outcome_of(findings(tmp_path / "store", study(), measure, seeds=(1, 2)))
    paths = found.write(tmp_path / "out")
    assert [path.name for path in paths] == ["small.txt", "small.md", "small.tex", "small.json"]
    data = json.loads((tmp_path / "out" / "small.json").read_text(encoding="utf-8"))
    assert data == found.to_dict()
    assert data["study"] == "small"
    recall = data["recalls"]["columns"][0]["rows"][1]["recall"]["text_to_image"]["R@1"]
    assert list(recall["seeds"]) == ["1", "2"]
    assert recall["mean"] == pytest.approx(sum(recall["seeds"].values()) / 2)


def test_braces_in_names_are_left_alone(tmp_path):
    found = outcome_of(findings(tmp_path, study(), measure, domains=("{x}",)))
    assert "{x} test: 60 images" in found.to_text()
