"""What a diagnosis looks at: the captions of a split as a model sees them, and its pictures where they are at hand.

Vectors are encoded once, by `hnclip encode`'s shards, into the diagnosis's own directory: a stopped diagnosis goes on,
and a second one of the same model and data encodes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hnclip.analysis.head_probe import Features
from hnclip.core import InvalidImage, Record
from hnclip.data.batching import numbers, text_numbers
from hnclip.data.records import DataSet
from hnclip.data.sources import SCENES, open_data
from hnclip.encode.embeddings import open_embeddings
from hnclip.encode.fingerprint import model_fingerprint, records_fingerprint
from hnclip.encode.options import EncodeOptions
from hnclip.encode.shards import encode
from hnclip.evaluate.retrieval import group_numbers
from hnclip.models.dual_encoder import DualEncoder
from hnclip.options import Diagnose

log = logging.getLogger(__name__)

SHARD = 1024  # records that a kill costs


@dataclass(frozen=True)
class Material:
    """N records with T captions, those that can be used.

    `left_out` records cannot, `truncated` captions are longer than the model's context.

    Shape:
        owner: [T], the record of each caption
        cut: [T], whether a caption fills the model's context, so that what is the same to the model may differ behind
        text: [T, D] unit vectors; image: [N, D], or None if pictures were not asked for
        caption_ids: [T], image_ids: [N] or None; equal numbers are the same caption or picture to the model
    """

    split: str
    records: tuple[Record, ...]
    owner: Tensor
    text: Tensor
    caption_ids: Tensor
    cut: Tensor
    image: Tensor | None = None
    image_ids: Tensor | None = None
    left_out: int = 0
    truncated: int = 0

    @property
    def captions(self) -> list[str]:
        """[T]"""
        return [caption for record in self.records for caption in record.captions]

    def only(self, ids: Collection[str], split: str) -> Material:
        """The records of these names, as a split of their own."""
        keep = torch.tensor([record.id in ids for record in self.records], dtype=torch.bool)  # [N]
        captions = keep[self.owner]  # [T]
        return replace(
            self,
            split=split,
            records=tuple(record for record, kept in zip(self.records, keep.tolist()) if kept),
            owner=(keep.cumsum(0) - 1)[self.owner[captions]],
            text=self.text[captions],
            caption_ids=self.caption_ids[captions],
            cut=self.cut[captions],
            image=None if self.image is None else self.image[keep],
            image_ids=None if self.image_ids is None else self.image_ids[keep],
        )

    def features(self) -> Features:
        """What heads are trained on; pictures are needed for it."""
        if self.image is None or self.image_ids is None:
            raise ValueError(f"the pictures of the split {self.split} were not encoded")
        return Features(
            image=self.image,
            text=self.text,
            owner=self.owner,
            image_ids=self.image_ids,
            caption_ids=self.caption_ids,
            groups=group_numbers(self.records),
        )


class Source:
    """The data of a diagnosis and the vectors of its splits."""

    def __init__(self, options: Diagnose, model: DualEncoder) -> None:
        self.options = options
        self.transform, self.fingerprint = model.text_transform, model_fingerprint(model, model.name)
        wanted = {"train", "validation"} if options.split is None else {options.split}
        if options.data in SCENES:  # of a benchmark, the files of other splits may be missing
            wanted |= {"train", "validation"}  # for the probe
        self.data: DataSet = open_data(options.data, options.read, splits=wanted)
        self._found: dict[tuple[str, bool], Material] = {}

    @property
    def split(self) -> str:
        """Whose captions are looked at: those that a run would train on, unless told."""
        if self.options.split is not None:
            return self.options.split
        declared = self.data.splits()
        if not declared:
            return "all"
        for split in ("train", "validation"):
            if split in declared:
                return split
        raise ValueError(
            f"{self.data.name} has neither training nor validation records; name those to look at with --split: it has "
            f"{', '.join(declared)}"
        )

    def captions(self) -> Material:
        """The captions to look at; with vectors of their pictures if those were encoded before."""
        return self._found.get((self.split, True)) or self._material(self.split, pictures=False)

    def training(self) -> tuple[Material, Material]:
        """What a run would train and validate on, pictures included."""
        parts = {split: self._records(split) for split in ("train", "validation")}
        for split, records in parts.items():
            if not records:
                raise ValueError(f"{self.data.name} has no records to {'train' if split == 'train' else 'validate'} on")
        if not self.data.splits():  # both are parts of the whole, which is looked at anyway
            whole = self._material("all", pictures=True)
            train, held_out = (whole.only({record.id for record in records}, split) for split, records in parts.items())
            return train, held_out
        return self._material("train", pictures=True), self._material("validation", pictures=True)

    def _records(self, split: str) -> tuple[Record, ...]:
        return self.data.part(split, validation_share=self.options.read.validation_share)

    def _material(self, split: str, *, pictures: bool) -> Material:
        if (split, pictures) not in self._found:
            self._found[split, pictures] = self._encode(split, pictures=pictures)
        return self._found[split, pictures]

    def _encode(self, split: str, *, pictures: bool) -> Material:
        options = self.options
        only: Literal["both", "captions"] = "both" if pictures else "captions"
        out = self._directory(split, only)
        log.info(f"encoding the {'images and captions' if pictures else 'captions'} of {options.data}, {split}")
        encode(
            EncodeOptions(
                data=options.data,
                out=out,
                opening=options.opening,
                read=options.read,
                model=options.model,
                split=split,
                only=only,
                shard_size=SHARD,
                batch=options.batch,
                device=options.device,
            ),
        )
        found = open_embeddings(out)
        if not found.captions:
            raise ValueError(f"{out} holds no captions")
        by_id = {record.id: record for record in self.data.records}
        # Captions in which there is nothing to read are not among the encoded ones.
        records = tuple(replace(by_id[row["id"]], captions=tuple(row["captions"])) for row in found.records())
        tokens = self.transform([caption for record in records for caption in record.captions])
        return Material(
            split=split,
            records=records,
            owner=torch.from_numpy(found.owners),
            text=torch.from_numpy(np.concatenate(found.captions)),
            caption_ids=text_numbers(tokens),
            cut=torch.tensor([len(row) >= self.transform.context for row in tokens]),
            image=torch.from_numpy(np.concatenate(found.images)) if found.images else None,
            image_ids=_picture_numbers(records) if pictures else None,
            left_out=found.counts["skipped"],
            truncated=found.counts["truncated"],
        )

    def _directory(self, split: str, only: str) -> Path:
        """One for each model, split and state of its records: what was encoded before a caption was mended is not in
        the way."""
        return self.options.out / "features" / f"{split}-{only}-{self.state(split)}-{self.options.batch}"

    def state(self, split: str) -> str:
        """Changes when the model or the records of the split do."""
        return f"{self.fingerprint[:8]}-{records_fingerprint(self._records(split))[:8]}"


def _picture_numbers(records: Sequence[Record]) -> Tensor:
    """[N]: the same for pictures of the same bytes, whatever their names."""

    def content(record: Record) -> Hashable:
        try:
            return blake2b(record.image.read(), digest_size=16).digest()
        except InvalidImage:  # it was there when it was encoded
            return record.image.key

    return numbers([content(record) for record in records])
