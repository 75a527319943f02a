"""Queries into vectors: texts by onnxruntime if the index holds its model's text tower, otherwise by torch; images by
torch.

torch and transformers take seconds to import; a text query in a new process needs neither.
"""

from __future__ import annotations

import logging
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hnclip.data.texts import TextTransform, clean_caption
from hnclip.search.store import Store, check_size, damaged, rebuild_command
from hnclip.util.text import word_spans

if TYPE_CHECKING:
    from PIL import Image

    from hnclip.models.dual_encoder import DualEncoder
    from hnclip.search.writer import IndexWriter

log = logging.getLogger(__name__)

KEY = "text_encoder"  # of what the database says about it
PACKAGES = ("onnxruntime", "tokenizers")
CLEANING: dict[str, Callable[[str], str]] = {"openai": clean_caption, "none": str}
NO_WORDS = "the query contains no words"


@dataclass(frozen=True)
class Word:
    """A word at text[start:stop], and the positions of its tokens, without special tokens."""

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Query:
    """A text as a model reads it.

    Args:
        text: cleaned by the model's `TextTransform.clean`; `given` is the text before, which a model takes.
        words: those within the context, in order; of a word that the context cuts, the tokens that were read.
        truncated: there were more.
    """

    text: str
    given: str
    words: tuple[Word, ...]
    truncated: bool


def read_query(transform: TextTransform, text: str) -> Query:
    """The words that a model reads of a text. ValueError if it has none."""
    check_words(transform, text)
    tokens = transform([text])
    read = len(tokens[0]) - sum(transform.edges)
    cleaned = transform.clean(text)
    (offsets,) = transform.offsets([text])
    return Query(cleaned, text, tuple(_words(cleaned, offsets[:read])), tokens.truncated > 0)


def check_words(transform: TextTransform, text: str) -> None:
    """ValueError for a text without words, or that the tokenizer cannot read."""
    if not any(_pieces(transform.clean(text))) or transform.validate([text])[0] is not None:
        raise ValueError(NO_WORDS)


def _words(text: str, offsets: list[tuple[int, int]]) -> Iterator[Word]:
    """The pieces of a text that tokens touch; pieces that share a token are one word."""
    owner: dict[int, tuple[int, int]] = {}  # the piece of each character in one
    for piece in _pieces(text):
        owner.update(dict.fromkeys(range(*piece), piece))
    found: list[tuple[int, int, list[int]]] = []
    for number, token in enumerate(offsets):
        touched = [owner[place] for place in range(*token) if place in owner]
        if not touched:
            continue
        start, stop = touched[0][0], touched[-1][1]
        if found and start < found[-1][1]:
            first, _, tokens = found.pop()
            found.append((first, stop, [*tokens, number]))
        else:
            found.append((start, stop, [number]))
    for start, stop, tokens in found:
        yield Word(text[start:stop], start, stop, tuple(tokens))


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of words. Scripts without spaces, and symbols such as emoji, are divided into characters."""
    for start, stop, spaced in word_spans(text):
        yield from [(start, stop)] if spaced else zip(range(start, stop), range(start + 1, stop + 1))
    yield from ((place, place + 1) for place, letter in enumerate(text) if unicodedata.category(letter) == "So")


class TextEncoder(Protocol):
    transform: TextTransform

    def encode(self, text: str) -> np.ndarray:
        """The vector [D] of a text, cut to the model's context."""
        ...


class OnnxTextEncoder:
    """The text tower of an index, by onnxruntime on the CPU. Threads may share it."""

    def __init__(self, store: Store) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        settings = store.extras[KEY]
        directory = store.path / settings["file"]
        for name, size in settings["files"].items():
            check_size(store.path, f"{settings['file']}/{name}", size)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        # Weights are used once or a few times: what is saved by packing them anew is less than it costs.
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
            self._session = onnxruntime.InferenceSession(
                str(directory / "text.onnx"), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # both packages raise types of their own
            raise ValueError(damaged(store.path, f"its text encoder cannot be read ({error})")) from error
        self.transform = TextTransform(
            _FastTokenizer(tokenizer, settings), settings["context"], CLEANING[settings["clean"]]
        )
        self._settings, self._path, self._width = settings, store.path, store.about.width

    def encode(self, text: str) -> np.ndarray:
        settings, ids = self._settings, self.transform([text])[0]  # [T]
        missing = settings["context"] - len(ids) if settings["fixed"] else 0
        padding = (missing, 0) if settings["left"] else (0, missing)
        mask = np.pad(np.ones_like(ids), padding)[None].astype(np.int64)  # [1, T]
        padded = np.pad(ids, padding, constant_values=settings["pad"])[None].astype(np.int64)  # [1, T]
        (vectors,) = self._session.run(None, dict(zip(settings["inputs"], (padded, mask))))
        if vectors.shape != (1, self._width) or not abs(float(np.linalg.norm(vectors)) - 1) < 1e-2:
            raise ValueError(damaged(self._path, "its text encoder gives vectors of another length"))
        return vectors[0]


class _FastTokenizer:
    """A tokenizer of `tokenizers` as `TextTransform` calls one of transformers."""

    is_fast = True

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id = self.eos_token_id = settings["pad"]
        self.all_special_ids = settings["special"]

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = False,
    ) -> dict[str, list[Any]]:
        found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        rows = {"input_ids": [one.ids for one in found]}
        return {**rows, "offset_mapping": [one.offsets for one in found]} if return_offsets_mapping else rows


