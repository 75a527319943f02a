"""Adapters: a small number of new weights beside frozen ones, trained and saved alone, merged for use.

LoRA: W' = W + (α/r)·B·A, with A [r, in] drawn at random and B [out, r] zero.
DoRA: W' = m ⊙ (W + (α/r)·B·A) / ‖W + (α/r)·B·A‖, the norm over the inputs of each output; m [out] begins as ‖W‖.

So both begin as the base model. The layers are peft's, and so are the files: an adapter that is saved here opens there,
and the other way round.

References: LoRA (Hu et al. 2022), equation 3; DoRA (Liu et al. 2024), equation 5.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from hnclip.files import read_settings, replace_directory
from hnclip.models.card import read_training, write_card
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.huggingface import wrap
from hnclip.models.long_context import KEEP
from hnclip.models.trainable import Towers, first_difference, linear_names, projection_names
from hnclip.models.weights import read_checkpoint

Method = Literal["lora", "dora"]
ABOUT, CONFIG = "hnclip.json", "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class BaseModel:
    """The model under an adapter, as the arguments of `hnclip.models.load.load` that open it."""

    model: str
    context: int | None = None
    keep: int = KEEP
    ratio: int | None = None
    tokenizer: str | None = None
    activation: Literal["quick_gelu", "gelu"] | None = None

    def located(self) -> BaseModel:
        """The same with absolute paths; ValueError for a model that cannot be opened a second time."""
        if not Path(self.model).exists() and self.model.count("+") == 1:
            raise ValueError(
                f"{self.model} joins two towers by projections drawn at random, so an adapter of it could not be "
                f"opened again; save the joined model first, `hnclip convert {self.model} joined/`, and adapt that"
            )
        tokenizer = None if self.tokenizer is None else _located(self.tokenizer)
        return BaseModel(_located(self.model), self.context, self.keep, self.ratio, tokenizer, self.activation)


def _located(name: str) -> str:
    """Paths absolute; "bundled" and names on the hub as they are."""
    from hnclip.models.load import BUNDLED

    return str(Path(name).resolve()) if name != BUNDLED and Path(name).exists() else name


def has_adapters(model: DualEncoder) -> bool:
    return hasattr(model.backbone, "peft_config")


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
    """Give the linear layers of every block an adapter, in place, and freeze everything else.

    Args:
        method: lora, or dora.
        rank: width r of the adapters.
        alpha: their strength; what they add counts α/r times.
        dropout: on the input of the adapters, in training.
        towers: which towers get adapters; the other one is frozen.
        projections: also train both projections whole, which towers that were joined a moment ago need.
        train_scale: whether the temperature trains.
    """
    if has_adapters(model):
        raise ValueError("the model has adapters already: merge them first (merge_adapters)")
    if method not in ("lora", "dora"):
        raise ValueError(f"method must be lora or dora, got {method!r}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    peft = _peft()
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
    """Work the adapters into the weights they adapt, in place: a plain model again, all of it ready to train."""
    merged = _adapted(model).merge_and_unload()
    model.backbone = merged.requires_grad_(True).train(model.training)
    return model


def save_adapter(model: DualEncoder, directory: str | Path, base: BaseModel) -> None:
    """Write the adapters alone, without the model under them.

    The directory is one of peft: `peft.PeftModel.from_pretrained(backbone, directory)` opens it on the base's backbone.
    `hnclip.json` beside adds what peft has no place for: how the base was opened, and the temperature. The directory
    appears whole or not at all, and replaces one of the same name.
    """
    backbone, base = _adapted(model), base.located()
    settings = backbone.peft_config[backbone.active_adapter]
    # The revision of a hub model stands behind @ here, and there in a field of its own.
    name, _, revision = (base.model, "", "") if Path(base.model).exists() else base.model.partition("@")
    settings.base_model_name_or_path, settings.revision = name, revision or None
    settings.target_modules = sorted(settings.target_modules)  # a set, whose order changes from process to process
    about = {"base": asdict(base), "logit_scale": backbone.logit_scale.item()}
    with replace_directory(Path(directory)) as partial:
        # Without the argument peft would ask the hub whether the base's vocabulary has changed.
        backbone.save_pretrained(str(partial), save_embedding_layers=False)
        write_card(model, partial, adapter_of=base.model)  # in place of peft's, a form with nothing filled in
        (partial / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def open_adapter(directory: str | Path, *, tokenizer: Any = None) -> DualEncoder:
    """The base model with an adapter merged into it: a plain model.

    Args:
        directory: what `save_adapter` wrote, or an adapter of peft (LoRA or DoRA) for a supported model.
        tokenizer: a tokenizer instead of the base's.
    """
    from hnclip.models.load import load

    directory = Path(directory)
    base, logit_scale, where = _read_base(directory)
    try:
        model = load(**asdict(base))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{directory} is an adapter of {base.model!r}, which cannot be opened: {error}. If that model is somewhere "
            f"else now, write its place into {where}"
        ) from error
    method = _attach(model, directory)
    if logit_scale is not None:
        with torch.no_grad():
            model.backbone.logit_scale.fill_(logit_scale)
    merge_adapters(model)
    model.source += f", with the {method} of {directory.name}"
    if tokenizer is not None:
        model = wrap(model.backbone, tokenizer, model.image_transform, source=model.source)
    model.provenance = read_training(directory)
    return model


def _read_base(directory: Path) -> tuple[BaseModel, float | None, str]:
    """The base model, the temperature if it is known, and where a reader can change the base."""
    file = directory / ABOUT
    if file.is_file():
        about = read_settings(file)
        try:
            return BaseModel(**about["base"]), float(about["logit_scale"]), f"{file} (base.model)"
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} does not say which model the adapter belongs to: {error}") from error
    file = directory / CONFIG
    settings = read_settings(file)
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not name:
        raise ValueError(f"{file} does not say which model the adapter belongs to: set its base_model_name_or_path")
    return BaseModel(f"{name}@{revision}" if revision else name), None, f"{file} (base_model_name_or_path)"


def _attach(model: DualEncoder, directory: Path) -> str:
    """Put the adapter of a directory into a model; nothing may be missing and nothing be left over."""
    peft = _peft()
    file = next((directory / name for name in _WEIGHTS if (directory / name).is_file()), None)
    if file is None:
        raise ValueError(f"{directory} has no weights: looked for {', '.join(_WEIGHTS)}")
    found = read_checkpoint(file).tensors
    settings = peft.PeftConfig.from_pretrained(str(directory))
    if settings.peft_type != peft.PeftType.LORA:
        raise ValueError(f"{directory} is an adapter of the kind {settings.peft_type}; supported are LoRA and DoRA")
    try:
        backbone = peft.PeftModel(model.backbone, settings)
    except ValueError as error:  # no layer of the names that the adapter is for
        raise ValueError(f"{directory} does not fit its base model, {model.source}: {error}") from error
    expected = peft.get_peft_model_state_dict(backbone, save_embedding_layers=False)
    if difference := first_difference(found, expected):
        raise ValueError(f"{file} does not fit its base model, {model.source}: {difference}")
    peft.set_peft_model_state_dict(backbone, found)
    model.backbone = backbone
    return "DoRA" if settings.use_dora else "LoRA"


def _adapted(model: DualEncoder) -> Any:
    if not has_adapters(model):
        raise ValueError("the model has no adapters")
    return model.backbone


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise ValueError("adapters need the peft package: pip install 'hnclip[adapt]'") from error
    return peft
