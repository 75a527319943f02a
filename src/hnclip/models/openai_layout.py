"""Weights in OpenAI's layout (CLIP, Long-CLIP, open_clip's CLIP) as a `transformers.CLIPModel`.

The layout packs query, key and value into one matrix and multiplies projections from the right. Sizes are read from
the tensors' shapes, as OpenAI's own loader does; what shapes cannot tell (heads of unusual width, the activation) is
read from an `open_clip_config.json` beside the file, and refused rather than guessed where a guess could be wrong.

The official CPU loaders of CLIP and Long-CLIP round the weights of linear layers, attention and the patch
convolution through fp16 on opening. That is not done here: a file in fp32 is used as it is, so vectors can differ from
the official ones in the fourth digit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from hnclip.models.long_context import KEEP
from hnclip.models.open_clip_settings import OpenClipSettings
from hnclip.models.weights import Checkpoint

if TYPE_CHECKING:
    from transformers import CLIPModel

Activation = Literal["quick_gelu", "gelu"]
_ACTIVATIONS = {"quick_gelu": "QuickGELU", "gelu": "GELU"}

# A block's tensors: the name in transformers, and the shape. Packed tensors, of three times the width, come apart.
_BLOCK = {
    "ln_1.weight": ("layer_norm1.weight", ("width",)),
    "ln_1.bias": ("layer_norm1.bias", ("width",)),
    "attn.in_proj_weight": ("self_attn.{}_proj.weight", ("3·width", "width")),
    "attn.in_proj_bias": ("self_attn.{}_proj.bias", ("3·width",)),
    "attn.out_proj.weight": ("self_attn.out_proj.weight", ("width", "width")),
    "attn.out_proj.bias": ("self_attn.out_proj.bias", ("width",)),
    "ln_2.weight": ("layer_norm2.weight", ("width",)),
    "ln_2.bias": ("layer_norm2.bias", ("width",)),
    "mlp.c_fc.weight": ("mlp.fc1.weight", ("hidden", "width")),
    "mlp.c_fc.bias": ("mlp.fc1.bias", ("hidden",)),
    "mlp.c_proj.weight": ("mlp.fc2.weight", ("width", "hidden")),
    "mlp.c_proj.bias": ("mlp.fc2.bias", ("width",)),
}
# Known and without meaning for a CLIPModel: masks that it makes itself, OpenAI's notes on sizes, and the bias of a
# sigmoid loss, which changes no embedding.
_EXTRAS = re.compile(r"(.*\.)?attn_mask|mask[12]|input_resolution|context_length|vocab_size|logit_bias")
_OTHER_MODELS = {
    r"text_decoder\.|visual\.attn_pool\.": "a CoCa model",
    r"visual\.(layer1|attnpool)\.": "a CLIP with a ResNet image tower",
    r"visual\.trunk\.": "an open_clip model with an image tower of timm",
    r"visual\.(blocks|patch_embed)\.": "an EVA-CLIP model",
    r"text\.transformer\.(?!resblocks\.)": "an open_clip model with a text tower of transformers",
}
_SUPPORTED = "supported are CLIP and Long-CLIP with OpenAI's own vision and text transformers"
_SIZES = {(384, 12): "S", (512, 12): "M", (768, 12): "B", (1024, 24): "L", (1280, 32): "H", (1664, 48): "bigG"}
_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_HEAD_WIDTH = 64
_WIDEST_OPENAI = 1024  # wider image towers are open_clip's, and their heads are not 64 wide


def is_openai_layout(tensors: Mapping[str, Tensor]) -> bool:
    """Whether names are of the family that OpenAI's CLIP began, with the image tower under `visual.`.

    Not all of them can be built: `build_clip` says what a file is if it is another model.
    """
    return any(name.startswith("visual.") for name in tensors)


def build_clip(checkpoint: Checkpoint, *, activation: Activation | None = None) -> tuple[CLIPModel, str]:
    """A `CLIPModel` in fp32 with these weights, and what was recognised in one line for people.

    Tensors in fp32 are used where they lie in the mapped file, so opening costs little memory; training them changes
    the model, never the file. Of Long-CLIP's two positional tables the first 20 rows of one and the others of its
    trained residual become one table. Every tensor is used, or known to have no meaning here, or refused by name.

    Args:
        checkpoint: what `read_checkpoint` found.
        activation: of the transformers' inner layers. Left out, an `open_clip_config.json` beside the file decides;
            Long-CLIP, OpenAI's archives and bare weights have QuickGELU; where open_clip's own GELU is as likely, it
            must be given.

    Reference:
        Radford et al. 2021 (CLIP); Zhang et al. 2024 (Long-CLIP).
    """
    from transformers import CLIPConfig, CLIPModel

    _refuse_other_models(checkpoint)
    settings = OpenClipSettings.beside(checkpoint.file)
    source = _Source(checkpoint)
    shapes = _Shapes.read(source, settings)
    act, act_note = _activation(checkpoint, shapes, settings, activation)
    config = CLIPConfig(
        projection_dim=shapes.joint,
        text_config={
            **_tower_config(shapes.text, shapes.joint, act),
            "vocab_size": shapes.vocab,
            "max_position_embeddings": shapes.context,
            # OpenAI's vocabularies end with the start and the end token. transformers pools at the first end token,
            # OpenAI at the largest id: the same place.
            "bos_token_id": shapes.vocab - 2,
            "eos_token_id": shapes.vocab - 1,
            "pad_token_id": shapes.vocab - 1,
        },
        vision_config={
            **_tower_config(shapes.vision, shapes.joint, act),
            "image_size": shapes.image_size,
            "patch_size": shapes.patch,
        },
    )
    state = _convert(source, shapes)
    source.refuse_leftovers()
    with torch.device("meta"):  # no memory for weights that are replaced at once
        clip = CLIPModel(config)
    clip.load_state_dict(state, assign=True)
    for embeddings in (clip.text_model.embeddings, clip.vision_model.embeddings):
        weight = embeddings.position_embedding.weight
        embeddings.position_ids = torch.arange(len(weight), device=weight.device)[None]  # not among saved weights
    return clip.eval(), _describe(source, shapes, settings, act_note)


def _refuse_other_models(checkpoint: Checkpoint) -> None:
    for pattern, what in _OTHER_MODELS.items():
        if sign := next((name for name in checkpoint.tensors if re.match(pattern, name)), None):
            raise ValueError(f"{checkpoint.file} is {what} (it has {sign}); {_SUPPORTED}")
    if not is_openai_layout(checkpoint.tensors):
        first = next(iter(checkpoint.tensors))
        raise ValueError(
            f"{checkpoint.file} is not in OpenAI's layout: nothing is named visual.…, the first is {first}"
        )


class _Size(NamedTuple):
    """A size that tensors share, and the tensor that it was read from."""

    value: int
    origin: str


class _Source:
    """The tensors of a file, handed out by name with their shapes checked; it knows what nobody asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.file = checkpoint.file
        self.tensors = checkpoint.tensors
        self.left = set(checkpoint.tensors)
        self.precisions: set[str] = set()

    def shape(self, name: str, form: tuple[str, ...]) -> tuple[int, ...]:
        """The shape of a tensor that others are measured by."""
        if name not in self.tensors:
            raise ValueError(f"{self.file} lacks the tensor {name} of shape {_brackets(form)}")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != len(form):
            raise ValueError(f"{self.file}: {name} has shape {list(shape)}, expected {_brackets(form)}")
        return shape

    def take(self, name: str, form: tuple[str, ...], sizes: Mapping[str, _Size]) -> Tensor:
        """A tensor in fp32, of the shape that `form` spells in `sizes`."""
        expected = [sizes[label].value for label in form]
        spelt = f"{_brackets(form)} = {expected}" if form else "[]"
        why = "; ".join(dict.fromkeys(f"{label} is {sizes[label].value} by {sizes[label].origin}" for label in form))
        if name not in self.tensors:
            raise ValueError(f"{self.file} lacks the tensor {name} of shape {spelt}{why and ', where '}{why}")
        tensor = self.tensors[name]
        if list(tensor.shape) != expected:
            raise ValueError(f"{self.file}: {name} has shape {list(tensor.shape)}, expected {spelt}, because {why}")
        if tensor.dtype not in _PRECISIONS:
            known = ", ".join(_PRECISIONS.values())
            raise ValueError(f"{self.file}: {name} holds {tensor.dtype}, expected one of {known}")
        self.left.discard(name)
        self.precisions.add(_PRECISIONS[tensor.dtype])
        return tensor.float().contiguous()

    def layers(self, prefix: str) -> int:
        """The number of blocks by the highest number among them; gaps show as missing tensors."""
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        found = [int(match[1]) for name in self.tensors if (match := pattern.match(name))]
        if not found:
            raise ValueError(f"{self.file} has no transformer blocks {prefix}0.…; {_SUPPORTED}")
        return max(found) + 1

    def refuse_leftovers(self) -> None:
        unknown = sorted(name for name in self.left if not _EXTRAS.fullmatch(name))
        if unknown:
            raise ValueError(
                f"{self.file} has {len(unknown)} tensors that no CLIP of OpenAI's design has, first {unknown[0]} of "
                f"shape {list(self.tensors[unknown[0]].shape)}; leaving them out would change the model. {_SUPPORTED}"
            )