class ModelTextEncoder:
    """The text tower of a loaded model."""

    def __init__(self, model: DualEncoder) -> None:
        self.model, self.transform = model, model.text_transform

    def encode(self, text: str) -> np.ndarray:
        with self.model.inference():
            return self.model.encode_texts(self.model.tokenize([text])).vectors[0].float().cpu().numpy()


class QueryEncoder:
    """Encodes queries for the index that it was opened for. Threads may share it."""

    def __init__(self, store: Store, *, model: str | None = None, device: str = "auto") -> None:
        """
        Args:
            model: where the model is now, if it has moved.

        Raises:
            ValueError: the index has no text encoder and its model cannot be opened, or is another one now.
        """
        self._name, self._device = model, device
        self._model: DualEncoder | None = None
        self._lock = Lock()
        self.fingerprint = store.about.fingerprint
        if store.extras.get(KEY) and all(map(find_spec, PACKAGES)):
            self.text: TextEncoder = OnnxTextEncoder(store)
        else:
            self.text = ModelTextEncoder(self.model(store))

    def for_index(self, store: Store) -> QueryEncoder:
        """An encoder with the same settings for an index of another model."""
        return QueryEncoder(store, model=self._name, device=self._device)

    def model(self, store: Store) -> DualEncoder:
        """The model of an index, loaded at the first call. ValueError if it cannot be opened or is another one now."""
        with self._lock:
            if self._model is None:
                self._model = open_model(store, self._name, self._device)
            return self._model

    def encode_image(self, store: Store, image: Image.Image) -> np.ndarray:
        """[D]; ValueError for an image that the model cannot take."""
        model = self.model(store)
        with model.inference():
            return model.encode_images(model.preprocess_images([image])).vectors[0].float().cpu().numpy()


def open_model(store: Store, name: str | None, device: str) -> DualEncoder:
    """The model that an index was made with.

    Args:
        name: where it is now, if it has moved.
    """
    from hnclip.util.optional import large_import

    with large_import():
        from hnclip.encode.fingerprint import model_fingerprint
        from hnclip.models.load import load, models_of
        from hnclip.util.device import find_device

    about = store.about
    try:
        model = load(models_of(name or about.model)[0][1], **about.opening).eval()
    except (ValueError, OSError) as error:
        if name is not None:
            raise
        raise ValueError(
            f"{store.path} was made with {about.source}, which cannot be opened: {error}\n"
            "If it has moved, say where it is now with --model"
        ) from error
    if model_fingerprint(model, model.name) != about.fingerprint:
        raise ValueError(
            f"{store.path} was made with {about.source}, but {name or about.model} is another model now: give the one "
            f"that it was made with as --model, or make the index anew with\n  {rebuild_command(store.path)}"
        )
    return model.to(find_device(device))


def update_text_encoder(writer: IndexWriter, model: DualEncoder | None) -> None:
    """Export the text tower of a model into its index, unless it is there; with None, delete it. Where it cannot be
    exported, torch encodes queries."""
    if model is None:
        if writer.extras.get(KEY):
            writer.set_extra(KEY, None)
        return
    if writer.extras.get(KEY) or not all(map(find_spec, ("onnx", "onnxscript", *PACKAGES))):
        return
    names = {clean: name for name, clean in CLEANING.items()}
    if model.text_transform.clean not in names:
        return
    from hnclip.export.to_onnx import export_text_tower

    log.info("exporting the text tower, so that queries start at once")
    directory = writer.path / writer.new_name("text", "")
    directory.mkdir()
    try:
        settings = export_text_tower(model, directory)
    except ValueError as error:
        shutil.rmtree(directory)
        log.info(f"queries will be encoded by torch: {error}")
        return
    transform = model.text_transform
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
    writer.set_extra(
        KEY,
        {
            **settings,
            "file": directory.name,
            "files": files,
            "context": transform.context,
            "pad": transform.pad,
            "special": sorted(map(int, transform.tokenizer.all_special_ids)),
            "clean": names[transform.clean],
        },
    )
