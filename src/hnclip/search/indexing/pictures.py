"""Threads that read, compare and decode pictures ahead of the encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock

from torch import Tensor

from hnclip.core import InvalidImage, Problem, upright_shape
from hnclip.data.images import ImageTransform, preprocess_image
from hnclip.search.index.catalogue import content_hash
from hnclip.search.index.changes import Known
from hnclip.search.index.thumbnails import thumbnail
from hnclip.search.indexing.source import Entry, IndexSource


@dataclass(frozen=True)
class Decoded:
    """A picture that is to be encoded. Shape: pixels [3, S, S] uint8."""

    pixels: Tensor
    shape: tuple[int, int]
    thumbnail: bytes


@dataclass(frozen=True)
class Seen:
    """A picture that can be indexed; decoded if nobody has decoded the same content before."""

    number: int
    entry: Entry
    stamp: str
    content: bytes
    picture: Decoded | None


@dataclass(frozen=True)
class Unusable:
    """A picture that cannot be indexed.

    Args:
        stamp: as long as it has this one there is no need to try again; nothing if there always is.
        out_of_reach: it may be there, as it was, but cannot be read now.
    """

    entry: Entry
    problem: Problem
    stamp: str = ""
    out_of_reach: bool = False


class Pictures:
    """Looks at entries of a source; threads do so side by side.

    Content is decoded once: whoever meets it first does it, and others that meet it meanwhile wait for the result
    (`waits`, `arrived`). Content that cannot be decoded is not tried again either.
    """

    def __init__(
        self, source: IndexSource, known: Mapping[str, Known], contents: set[bytes], transform: ImageTransform
    ) -> None:
        """
        Args:
            known: what the index has, by name.
            contents: that need not be decoded; grows by what was.
        """
        self._source, self._known, self._transform = source, known, transform
        self._taken, self._busy = contents, set[bytes]()
        self._failed: dict[bytes, tuple[str, InvalidImage]] = {}  # by content: the key of whoever had it, and why
        self._lock = Lock()

    def look(self, number: int) -> Seen | Unusable:
        entry = self._source.entry(number)
        stamp = ""
        try:
            stamp = entry.stamp()  # before it is read: if it changes in between, it is read again next time
            before = self._known.get(entry.name)
            if before is not None and (before.stamp, before.place) == (stamp, entry.place):
                return Seen(number, entry, stamp, before.content, None)
            return self._read(number, entry, stamp)
        except InvalidImage as error:
            return unusable(entry, error, stamp)
        except MemoryError:
            return _unusable(entry, "oversized image", "there is not enough memory to decode it")
        except Exception as error:  # one picture, whatever in it makes Pillow stumble, is not the run
            return _unusable(entry, "unusual image", str(error) or type(error).__name__, stamp)

    def waits(self, content: bytes) -> bool:
        """Whether somebody is decoding it."""
        with self._lock:
            return content in self._busy

    def has(self, content: bytes) -> bool:
        """Whether it is in the index or was decoded; not if that failed."""
        with self._lock:
            return content in self._taken

    def arrived(self, content: bytes) -> None:
        with self._lock:
            self._busy.discard(content)

    def _read(self, number: int, entry: Entry, stamp: str) -> Seen:
        found = entry.image.read()
        content = content_hash(found)
        with self._lock:
            if content in self._failed:
                raise _copied(*self._failed[content], entry)
            if content in self._taken:
                return Seen(number, entry, stamp, content, None)
            self._taken.add(content)
            self._busy.add(content)
        try:
            image = entry.image.decode(found)
            pixels = preprocess_image(image, self._transform)
            return Seen(number, entry, stamp, content, Decoded(pixels, upright_shape(image), thumbnail(image)))
        except BaseException as error:
            with self._lock:
                self._taken.discard(content)
                self._busy.discard(content)
                if isinstance(error, Exception) and not isinstance(error, MemoryError):
                    self._failed[content] = entry.image.key, _reason(error)
            raise


def _reason(error: Exception) -> InvalidImage:
    """The same without its traceback, which would keep the picture in memory."""
    kind = error.kind if isinstance(error, InvalidImage) else "unusual image"
    return InvalidImage(kind, str(error) or type(error).__name__)


def _copied(first: str, error: InvalidImage, entry: Entry) -> InvalidImage:
    """What is wrong with a copy of a picture that could not be decoded, by the copy's own name."""
    message = str(error).replace(first, entry.image.key)
    return InvalidImage(error.kind, message if entry.image.key in message else f"{entry.name}: {message}")


def unusable(entry: Entry, error: InvalidImage, stamp: str = "") -> Unusable:
    """
    Args:
        stamp: if it could be read, and what was read is bad.
    """
    missing = error.kind == "missing image"
    cause = error.__cause__
    blocked = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError | NotADirectoryError)
    found = _unusable(entry, error.kind, str(error), "" if missing else stamp)
    return replace(found, out_of_reach=missing and blocked)


def _unusable(entry: Entry, kind: str, detail: str, stamp: str = "") -> Unusable:
    # The message may name a folder whose name is not UTF-8.
    return Unusable(entry, Problem(kind, entry.name, detail.encode(errors="backslashreplace").decode()), stamp)
