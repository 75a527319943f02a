"""A small index of a model's own vectors, written without `hnclip index`: for tests of what reads one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from hnclip.config import Opening
from hnclip.core import ImageSource, Record, upright_shape
from hnclip.data.image_sources import FileImage
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.database import About, content_hash, text_hash
from hnclip.search.reader import place_of
from hnclip.search.update import make_thumbnail
from hnclip.search.writer import Change, NewFile, NewImage, open_writer


@cache
def bundled() -> DualEncoder:
    """The bundled model, loaded once for all tests: none may change it."""
    return load().eval()


def small_index(
    path: Path,
    records: Sequence[Record],
    *,
    model: DualEncoder | None = None,
    files: Path | None = None,
    name: str = "bundled",
) -> None:
    """Index records with their captions under their ids; called again it adds to what there is. It has no text encoder:
    torch encodes queries.

    Args:
        model: the bundled one if not given; `name` is what `hnclip index --model` would take.
        files: directory to write the images to as PNG files; without it they stay where they are, and generated scenes
            have no place of their own.
    """
    model, root = model or bundled(), None if files is None else files.absolute()
    images = [record.image if files is None else _write(record, files) for record in records]
    texts = list(dict.fromkeys(text for record in records for text in record.captions))
    about = About(
        model=name,
        source=model.source,
        fingerprint=model_fingerprint(model),
        opening=asdict(Opening()),
        width=model.width,
        data="records of a test",
        root=None if root is None else str(root),
    )
    new_images, new_files = list[NewImage](), list[NewFile]()
    for record, image in zip(records, images):
        digest, decoded = content_hash(image.read()), image.load()
        (vector,) = model.encode([decoded])
        own = image.path.name if isinstance(image, FileImage) and files else record.id
        new_images.append(NewImage(digest, vector, upright_shape(decoded), make_thumbnail(decoded)))
        new_files.append(NewFile(own, digest, place_of(image, root), image.stamp(), record.captions))
    with open_writer(path, about) as writer:
        if writer.about.root is None:
            writer.set_about(about)
        known = writer.hashes("images"), writer.hashes("captions")
        different = {new.hash: new for new in new_images if new.hash not in known[0]}
        texts = [text for text in texts if text_hash(text) not in known[1]]
        vectors = model.encode(texts) if texts else ()
        writer.commit(Change([*different.values()], dict(zip(texts, vectors)), new_files))


def _write(record: Record, files: Path) -> ImageSource:
    files.mkdir(parents=True, exist_ok=True)
    path = files / f"{record.id.replace('/', '-')}.png"
    record.image.load().save(path)
    return FileImage(path)
