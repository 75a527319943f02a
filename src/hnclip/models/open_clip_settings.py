"""What an `open_clip_config.json` beside a file of weights says of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform
from hnclip.files import read_settings

# Where these differ from OpenAI's CLIP no tensor shows it.
_PLAIN: dict[str, Any] = {
    "vision_cfg.pool_type": "tok",
    "vision_cfg.act_kwargs": None,
    "text_cfg.pool_type": "argmax",
    "text_cfg.no_causal_mask": False,
    "text_cfg.act_kwargs": None,
}


@dataclass(frozen=True)
class OpenClipSettings:
    """The settings, or None for each of them where there is no such file."""

    file: Path | None = None
    model: Mapping[str, Any] | None = None
    pictures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def beside(cls, weights: Path) -> OpenClipSettings:
        file = weights.parent / "open_clip_config.json"
        if not file.is_file():
            return cls()
        settings = read_settings(file)
        model = settings.get("model_cfg")
        towers = [model.get("vision_cfg"), model.get("text_cfg")] if isinstance(model, dict) else [None]
        if not all(isinstance(tower, dict) for tower in towers):
            raise ValueError(f"{file} has no model_cfg with a vision_cfg and a text_cfg: it is not open_clip's")
        return cls(file, model, settings.get("preprocess_cfg") or {})

    @property
    def vision(self) -> Mapping[str, Any] | None:
        return None if self.model is None else self.model["vision_cfg"]

    @property
    def text(self) -> Mapping[str, Any] | None:
        return None if self.model is None else {"heads": 8, **self.model["text_cfg"]}  # 8 is open_clip's default

    def check(self, weights: Path, found: Mapping[str, Any]) -> None:
        """ValueError if it describes other weights than those found, or a model that is not CLIP's."""
        if self.model is None:
            return
        said: dict[str, Any] = {"embed_dim": self.model.get("embed_dim")}
        for part in ("vision_cfg", "text_cfg"):
            said |= {f"{part}.{key}": value for key, value in self.model[part].items()}
        for key, value in found.items():
            if said.get(key) not in (None, value, [value, value]):
                raise ValueError(f"{self.file} says {key} {said[key]}, but {weights} has {value}: it is not its own")
        for key, value in _PLAIN.items():
            if said.get(key, value) != value:
                raise ValueError(
                    f"{self.file} says {key} {said[key]!r}, unlike OpenAI's CLIP, whose design alone is supported"
                )

    def image_transform(self, size: int) -> ImageTransform:
        """How the model wants its pictures; as OpenAI's where nothing is said."""
        mode = self.pictures.get("resize_mode") or "shortest"
        if mode not in ("shortest", "squash"):
            raise ValueError(f"{self.file} says preprocess_cfg.resize_mode {mode!r}; supported are shortest, squash")
        return ImageTransform(
            size,
            squash=mode == "squash",
            resample=self.pictures.get("interpolation") or "bicubic",
            mean=tuple(self.pictures.get("mean") or OPENAI_MEAN),
            std=tuple(self.pictures.get("std") or OPENAI_STD),
        )