def _brackets(form: tuple[str, ...]) -> str:
    return f"[{', '.join(form)}]"


@dataclass(frozen=True)
class _Tower:
    """One transformer: where its blocks stand in the file, and its sizes."""

    blocks: str
    width: _Size
    hidden: _Size
    layers: int
    heads: int
    eps: float

    @property
    def sizes(self) -> dict[str, _Size]:
        tripled = _Size(3 * self.width.value, self.width.origin)
        return {"width": self.width, "3·width": tripled, "hidden": self.hidden}


@dataclass(frozen=True)
class _Shapes:
    """Everything about the architecture that the shapes tell."""

    text: _Tower
    vision: _Tower
    prefix: str
    """Before the names of the text tower: empty, or `text.` in open_clip's newer files."""
    vocab: int
    context: int
    patch: int
    grid: int
    joint: int
    residual: bool
    """Whether there is Long-CLIP's second positional table."""

    @property
    def image_size(self) -> int:
        return self.grid * self.patch

    def by_open_clips_names(self) -> dict[str, int]:
        return {
            "embed_dim": self.joint,
            "vision_cfg.width": self.vision.width.value,
            "vision_cfg.layers": self.vision.layers,
            "vision_cfg.patch_size": self.patch,
            "vision_cfg.image_size": self.image_size,
            "text_cfg.width": self.text.width.value,
            "text_cfg.layers": self.text.layers,
            "text_cfg.vocab_size": self.vocab,
            "text_cfg.context_length": self.context,
        }

    @classmethod
    def read(cls, source: _Source, settings: OpenClipSettings) -> _Shapes:
        prefix = "text." if "text.token_embedding.weight" in source.tensors else ""
        embedding, conv = f"{prefix}token_embedding.weight", "visual.conv1.weight"
        vocab, text_width = source.shape(embedding, ("vocabulary", "width"))
        context, _ = source.shape(f"{prefix}positional_embedding", ("tokens", "width"))
        _, joint = source.shape(f"{prefix}text_projection", ("width", "joint width"))
        width, channels, patch, other = source.shape(conv, ("width", "3", "patch", "patch"))
        if channels != 3 or patch != other:
            raise ValueError(
                f"{source.file}: {conv} reads {channels} colours in patches of {patch}×{other}, not 3 in square ones"
            )
        rows, _ = source.shape("visual.positional_embedding", ("patches + 1", "width"))
        grid = isqrt(max(rows - 1, 0))
        if grid * grid + 1 != rows or grid == 0:
            raise ValueError(f"{source.file}: visual.positional_embedding has {rows} rows, not a square number and 1")
        shapes = cls(
            text=_read_tower(source, f"{prefix}transformer.resblocks.", _Size(text_width, embedding), settings.text),
            vision=_read_tower(source, "visual.transformer.resblocks.", _Size(width, conv), settings.vision),
            prefix=prefix,
            vocab=vocab,
            context=context,
            patch=patch,
            grid=grid,
            joint=joint,
            residual=f"{prefix}positional_embedding_res" in source.tensors,
        )
        if shapes.residual and context <= KEEP:
            raise ValueError(f"{source.file}: positional_embedding has {context} rows, too few for Long-CLIP's {KEEP}")
        settings.check(source.file, shapes.by_open_clips_names())
        return shapes


