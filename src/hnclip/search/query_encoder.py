"""Queries into vectors and words: texts by onnxruntime if the index holds its model's text tower, otherwise by torch;
images by torch.

torch and transformers take seconds to import; a text query in a new process needs neither.
"""

from __future__ import annotations

import logging
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from hnclip.data.texts import TextTransform, clean_caption
from hnclip.search.database import About, check_file, damaged, rebuild_command
from hnclip.search.reader import CHECKED, IndexReader
from hnclip.search.vectors import checksum
from hnclip.util.text import word_spans

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.search.writer import IndexWriter

log = logging.getLogger(__name__)

KEY = "text_encoder"  # of what the database says about it
PACKAGES = ("onnxruntime", "tokenizers")
CLEANING: dict[str, Callable[[str], str]] = {"openai": clean_caption, "none": str}


@dataclass(frozen=True)
class Word:
    """A word at text[start:stop], and the positions of its tokens, without special tokens."""

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class QueryText:
    """A text as a model reads it.

    Args:
        text: cleaned by the model's `TextTransform.clean`; `given` is the text before, which a model takes.
        words: those within the context, in order; a word that the context cuts has the tokens that were read.
        truncated: there were more.
    """

    text: str
    given: str
    words: tuple[Word, ...]
    truncated: bool


def read_query(transform: TextTransform, text: str) -> QueryText:
    """The words that a model reads of a text. ValueError if it has none."""
    cleaned = transform.clean(text)
    if not any(_pieces(cleaned)) or transform.validate([text])[0] is not None:
        raise ValueError("the query contains no words")
    tokens = transform([text])
    read = len(tokens[0]) - sum(transform.edges)
    (offsets,) = transform.offsets([text])
    return QueryText(cleaned, text, tuple(_words(cleaned, offsets[:read])), tokens.truncated > 0)


def _words(text: str, offsets: list[tuple[int, int]]) -> Iterator[Word]:
    """The pieces of a text that tokens touch; pieces that share a token are one word."""
    owner = {place: piece for piece in _pieces(text) for place in range(*piece)}  # the piece of each character in one
    found: list[tuple[int, int, list[int]]] = []
    for number, token in enumerate(offsets):
        touched = [owner[place] for place in range(*token) if place in owner]
        if not touched:
            continue
        start, stop, tokens = touched[0][0], touched[-1][1], [number]
        if found and start < found[-1][1]:
            start, _, before = found.pop()
            tokens = [*before, number]
        found.append((start, stop, tokens))
    for start, stop, tokens in found:
        yield Word(text[start:stop], start, stop, tuple(tokens))


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of words. Scripts without spaces, and symbols such as emoji, are divided into characters."""
    for start, stop, spaced in word_spans(text):
        yield from [(start, stop)] if spaced else zip(range(start, stop), range(start + 1, stop + 1))
    yield from ((place, place + 1) for place, letter in enumerate(text) if unicodedata.category(letter) == "So")


class QueryEncoder:
    """Encodes queries for the states of an index that have the same model. Threads may share it."""

    def __init__(self, reader: IndexReader, *, model: str | None = None, device: str = "auto") -> None:
        """
        Args:
            model: where the model is now, if it has moved.

        Raises:
            ValueError: the text encoder of the index is damaged; or it has none, and its model cannot be opened or is
                another one now.
        """
        self._path, self._about, self._name, self._device = reader.path, reader.about, model, device
        self._model: DualEncoder | None = None
        self._lock = Lock()
        exported = reader.extras.get(KEY) and all(map(find_spec, PACKAGES))
        self._text_tower = OnnxTextTower(reader) if exported else None
        self.transform = self._text_tower.transform if self._text_tower else self.model().text_transform

    def for_index(self, reader: IndexReader) -> QueryEncoder:
        """An encoder for a newer state of the index: this one, unless the state has another model."""
        if (reader.about.fingerprint, reader.about.model) == (self._about.fingerprint, self._about.model):
            return self
        return QueryEncoder(reader, model=self._name, device=self._device)

    def model(self) -> DualEncoder:
        """The model of the index, loaded at the first call. ValueError if it cannot be opened or is another one now."""
        with self._lock:
            if self._model is None:
                self._model = open_model(self._path, self._about, self._name, self._device)
            return self._model

    def encode_text(self, text: str) -> np.ndarray:
        """[D]; what exceeds the model's context is cut."""
        if self._text_tower is not None:
            return self._text_tower.encode(text)
        model = self.model()
        with model.inference():  # model.encode would read a file whose name is the text
            return model.encode_texts(model.tokenize([text])).vectors[0].float().cpu().numpy()

    def encode_image(self, image: Image.Image) -> np.ndarray:
        """[D]; ValueError for an image that the model cannot take."""
        return self.model().encode([image])[0]


