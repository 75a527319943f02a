"""A small index of a model's own vectors, written without `hnclip index`: for tests of what reads one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from hnclip.config import Opening
from hnclip.core import ImageSource, Record, upright_shape
from hnclip.data.image_sources import FileImage
from hnclip.encode.fingerprint import model_fingerprint
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.search.index.catalogue import content_hash
from hnclip.search.index.changes import Change, NewItem, NewPicture
from hnclip.search.index.layout import About
from hnclip.search.index.opening import open_writer
from hnclip.search.index.places import place_of
from hnclip.search.index.thumbnails import thumbnail


@cache
def bundled() -> DualEncoder:
    """The bundled model, loaded once for all tests: none may change it."""
    return load().eval()


def small_index(
    path: Path,
    model: DualEncoder,
    records: Sequence[Record],
    *,
    tokens: bool = False,
    files: Path | None = None,
    name: str = "bundled",
    engine: str = "exact",
) -> None:
    """Index records, captions too, under their ids; run again it adds to what is there.

    Args:
        tokens: keep the vectors of all patches.
        files: write the pictures there as PNG files and let the items point to these; without it they stay where they
            are, and generated scenes have no place of their own.
        name: of the model, as `hnclip index --model` would take it.
        engine: the index's own, which is not made here.
    """
    images = [record.image if files is None else _written(record, files) for record in records]
    pictures = [image.load() for image in images]
    contents = [content_hash(image.read()) for image in images]
    texts = list(dict.fromkeys(text for record in records for text in record.captions))
    with torch.no_grad():
        seen = model.encode_images(model.preprocess_images(pictures), tokens=tokens) if records else None
        said = model.encode_texts(model.tokenize(texts)).vectors.cpu().numpy() if texts else []  # [T, D]
    patches = seen.tokens.cpu().numpy() if seen is not None and seen.tokens is not None else None  # [N, P, D]
    about = About(
        model=name,
        source=model.source,
        fingerprint=model_fingerprint(model),
        opening=vars(Opening()),
        width=model.width,
        storage="bf16",
        patches=0 if patches is None else patches.shape[1],
        data="records of a test" if files is None else str(files),
        root=None if files is None else str(files.absolute()),
        engine=engine,
    )
    root = None if files is None else files.absolute()
    with open_writer(path, about) as writer:
        if seen is None:
            return
        writer.commit(
            Change(
                pictures=[
                    NewPicture(
                        content=content,
                        vector=vector.cpu().numpy(),
                        shape=upright_shape(picture),
                        thumbnail=thumbnail(picture),
                        tokens=None if patches is None else patches[number],
                    )
                    for number, (content, vector, picture) in enumerate(zip(contents, seen.vectors, pictures))
                ],
                items=[
                    NewItem(
                        name=image.path.name if isinstance(image, FileImage) and files else record.id,
                        content=content,
                        place=place_of(image, root),
                        stamp=image.stamp(),
                        captions=record.captions,
                    )
                    for record, image, content in zip(records, images, contents)
                ],
                captions=dict(zip(texts, said)),
            )
        )


def _written(record: Record, files: Path) -> ImageSource:
    files.mkdir(parents=True, exist_ok=True)
    path = files / f"{record.id.replace('/', '-')}.png"
    record.image.load().save(path)
    return FileImage(path)
