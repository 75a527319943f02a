"""The margin that all negatives would have alike, if each got the mean of what L_HN gives them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from hashlib import sha256
from pathlib import Path

from hnclip.analysis.caption_pairs import caption_pairs
from hnclip.config import TrainConfig
from hnclip.encode.loop import encode_captions
from hnclip.models.adapters import BaseModel
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.load import load
from hnclip.studies.identity import Trained, start_fingerprint, training_fingerprint
from hnclip.util.device import find_device
from hnclip.util.files import replace_file


def with_matched_margin(config: TrainConfig, directory: Path, device: str) -> TrainConfig:
    """The run with the fixed margin m = γ·mean(Ḡ).

    Args:
        config: of a run whose global loss is fixed_margin.
        directory: where the mean is kept once it was measured.
    """
    margin = config.objective.gamma * mean_similarity(config, directory, device)
    return replace(config, objective=replace(config.objective, parameters={"margin": margin}))


def mean_similarity(config: TrainConfig, directory: Path, device: str) -> float:
    """Mean Ḡ over all pairs of training captions of different pictures, to the encoder before training."""
    content = (start_fingerprint(config), training_fingerprint(config))
    path = directory / f"mean-similarity-{sha256(repr(content).encode()).hexdigest()[:10]}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["mean"]
    model = open_start(config, device)
    records = Trained.by(config).records()
    captions = model.text_transform([text for record in records for text in record.captions])
    owner = [number for number, record in enumerate(records) for _ in record.captions]
    text = encode_captions(model, captions).cpu()  # [T, D]
    mean = caption_pairs(text, text.new_tensor(owner).long()).mean()
    with replace_file(path) as partial:
        partial.write_text(json.dumps({"mean": mean, "captions": len(captions), "model": config.model}) + "\n")
    return mean


def open_start(config: TrainConfig, device: str) -> DualEncoder:
    """The model that a run starts from."""
    base = BaseModel(**{spec.name: getattr(config, spec.name) for spec in fields(BaseModel)})
    return load(**asdict(base)).to(find_device(device))
