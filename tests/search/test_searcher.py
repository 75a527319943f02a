"""Search against all scores, the other parts of a result, and `hnclip search`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_index import bundled, small_index
from store_helpers import all_files, continue_index, vectors_of

from hnclip.cli import main
from hnclip.core import Record
from hnclip.data.image_sources import FileImage
from hnclip.data.scenes import scene_records
from hnclip.models.load import load
from hnclip.search.database import KINDS, Kind
from hnclip.search.reader import IndexReader
from hnclip.search.searcher import Searcher, open_index

RECORDS = scene_records("park", "test", families=3)
TEXT, IMAGE = RECORDS[5].captions[0], RECORDS[9].image.load()
SHARED = "a caption that several files have"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all.hnc has files with equal content, a shared caption, and deleted images."""
    folder = tmp_path_factory.mktemp("searcher")
    files, path = folder / "files", folder / "all.hnc"
    small_index(path, [*RECORDS[2:], *(replace(one, captions=(SHARED,)) for one in RECORDS[:2])], files=files)
    names = sorted(file.name for file in files.iterdir())
    copies = [FileImage(shutil.copy(files / names[n], files / f"copy-{copy}.png")) for copy, n in enumerate((5, 8, 8))]
    small_index(path, [Record(f"copy {n}", image, (SHARED,) * (n % 2), None) for n, image in enumerate(copies)])
    with continue_index(path) as writer:
        writer.finish({names[3], names[7], names[8]}, {})
    return folder


@pytest.fixture
def index(folder: Path) -> Iterator[Searcher]:
    with open_index(folder / "all.hnc") as index:
        yield index


def all_scores(reader: IndexReader, kind: Kind, vector: np.ndarray) -> dict[str, float]:
    """By the name of a file or the text of a caption, best first, equal ones by id."""
    vectors = vectors_of(reader, kind)
    if kind == "images":
        found = [(file.name, file.image) for file in all_files(reader)]
    else:
        found = [(one.text, number) for number, one in reader.captions(list(vectors)).items()]
        assert {text for text, _ in found} == {text for file in all_files(reader) for text in file.captions}
    scored = [(-float(vectors[number] @ vector), number, name) for name, number in found]
    return {name: -score for score, _, name in sorted(scored, key=lambda one: one[:2])}


@pytest.mark.parametrize("k", [4, 100])
@pytest.mark.parametrize("query", [{"text": SHARED}, {"image": IMAGE}], ids=["text", "image"])
def test_search_equals_all_scores(query: dict[str, Any], k: int, index: Searcher) -> None:
    (vector,) = bundled().encode(list(query.values()))  # [D]
    scores = all_scores(index.reader, "images", vector)
    images = index.search(**query, k=k)
    assert {hit.file.name: hit.score for hit in images.hits} == pytest.approx(dict([*scores.items()][:k]), abs=1e-5)
    assert [hit.file.name for hit in images.hits] == [*scores][:k]
    texts = all_scores(index.reader, "captions", vector)
    captions = index.search(**query, k=k, find="captions")
    assert [hit.text for hit in captions.captions] == [*texts][:k]
    for hit in captions.captions:
        assert hit.score == pytest.approx(texts[hit.text], abs=1e-5)
        owners = {file.name: scores[file.name] for file in all_files(index.reader) if hit.text in file.captions}
        assert {one.file.name: one.score for one in hit.images} == pytest.approx(owners, abs=1e-5)
        assert len(owners) == (3 if hit.text == SHARED else 1)
    assert (images.total, images.captions, captions.total, captions.hits) == (len(scores), (), len(texts), ())


def test_invalid_queries_are_refused(index: Searcher) -> None:
    rerank = {"text": TEXT, "rerank": True}
    wrong = ({}, {**rerank, "image": IMAGE}, {"text": TEXT, "k": 0}, {"text": TEXT, "find": "x"})
    for options in (*wrong, {**rerank, "find": "captions"}):
        with pytest.raises(ValueError):
            index.search(**options)
    for call in (index.explain, index.separate):
        with pytest.raises(KeyError):
            call(TEXT, [1, 999])


def test_a_searcher_of_an_older_state_and_its_successor(tmp_path: Path, model_directory: Path) -> None:
    """Deleted files are not found any more; new files, and captions that only these have, not yet."""
    path = tmp_path / "x.hnc"
    small_index(path, RECORDS[:4], files=tmp_path / "files")
    with open_index(path) as old:
        deleted, *others = (hit.file for hit in old.search(TEXT).hits)
        with continue_index(path) as writer:
            writer.finish({deleted.name}, {})
        small_index(path, [replace(RECORDS[4], captions=deleted.captions)], files=tmp_path / "files")
        assert [hit.file for hit in old.search(TEXT).hits] == others
        captions = old.search(TEXT, find="captions").captions
        assert {hit.text for hit in captions} == {text for file in others for text in file.captions}
        with old.reopen() as new:
            assert len(new.search(TEXT).hits) == len(new.search(TEXT, find="captions").captions) == 4
        shutil.rmtree(path)
        small_index(path, RECORDS[:1], model=load(model_directory).eval(), name=str(model_directory))
        with old.reopen() as another:
            assert len(another.search(TEXT).hits) == 1


def test_the_command_prints_the_result_of_the_library(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    image = "files/copy-0.png"
    with open_index("all.hnc") as index:
        by_text = index.search(f"{TEXT}\n", k=5, rerank=True, explain=True)
        by_image = index.search(image=FileImage(Path(image)).load(), name=image, find="captions")
    for words, expected in ((["-", "-k", "5", "--rerank", "--explain"], by_text), (["--image", image], by_image)):
        words += ["--find", "captions"] if expected is by_image else []
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n"))
        assert main(["search", "all.hnc", *words]) == 0
        assert capsys.readouterr().out == f"{expected.to_text()}\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{TEXT}\n"))
        assert main(["search", "all.hnc", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) | {"seconds": expected.seconds} == expected.to_dict()
    assert main(["search", "all.hnc", "--image", "none.png"]) == 1
    printed, error = capsys.readouterr()
    assert (printed, "none.png" in error, "Traceback" in error) == ("", True, False)


def test_text_for_a_terminal_contains_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "red \x1b[31m\nfake line.png"
    RECORDS[0].image.load().save(path)
    small_index(tmp_path / "x.hnc", [Record("a", FileImage(path), ("A \x1b]0;title\x07\r\n \u202eevil",), None)])
    with open_index(tmp_path / "x.hnc") as index:
        for find in KINDS:
            text = index.search("a tree \x1b[2J", find=find, explain=True).to_text()
            assert not {"\x1b", "\x07", "\r", "\u202e"} & set(text)
            assert not any(line.startswith("fake") for line in text.splitlines())