def _read_tower(source: _Source, blocks: str, width: _Size, settings: Mapping[str, Any] | None) -> _Tower:
    inner = f"{blocks}0.mlp.c_fc.weight"
    hidden, _ = source.shape(inner, ("hidden", "width"))
    if settings is None and blocks.startswith("visual.") and width.value > _WIDEST_OPENAI:
        raise ValueError(
            f"{source.file} has an image tower {width.value} wide; its heads cannot be told from its shapes. Put the "
            "open_clip_config.json of the model beside it"
        )
    known = settings or {}
    eps = (known.get("norm_kwargs") or {}).get("eps", 1e-5)
    return _Tower(blocks, width, _Size(hidden, inner), source.layers(blocks), _heads(source, width, known), eps)


def _heads(source: _Source, width: _Size, settings: Mapping[str, Any]) -> int:
    """As many as open_clip's settings say, else as many as are 64 wide."""
    if (heads := settings.get("heads")) is not None:
        if width.value % heads:
            raise ValueError(f"{source.file}: {width.origin} is {width.value} wide, which {heads} heads cannot share")
        return heads
    one = settings.get("head_width", _HEAD_WIDTH)
    if width.value % one:
        raise ValueError(f"{source.file}: {width.origin} is {width.value} wide, no multiple of heads {one} wide")
    return width.value // one


