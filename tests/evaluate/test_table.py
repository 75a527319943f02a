"""Tables, character by character."""

from __future__ import annotations

import pytest
import torch

from hnclip.evaluate import Ranks, format_results, summarize
from hnclip.tables import markdown_table, text_table


def result(first: float, interval: list[float] | None = None) -> dict[str, dict[str, object]]:
    direction: dict[str, object] = {"R@1": first, "R@5": 80.0, "R@10": 100.0, "queries": 9}
    if interval is not None:
        direction |= {"R@1_interval": interval, "R@5_interval": [70.0, 90.0]}
    return {"text_to_image": direction, "image_to_text": {**direction, "R@1": first / 2}}


RESULTS = {"InfoNCE": result(9.04), "HN-CLIP": result(41.26, [39.0, 43.46])}


def test_results_as_text():
    assert format_results(RESULTS).split("\n") == [
        "model              T→I R@1  T→I R@5  T→I R@10            I→T R@1  I→T R@5  I→T R@10",
        "-------  -----------------  -------  --------  -----------------  -------  --------",
        "InfoNCE                9.0     80.0     100.0                4.5     80.0     100.0",
        "HN-CLIP  41.3 [39.0, 43.5]     80.0     100.0  20.6 [39.0, 43.5]     80.0     100.0",
    ]


def test_results_as_markdown():
    assert format_results(RESULTS, ks=(1, 5), table=markdown_table).split("\n") == [
        "| model | T→I R@1 | T→I R@5 | I→T R@1 | I→T R@5 |",
        "| :--- | ---: | ---: | ---: | ---: |",
        "| InfoNCE | 9.0 | 80.0 | 4.5 | 80.0 |",
        "| HN-CLIP | 41.3 [39.0, 43.5] | 80.0 | 20.6 [39.0, 43.5] | 80.0 |",
    ]


def test_summaries_fit_the_table():
    ranks = Ranks(torch.tensor([1, 2, 1, 1]), torch.tensor([1, 1, 6, 11]), torch.arange(4))
    lines = format_results({"a": summarize(ranks).to_dict()}, table=markdown_table).split("\n")
    assert lines[2] == "| a | 75.0 | 100.0 | 100.0 | 50.0 | 50.0 | 75.0 |"


def test_text_table_aligns_short_headers_and_short_cells():
    assert text_table(["m", "long header"], [["wide name", "1"], ["b", "22"]]).split("\n") == [
        "m          long header",
        "---------  -----------",
        "wide name            1",
        "b                   22",
    ]


def test_text_lines_have_no_trailing_space():
    assert text_table(["name"], [["a"]]) == "name\n----\na"


def test_table_without_rows_is_its_head():
    assert text_table(["a", "bb"], []) == "a  bb\n-  --"
    assert markdown_table(["a", "bb"], []) == "| a | bb |\n| :--- | ---: |"


def test_markdown_escapes_bars():
    assert markdown_table(["a|b"], [["c|d"]]) == "| a\\|b |\n| :--- |\n| c\\|d |"


@pytest.mark.parametrize("table", [text_table, markdown_table])
def test_table_errors_name_the_argument(table):
    with pytest.raises(ValueError, match=r"^rows "):
        table(["a", "b"], [["1", "2"], ["1"]])
    with pytest.raises(ValueError, match=r"^headers "):
        table([], [])


def test_result_errors_name_the_model_and_the_number():
    with pytest.raises(ValueError, match=r"^results\['InfoNCE'\] has no R@25 for text_to_image"):
        format_results(RESULTS, ks=(1, 25))
    with pytest.raises(ValueError, match=r"^results\['half'\] has no R@1 for image_to_text"):
        format_results({"half": {"text_to_image": RESULTS["InfoNCE"]["text_to_image"]}}, ks=(1,))
    with pytest.raises(ValueError, match=r"^ks "):
        format_results(RESULTS, ks=())
