"""Queries as vectors and words: onnxruntime against torch, a process without torch, damaged files, words, tokens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_index import bundled, small_index
from store_helpers import continue_index

from hnclip.core import Record
from hnclip.data.scenes import scene_records
from hnclip.data.texts import clean_caption
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search import query_encoder
from hnclip.search.query_encoder import read_query, update_text_encoder
from hnclip.search.searcher import open_index
from small_families import write_siglip, write_two_towers

RECORDS = scene_records("park", "test", families=3)
CAPTION = RECORDS[5].captions[0]


def export(path: Path, model: DualEncoder | None) -> None:
    with continue_index(path) as writer:
        update_text_encoder(writer, model)
        writer.publish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two indexes of a model that does not exist any more; exported.hnc holds its text tower."""
    folder = tmp_path_factory.mktemp("query_encoder")
    small_index(folder / "plain.hnc", RECORDS, files=folder / "files", name=str(folder / "gone"))
    shutil.copytree(folder / "plain.hnc", folder / "exported.hnc")
    export(folder / "exported.hnc", bundled())
    return folder


@pytest.mark.parametrize(
    "text",
    [
        CAPTION * 9,  # longer than the context
        "tree " * 246,  # as long as the context
        " the dog’s\n&amp; cat's house ",
        "красный дом, 红色的房子, a house 🏠 and 👩‍👩‍👧 a dog",
        "test.png",
    ],
)
def test_onnxruntime_and_torch_find_the_same(text: str, folder: Path) -> None:
    with open_index(folder / "exported.hnc") as index, open_index(folder / "plain.hnc", model="bundled") as plain:
        one, other = index.search(text, k=6), plain.search(text, k=6)
    assert [hit.row for hit in one.hits] == [hit.row for hit in other.hits]
    assert [hit.score for hit in one.hits] == pytest.approx([hit.score for hit in other.hits], abs=1e-3)
    assert one.truncated == other.truncated == (text == CAPTION * 9)


@pytest.mark.parametrize("write", [write_siglip, write_two_towers])
def test_models_of_other_families(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """SigLIP's texts are padded to the context, and its tokenizer is another one; two towers take a mask."""
    directory, path = write(tmp_path / "model"), tmp_path / "x.hnc"
    model = load(directory).eval()
    small_index(path, [Record("1", RECORDS[0].image, (), None)], model=model, name=str(directory))
    export(path, model)
    texts = ["the large house near a bench", "the large house near a bench, a tree and the cat of it", "dog " * 90]
    with open_index(path) as index:
        for text, vector in zip(texts, model.encode(texts)):
            score = index.search(text).hits[0].score
            assert score == pytest.approx(index.reader.vectors["images"][0] @ vector, abs=1e-3)
        assert [word.text for word in index.explain(texts[0], [1])[0].words] == texts[0].split()


def test_a_new_process_needs_neither_torch_nor_transformers_nor_the_model(folder: Path) -> None:
    program = (
        "import sys; from hnclip.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", program, "search", folder / "exported.hnc", CAPTION], check=True)


def test_a_model_that_moved_or_is_another_one_is_reported(folder: Path, model_directory: Path) -> None:
    for name, message in ((None, "--model"), (str(model_directory), "another model")):
        with pytest.raises(ValueError, match=message):
            open_index(folder / "plain.hnc", model=name)
        with open_index(folder / "exported.hnc", model=name) as index:
            assert index.search(CAPTION).hits
            with pytest.raises(ValueError, match=message):
                index.search(CAPTION, rerank=True)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("text.onnx", lambda file: file.write_bytes(b"?" * file.stat().st_size)),
        ("tokenizer.json", lambda file: file.write_bytes(file.read_bytes()[:-100])),
    ],
)
def test_a_damaged_text_encoder_is_reported_and_an_update_repairs_it(
    name: str, damage: Callable[[Path], Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copytree(folder / "exported.hnc", tmp_path / "x.hnc"))
    damage(path / "text-1" / name)
    for limit in (query_encoder.CHECKED, 0):  # checksums of large files are not compared
        monkeypatch.setattr(query_encoder, "CHECKED", limit)
        with pytest.raises(ValueError, match=r"(?s)is damaged.*hnclip index .* --out \S+$"):
            open_index(path)
    export(path, bundled())
    with open_index(path) as index:
        assert index.search(CAPTION).hits


def test_without_onnxruntime_torch_encodes_queries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hnclip.search.query_encoder.find_spec", lambda _: None)  # packages are missing
    with pytest.raises(ValueError, match="--model"):
        open_index(folder / "exported.hnc")
    with open_index(folder / "exported.hnc", model="bundled") as index:
        assert index.search(CAPTION).hits


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A mid-sized, checked umbrella; isn't it?", ["A", "mid-sized", "checked", "umbrella", "isn't", "it"]),
        ("  two &amp;\n\t dog’s trees ", ["two", "dog's", "trees"]),
        ("a 🐶🐶 红房子 सड़क पर", ["a", "🐶", "🐶", "红", "房", "子", "सड़क", "पर"]),
        ("<b> &amp;amp;amp;lt;&amp;amp;amp;gt; dog", ["b", "amp", "lt", "amp", "gt", "dog"]),  # cleaned once
    ],
)
def test_words_and_their_tokens(text: str, words: list[str]) -> None:
    """The tokens of a word are those that touch it, literally."""
    transform = bundled().text_transform
    query = read_query(transform, text)
    (offsets,) = transform.offsets([text])
    assert (query.text, query.truncated) == (clean_caption(text), False)
    assert [word.text for word in query.words] == words
    for word in query.words:
        assert query.text[word.start : word.stop] == word.text
        touching = [n for n, (start, stop) in enumerate(offsets) if start < word.stop and stop > word.start]
        assert list(word.tokens) == touching


def test_words_beyond_the_context_are_not_read() -> None:
    transform = bundled().text_transform
    room = transform.context - sum(transform.edges)  # a tree is one token
    for count, truncated in ((room, False), (room + 1, True)):
        query = read_query(transform, "tree " * count)
        assert (len(query.words), query.truncated) == (room, truncated)
    cut = read_query(transform, "tree " * (room - 1) + "umbrellatreehouse").words[-1]
    assert (cut.text, cut.tokens) == ("umbrellatreehouse", (room - 1,))