def _tower_config(tower: _Tower, joint: int, activation: Activation) -> dict[str, Any]:
    return {
        "hidden_size": tower.width.value,
        "intermediate_size": tower.hidden.value,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "hidden_act": activation,
        "layer_norm_eps": tower.eps,
        "projection_dim": joint,
    }


def _convert(source: _Source, shapes: _Shapes) -> dict[str, Tensor]:
    """The file's tensors under the names, and in the orientation, of `CLIPModel`."""
    text, vision, prefix = shapes.text, shapes.vision, shapes.prefix
    joint = _Size(shapes.joint, f"{prefix}text_projection")
    words = {
        **text.sizes,
        "vocabulary": _Size(shapes.vocab, f"{prefix}token_embedding.weight"),
        "tokens": _Size(shapes.context, f"{prefix}positional_embedding"),
        "joint width": joint,
    }
    pictures = {
        **vision.sizes,
        "3": _Size(3, "visual.conv1.weight"),
        "patch": _Size(shapes.patch, "visual.conv1.weight"),
        "patches + 1": _Size(shapes.grid**2 + 1, "visual.positional_embedding"),
        "joint width": joint,
    }
    state = {
        "text_model.embeddings.token_embedding.weight": source.take(
            f"{prefix}token_embedding.weight", ("vocabulary", "width"), words
        ),
        "text_model.embeddings.position_embedding.weight": _text_positions(source, shapes, words),
        "text_projection.weight": _transposed(source.take(f"{prefix}text_projection", ("width", "joint width"), words)),
        "vision_model.embeddings.class_embedding": source.take("visual.class_embedding", ("width",), pictures),
        "vision_model.embeddings.patch_embedding.weight": source.take(
            "visual.conv1.weight", ("width", "3", "patch", "patch"), pictures
        ),
        "vision_model.embeddings.position_embedding.weight": source.take(
            "visual.positional_embedding", ("patches + 1", "width"), pictures
        ),
        "visual_projection.weight": _transposed(source.take("visual.proj", ("width", "joint width"), pictures)),
        "logit_scale": _logit_scale(source),
    }
    for part in ("weight", "bias"):
        for name, target, sizes in (
            (f"{prefix}ln_final", "text_model.final_layer_norm", words),
            ("visual.ln_pre", "vision_model.pre_layrnorm", pictures),
            ("visual.ln_post", "vision_model.post_layernorm", pictures),
        ):
            state[f"{target}.{part}"] = source.take(f"{name}.{part}", ("width",), sizes)
    return state | _blocks(source, text, "text_model") | _blocks(source, vision, "vision_model")


