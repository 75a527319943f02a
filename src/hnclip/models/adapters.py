"""Adapters: few new weights added to frozen ones, trained and saved alone, merged for use.

LoRA: W' = W + (α/r)·B·A, with A [r, in] random and B [out, r] zero.
DoRA: W' = m ⊙ (W + (α/r)·B·A) / ‖W + (α/r)·B·A‖, the norm over the inputs of each output; m [out] starts as ‖W‖.

Both start as the base model. Layers and files are those of peft: an adapter saved here opens there, and vice versa.

References: LoRA (Hu et al. 2022), equation 3; DoRA (Liu et al. 2024), equation 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.long_context import KEEP
from hnclip.models.model_card import read_training, warn_of_changed_weights, write_card
from hnclip.models.openai_checkpoint import Activation
from hnclip.models.parameters import Towers, linear_names, projection_names
from hnclip.util.files import read_json, replace_directory
from hnclip.util.optional import import_extra

Method = Literal["lora", "dora"]
ABOUT, CONFIG = "hnclip.json", "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class BaseModel:
    """The model of an adapter, as the arguments of `hnclip.load` that open it."""

    model: str
    context: int | None = None
    keep: int = KEEP
    ratio: int | None = None
    tokenizer: str | None = None
    activation: Activation | None = None

    def located(self) -> BaseModel:
        """The same with absolute paths."""
        parts = [self.model] if Path(self.model).exists() else self.model.split("+")
        tokenizer = None if self.tokenizer is None else _absolute(self.tokenizer)
        return replace(self, model="+".join(map(_absolute, parts)), tokenizer=tokenizer)


def _absolute(name: str) -> str:
    """Paths absolute; "bundled" and hub names as they are."""
    return str(Path(name).resolve()) if name != "bundled" and Path(name).exists() else name


def add_adapters(
    model: DualEncoder,
    *,
    method: Method,
    rank: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    towers: Towers = "both",
    projections: bool = False,
    train_scale: bool,
) -> None:
    """Add an adapter to every linear layer of the blocks, in place, and freeze everything else.

    Args:
        method: lora or dora.
        rank: width r of the adapters.
        alpha: their strength; their output is multiplied by α/r.
        dropout: on the input of the adapters, in training.
        towers: which towers get adapters; the other one is frozen.
        projections: also train both projections in full, as two newly joined towers need.
        train_scale: whether the scale trains.
    """
    if model.has_adapters:
        raise ValueError("the model already has adapters: merge them first (merge_adapters)")
    peft = import_extra("peft", "adapters", "adapt")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        use_dora=method == "dora",
        target_modules=linear_names(model, towers),
        modules_to_save=projection_names(model) if projections else None,
    )
    model.backbone = peft.get_peft_model(model.backbone, settings).train(model.training)
    model.backbone.logit_scale.requires_grad_(train_scale)


def merge_adapters(model: DualEncoder) -> DualEncoder:
    """Merge the adapters into the weights, in place: a plain model again, whose parameters all require gradients."""
    merged = _adapted(model).merge_and_unload()
    model.backbone = merged.requires_grad_(True).train(model.training)
    return model


def save_adapter(
    model: DualEncoder, directory: str | Path, base: BaseModel, *, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the adapters without the model.

    The directory is one of peft: `peft.PeftModel.from_pretrained(backbone, directory)` opens it. `hnclip.json` adds
    how the base was opened, and the scale. The directory is written atomically and replaces an existing one.

    Args:
        weights: as in `hnclip.save`.
    """
    backbone, base = _adapted(model), base.located()
    settings = backbone.peft_config[backbone.active_adapter]
    # hnclip writes the revision of a hub model after @, peft in a field of its own.
    name, _, revision = (base.model, "", "") if Path(base.model).exists() else base.model.partition("@")
    settings.base_model_name_or_path, settings.revision = name, revision or None
    settings.target_modules = sorted(settings.target_modules)  # a set, whose order differs from process to process
    about = {"base": asdict(base), "logit_scale": backbone.logit_scale.item()}
    with replace_directory(Path(directory)) as partial:
        # Without this argument, peft queries the hub for changes of the base's vocabulary.
        backbone.save_pretrained(str(partial), save_embedding_layers=False, state_dict=weights)
        write_card(model, partial, adapter_of=base.model)  # replaces peft's empty template
        (partial / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def open_adapter(directory: Path, *, tokenizer: Any = None) -> DualEncoder:
    """The base model with an adapter merged into it.

    Args:
        directory: written by `save_adapter`, or an adapter of peft (LoRA or DoRA) for a supported model.
        tokenizer: a tokenizer instead of the base's.
    """
    from hnclip.models.load import load, wrap

    base, logit_scale = _read_base(directory)
    try:
        model = load(**asdict(base))
    except (ValueError, OSError) as error:
        raise ValueError(f"{directory} is an adapter of {base.model!r}, which cannot be opened: {error}") from error
    if not any((directory / name).is_file() for name in WEIGHTS):  # peft would ask the hub
        raise ValueError(f"{directory} has no weights: expected {' or '.join(WEIGHTS)}")
    training = read_training(directory)
    warn_of_changed_weights(directory, training)
    peft = import_extra("peft", "adapters", "adapt")
    settings = peft.PeftConfig.from_pretrained(str(directory))
    if settings.peft_type != peft.PeftType.LORA:
        raise ValueError(f"{directory} is an adapter of type {settings.peft_type}; supported are LoRA and DoRA")
    try:
        backbone = peft.PeftModel(model.backbone, settings)
        result = backbone.load_adapter(str(directory), "default", torch_device="cpu")
        if wrong := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"missing or unknown tensor {wrong[0]}")
    except Exception as error:  # many types; name the adapter and its base
        raise ValueError(f"{directory} does not fit its base model, {model.source}: {error}") from error
    model.backbone = backbone
    if logit_scale is not None:
        with torch.no_grad():
            backbone.logit_scale.fill_(logit_scale)
    merge_adapters(model)
    model.source += f", with the {'DoRA' if settings.use_dora else 'LoRA'} of {directory.name}"
    if tokenizer is not None:
        model = wrap(model.backbone, tokenizer, model.image_transform, source=model.source)
    model.untrained_projections = False
    model.provenance = training
    return model


def _read_base(directory: Path) -> tuple[BaseModel, float | None]:
    """The base model, and the scale if known."""
    if (file := directory / ABOUT).is_file():
        about = read_json(file)
        try:
            return BaseModel(**about["base"]), float(about["logit_scale"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} does not name the base model of the adapter: {error}") from error
    settings = read_json(directory / CONFIG)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not name:
        raise ValueError(f"{directory / CONFIG} does not name the base model: set its base_model_name_or_path")
    return BaseModel(f"{name}@{revision}" if revision else name), None


def _adapted(model: DualEncoder) -> Any:
    if not model.has_adapters:
        raise ValueError("the model has no adapters")
    return model.backbone