class OnnxTextTower:
    """The text tower of an index, by onnxruntime on the CPU. Threads may share it."""

    def __init__(self, reader: IndexReader) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        self._settings, self._path, self._width = reader.extras[KEY], reader.path, reader.about.width
        check_text_tower(self._path, self._settings, limit=CHECKED)
        directory = reader.path / self._settings["file"]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        # Weights are used once or a few times: packing them again costs more than it saves.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it keeps processors from others
        providers = ["CPUExecutionProvider"]
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._session = onnxruntime.InferenceSession(str(directory / "text.onnx"), options, providers=providers)
        except Exception as error:  # both packages raise types of their own
            what = f"its text encoder cannot be read ({error})"
            raise ValueError(damaged(reader.path, what, replace=False)) from error
        clean = CLEANING[self._settings["clean"]]
        self.transform = TextTransform(FastTokenizer(tokenizer, self._settings), self._settings["context"], clean)

    def encode(self, text: str) -> np.ndarray:
        settings, ids = self._settings, self.transform([text])[0]  # [T]
        missing = settings["context"] - len(ids) if settings["fixed"] else 0
        padding = (missing, 0) if settings["left"] else (0, missing)
        mask = np.pad(np.ones_like(ids), padding)[None].astype(np.int64)  # [1, T]
        padded = np.pad(ids, padding, constant_values=settings["pad"])[None].astype(np.int64)  # [1, T]
        (vectors,) = self._session.run(None, dict(zip(settings["inputs"], (padded, mask))))
        if vectors.shape != (1, self._width) or not abs(float(np.linalg.norm(vectors)) - 1) < 1e-2:
            raise ValueError(damaged(self._path, "its text encoder gives vectors of another length", replace=False))
        return vectors[0]


class FastTokenizer:
    """A tokenizer of `tokenizers` as `TextTransform` calls one of transformers."""

    is_fast = True

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id = self.eos_token_id = settings["pad"]
        self.all_special_ids = settings["special"]

    def __call__(self, texts: list[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[Any]]:
        found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [one.ids for one in found], "offset_mapping": [one.offsets for one in found]}


def open_model(path: Path, about: About, name: str | None, device: str) -> DualEncoder:
    """The model that an index was made with.

    Args:
        name: where it is now, if it has moved.
    """
    from hnclip.util.optional import large_import

    with large_import():
        from hnclip.encode.fingerprint import model_fingerprint
        from hnclip.models.load import load
        from hnclip.util.device import find_device

    try:
        model = load(name or about.model, **about.opening)
    except (ValueError, OSError) as error:
        if name is not None:
            raise
        raise ValueError(
            f"{path} was made with {about.source}, which cannot be opened: {error}\n"
            "If it has moved, say where it is now with --model"
        ) from error
    if model_fingerprint(model, model.name) != about.fingerprint:
        raise ValueError(
            f"{path} was made with {about.source}, but {name or about.model} is another model now: give the one "
            f"that it was made with as --model, or rebuild the index with\n  {rebuild_command(path)}"
        )
    return model.to(find_device(device))


def check_text_tower(path: Path, settings: dict[str, Any], *, limit: int) -> None:
    """`check_file` of the files of the text tower, which an update exports again."""
    for name, (size, crc) in settings["files"].items():
        check_file(path, f"{settings['file']}/{name}", size, crc, limit=limit, replace=False)


def update_text_encoder(writer: IndexWriter, model: DualEncoder | None) -> None:
    """Export the text tower of a model into its index, unless it is there; with None, delete it. Where it cannot be
    exported, torch encodes queries."""
    exported = writer.extras.get(KEY)
    if model is None and exported:
        writer.set_extra(KEY, None)
    if model is None or not all(map(find_spec, ("onnx", "onnxscript", *PACKAGES))):
        return
    if exported:
        try:
            check_text_tower(writer.path, exported, limit=sys.maxsize)
            return
        except ValueError as error:
            log.warning(f"{error}\nIt is exported again.")
    transform = model.text_transform
    clean = next((name for name, function in CLEANING.items() if function == transform.clean), None)
    if clean is None:
        return
    from hnclip.export import export_text_tower

    log.info("exporting the text tower, so that queries start at once")
    directory = writer.path / writer.new_name("text", "")
    directory.mkdir()
    try:
        settings = export_text_tower(model, directory)
    except ValueError as error:
        shutil.rmtree(directory)
        log.info(f"queries will be encoded by torch: {error}")
        return
    own = {
        "file": directory.name,
        "files": {file.name: (size := file.stat().st_size, checksum(file, size)) for file in directory.iterdir()},
        "context": transform.context,
        "pad": transform.pad,
        "special": sorted(map(int, transform.tokenizer.all_special_ids)),
        "clean": clean,
    }
    writer.set_extra(KEY, {**settings, **own})
