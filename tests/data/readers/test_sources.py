from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pictures import png, write_png, write_tar

import hnclip.data.benchmarks
from hnclip.config import ReadConfig
from hnclip.data import sources
from hnclip.data.readers import huggingface
from hnclip.data.readers.gather import Found
from hnclip.data.records import DataSet
from hnclip.data.scenes import FAMILIES, scene_records
from hnclip.data.sources import open_data, open_records


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the benchmarks are asked for."""
    asked: list[Any] = []

    def open_benchmark(name: str, folder: Path | None, images: Path | None, *, splits: object) -> DataSet:
        asked.append((name, folder, images, splits))
        return DataSet(name, (), exact=True)

    monkeypatch.setattr(hnclip.data.benchmarks, "open_benchmark", open_benchmark)
    return asked


@pytest.mark.parametrize(("source", "style"), [("scenes", "park"), ("scenes/park", "park"), ("scenes/shelf", "shelf")])
def test_scenes(source: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, families in (("train", 3), ("validation", 2), ("test", 1)):
        monkeypatch.setitem(FAMILIES, split, families)
    data = open_data(source)
    assert data.name == source
    assert data.splits() == {"train": 6, "validation": 8, "test": 4}
    assert list(data.part("test")) == scene_records(style, "test")
    assert open_records(source, "all") == list(data.records)


def test_of_scenes_only_the_split_asked_for_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(sources, "scene_records", lambda style, split, **more: asked.append((style, split)) or [])
    open_records("scenes/shelf", "validation")
    assert asked == [("shelf", "validation")]


def test_unknown_scenes_are_an_error() -> None:
    with pytest.raises(ValueError, match="domain must be one of park, shelf, not 'moon'"):
        open_data("scenes/moon")
    with pytest.raises(ValueError, match="split must be one of train, validation, test, not 'dev'"):
        open_records("scenes", "dev")


def test_benchmarks_are_delegated(benchmarks: list[Any]) -> None:
    assert open_data("docci").exact
    open_data("docci/official=/data/docci", ReadConfig(images="pictures.tar"))
    open_data("docci=a=b", splits={"test"})
    open_data("dci", splits={"train", "validation"})  # it has no validation split of its own
    open_data("dci", splits={"all"})
    with pytest.raises(ValueError, match=r"urban-1k has no split train: it has test; .*vg-paragraphs"):
        open_data("urban-1k", splits={"train"})
    assert benchmarks == [
        ("docci", None, None, None),
        ("docci/official", Path("/data/docci"), Path("pictures.tar"), None),
        ("docci", Path("a=b"), None, {"test"}),
        ("dci", None, None, {"train"}),
        ("dci", None, None, None),
    ]


@pytest.mark.usefixtures("benchmarks")
def test_paths_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        write_png(tmp_path / "folder" / f"{number}.png", number)
        (tmp_path / "folder" / f"{number}.txt").write_text(f"caption {number}")
    data = open_data(str(tmp_path / "folder"))
    assert (data.name, len(data.records), data.problems, data.exact) == (str(tmp_path / "folder"), 40, (), False)
    (tmp_path / "folder" / "more.txt").write_text("more")
    assert [problem.kind for problem in open_data(str(tmp_path / "folder")).problems] == ["no image"]
    write_tar(tmp_path / "s-0.tar", {"1.png": png(1), "1.txt": b"x"})
    assert len(open_data(f"{tmp_path}/s-{{0..0}}.tar").records) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_data("~/folder").records) == 40


@pytest.mark.usefixtures("benchmarks")
def test_records_of_a_split(tmp_path: Path) -> None:
    for number in range(40):
        write_png(tmp_path / f"{number}.png", number)
        (tmp_path / f"{number}.txt").write_text(f"caption {number}")
    read = ReadConfig(validation_share=0.25)
    train, validation = (open_records(str(tmp_path), split, read) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (30, 10)
    assert sorted(record.id for record in train + validation) == sorted(str(number) for number in range(40))
    assert len(open_records(str(tmp_path), "all", read)) == 40
    with pytest.raises(ValueError, match="has no split 'test'"):
        open_records(str(tmp_path), "test", read)


@pytest.mark.usefixtures("benchmarks")
def test_names_on_the_hub_come_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(huggingface, "read_hub", lambda source, read: asked.append(source) or Found((), ()))
    monkeypatch.chdir(tmp_path)
    assert open_data("owner/name:config").name == "owner/name:config"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ValueError, match="no record found"):
        open_data("owner/name")  # now a directory here
    assert asked == ["owner/name:config"]


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize(
    "source", ["owner/captions.csv", "./captions", "/nowhere/captions", "here/captions", "x.jsonl"]
)
def test_a_mistyped_path_is_said_not_to_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ValueError, match=r"is not known, and there is no such file or directory\. Data are one of"):
        open_data(source)


@pytest.mark.usefixtures("benchmarks")
def test_an_unknown_source_is_an_error_with_what_is_understood() -> None:
    with pytest.raises(
        ValueError, match=r"'photos' is not known\. .*scenes/park.*\(docci, docci/official, dci.*owner/name"
    ):
        open_data("photos")
