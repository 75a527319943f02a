from __future__ import annotations

from pathlib import Path

import pytest

from hnclip.data.pictures import FileImage
from hnclip.data.readers.gather import Gather


def picture(name: str) -> FileImage:
    return FileImage(Path("/pictures", name))


def kinds(gather: Gather) -> list[str]:
    return [problem.kind for problem in gather.problems]


def test_rows_of_one_picture_become_one_record() -> None:
    gather = Gather()
    gather.add("t:1", picture("b"), ["two"], name="b")
    gather.add("t:2", picture("a"), ["one"], name="a", group="g")
    gather.add("t:3", picture("b"), [" three\n", "two"], name="b", short=" short ", group="h")
    found = gather.finish("rows")
    assert [(record.id, record.captions) for record in found.records] == [("b", ("two", "three")), ("a", ("one",))]
    assert (found.records[0].short, found.records[0].group) == ("short", "h")
    assert found.problems == ()


def test_a_picture_in_two_splits_stays_in_the_first() -> None:
    gather = Gather()
    gather.add("t:1", picture("a"), ["one"], name="a", split="train")
    gather.add("t:2", picture("a"), ["two"], name="a", split="test")
    found = gather.finish("rows")
    assert [(record.split, record.captions) for record in found.records] == [("train", ("one",))]
    assert [(problem.kind, problem.where) for problem in found.problems] == [("shared image", "t:2")]


def test_bad_captions_go_and_the_others_stay() -> None:
    gather = Gather()
    gather.add("t:1", picture("a"), ["", "good", " \n", "half \ud83d"], name="a")
    gather.add("t:2", picture("b"), [""], name="b")
    gather.add("t:3", picture("c"), [], name="c")
    found = gather.finish("rows")
    assert [record.captions for record in found.records] == [("good",)]
    assert kinds(gather) == ["empty caption", "empty caption", "bad text", "empty caption", "no caption"]


def test_a_bad_short_caption_is_left_out_alone() -> None:
    gather = Gather()
    gather.add("t:1", picture("a"), ["good"], name="a", short="\ud83d")
    found = gather.finish("rows")
    assert found.records[0].short is None
    assert kinds(gather) == ["bad text"]


def test_guessed_ids_count_only_if_they_are_unique() -> None:
    for second, expected in (("2", ["1", "2"]), ("1", ["a", "b"])):
        gather = Gather()
        gather.add("t:1", picture("a"), ["one"], name="a", id="1")
        gather.add("t:2", picture("b"), ["two"], name="b", id=second)
        found = gather.finish("rows")
        assert [record.id for record in found.records] == expected
        assert found.problems == ()


def test_ids_that_the_user_named_must_be_unique() -> None:
    gather = Gather(own_ids=True)
    gather.add("t:1", picture("a"), ["one"], name="a", id="1")
    gather.add("t:2", picture("b"), ["two"], name="b", id="1")
    found = gather.finish("rows")
    assert [(record.id, record.captions) for record in found.records] == [("1", ("one",))]
    assert [(problem.kind, problem.where) for problem in found.problems] == [("repeated id", "1")]
    assert "b has the id of another picture" in found.problems[0].detail


def test_a_key_of_its_own_decides_what_is_the_same_picture() -> None:
    gather = Gather()
    gather.add("t:1", picture("a"), ["one"], name="1", key="same")
    gather.add("t:2", picture("b"), ["two"], name="2", key="same")
    assert [record.captions for record in gather.finish("rows").records] == [("one", "two")]


def test_many_rows_of_one_picture_take_linear_time() -> None:
    gather = Gather()
    for number in range(50_000):
        gather.add("t", picture("a"), [f"caption {number}"], name="a")
    assert len(gather.finish("rows").records[0].captions) == 50_000


def test_no_record_is_an_error_with_the_first_problems() -> None:
    gather = Gather()
    for number in range(8):
        gather.add(f"t:{number}", picture("a"), [], name="a")
    with pytest.raises(ValueError, match=r"looked for rows:\n  no caption: t:0: .*(\n.*){4}\n  and 3 more$"):
        gather.finish("rows")
    with pytest.raises(ValueError, match=r"looked for rows$"):
        Gather().finish("rows")