def _blocks(source: _Source, tower: _Tower, target: str) -> dict[str, Tensor]:
    state = {}
    for layer in range(tower.layers):
        for name, (new, form) in _BLOCK.items():
            tensor = source.take(f"{tower.blocks}{layer}.{name}", form, tower.sizes)
            parts = zip("qkv", tensor.chunk(3)) if "{}" in new else [("", tensor)]
            for part, value in parts:
                state[f"{target}.encoder.layers.{layer}.{new.format(part)}"] = value
    return state


def _transposed(matrix: Tensor) -> Tensor:
    """A right-hand factor as the weight of a linear layer, in memory of its own as optimisers like it."""
    return matrix.T.contiguous()


def _text_positions(source: _Source, shapes: _Shapes, sizes: Mapping[str, _Size]) -> Tensor:
    """The one table that acts: Long-CLIP masks its two so that each position is read from one of them."""
    name = f"{shapes.prefix}positional_embedding"
    table = source.take(name, ("tokens", "width"), sizes)
    if not shapes.residual:
        return table
    residual = source.take(f"{name}_res", ("tokens", "width"), sizes)
    return torch.cat([table[:KEEP], residual[KEEP:]])  # [tokens, width]


def _logit_scale(source: _Source) -> Tensor:
    """A scalar, which some trainers keep as a row of one."""
    form = ("1",) if "logit_scale" in source.tensors and source.tensors["logit_scale"].ndim else ()
    return source.take("logit_scale", form, {"1": _Size(1, "its meaning")}).reshape(())


def _activation(
    checkpoint: Checkpoint, shapes: _Shapes, settings: OpenClipSettings, given: Activation | None
) -> tuple[Activation, str]:
    """The activation, and how to say it: shapes cannot tell, and the wrong one only makes a model worse."""
    if given is not None:
        if given not in _ACTIVATIONS:
            raise ValueError(f"activation must be quick_gelu or gelu, got {given!r}")
        return given, _ACTIVATIONS[given]
    if settings.model is not None:
        said: Activation = "quick_gelu" if settings.model.get("quick_gelu") else "gelu"
        return said, _ACTIVATIONS[said]
    if shapes.residual or "input_resolution" in checkpoint.tensors:
        return "quick_gelu", "QuickGELU"
    run = checkpoint.about.get("name") if "epoch" in checkpoint.about else None  # open_clip's trainer saves both
    if run is not None and re.search("quickgelu|openai", str(run), re.IGNORECASE):
        return "quick_gelu", "QuickGELU by the name of its run"
    if run is not None or shapes.prefix or checkpoint.file.name.startswith("open_clip"):
        raise ValueError(
            f"{checkpoint.file} was trained by open_clip, and nothing says with which activation: pass activation gelu "
            "(open_clip's own trainings, e.g. on LAION) or quick_gelu (from OpenAI's weights, or a model *-quickgelu), "
            "or put its open_clip_config.json beside it"
        )
    return "quick_gelu", "QuickGELU assumed"


def _describe(source: _Source, shapes: _Shapes, settings: OpenClipSettings, activation: str) -> str:
    vision = shapes.vision
    size = _SIZES.get((vision.width.value, vision.layers), f"{vision.layers}×{vision.width.value}")
    if shapes.residual:
        maker = "Long-CLIP"
    elif settings.model is not None or shapes.prefix:
        maker = "open_clip"
    else:
        maker = "CLIP"
    tokens = f"{shapes.context} tokens"
    if shapes.residual:
        rows = f"{shapes.prefix}positional_embedding"
        tokens += f" ({KEEP} rows of {rows}, {shapes.context - KEEP} of {rows}_res)"
    precision = " and ".join(sorted(source.precisions))
    if precision != "fp32":
        precision += " widened to fp32"
    parts = [
        f"{maker} ViT-{size}/{shapes.patch} in OpenAI's layout",
        tokens,
        f"{shapes.image_size} px",
        activation,
        precision,
    ]
    if "logit_bias" in source.left:
        parts.append("without its logit_bias")
    return ", ".join(parts)
