"""Models for programs without torch: both towers as ONNX graphs, compared with torch before the directory appears.

All vectors are L2-normalised, and batches may have any size. The cleaning of captions before they are tokenised
(`hnclip.data.texts.clean_caption`: broken encodings, HTML) is not part of an export; plain text needs none of it.

Layout `onnx`, for any program:
    image.onnx                pixel_values [B, 3, H, W] float32, normalised -> image_embeds [B, D]
    text.onnx                 input_ids [B, T] int64, two towers also attention_mask -> text_embeds [B, D]
    tokenizer.json, …         ids, without padding and truncation
    preprocessor_config.json  images, as transformers reads it
    hnclip.json               context, padding, scale and other settings
  T is any length up to the context; SigLIP was trained on texts padded to the context, so there T is the context.

Layout `immich`, for the photo app of that name, version 3.1 (read at commit b26b0cc8 of immich-app/immich, in
machine-learning/immich_ml/models/: base.py, constants.py, transforms.py, clip/visual.py, clip/textual.py; its own
exports, in immich-app/ml-models at 8897fc0c, are normalised too):
    config.json                     text_cfg.context_length, to which every text is truncated or padded on the right
    visual/model.onnx               image [B, 3, H, W] float32 -> image_embeds [B, D]
    visual/preprocess_cfg.json      size, mean, std, interpolation
    textual/model.onnx              text [B, context] int32, or for two towers input_ids and attention_mask, as its
                                    M-CLIP models -> text_embeds [B, D]
    textual/tokenizer.json          read by `tokenizers` alone, so all cleaning must be in it
    textual/tokenizer_config.json   pad_token, as a string
  immich identifies a model by its name, which determines the inputs of the text tower and the width of the vectors
  (CLIP_MODEL_INFO in server/src/constants.ts); other names are rejected. So a fine-tuned model goes into the model
  cache as `clip/NAME`, where NAME is a model of the same width that immich knows: `immich_name`. Three limits: a
  directory that fails to load is deleted and downloaded again; machines with ARM NN or RKNN look for other formats
  first and download immich's own model over this one, unless MACHINE_LEARNING_ANN or MACHINE_LEARNING_RKNN is false;
  and the shortest side of an image is always resized by bicubic interpolation and the centre cropped, whatever
  preprocess_cfg.json contains.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.core import TextBatch
from hnclip.data.batching import pad_texts
from hnclip.data.texts import TextTransform
from hnclip.models.adapters import merge_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.preprocessing import image_processor, silence_transformers
from hnclip.util.files import read_json, replace_directory
from hnclip.util.optional import import_extra

log = logging.getLogger(__name__)

Layout = Literal["onnx", "immich"]

OPSET = 18  # what torch writes without converting; onnxruntime reads it since 1.14
TOLERANCE = 1e-4  # fp32 on both sides; errors of an export are far larger
LARGEST_GRAPH = 1_500_000_000  # bytes of weights inside a graph file; protobuf is limited to 2 GB
BATCHES = (1, 2, 5)  # batch sizes of the comparison with torch

# Models that immich knows, by the width of their vectors. Only M-CLIP's text towers take an attention mask.
IMMICH_NAMES = {
    512: "ViT-B-16__openai",
    640: "ViT-B-16-plus-240__laion400m_e32",
    768: "ViT-L-14__openai",
    1024: "ViT-H-14__laion2b-s32b-b79k",
    1152: "ViT-SO400M-16-SigLIP2-384__webli",
    1536: "ViT-gopt-16-SigLIP2-384__webli",
}
IMMICH_TWO_TOWERS = {
    512: "XLM-Roberta-Large-Vit-B-32",
    640: "XLM-Roberta-Large-Vit-B-16Plus",
    768: "XLM-Roberta-Large-Vit-L-14",
}


@dataclass(frozen=True)
class ExportCheck:
    """Largest difference between the vectors of onnxruntime and of torch, over several batch sizes and text lengths."""

    image_error: float
    text_error: float


def export_onnx(model: DualEncoder, directory: str | Path, *, layout: Layout = "onnx") -> ExportCheck:
    """Write both towers of a model as ONNX, for programs without torch.

    The directory is written completely or not at all, and replaces one of the same name. The graphs are fp32, made on
    the CPU from a copy with merged adapters; the model itself does not change.

    Args:
        layout: onnx or immich, see the module's docstring for the files.

    Raises:
        ValueError: a tower has no ONNX form or differs from torch by more than `TOLERANCE`, the layout does not support
            this model, or packages are missing.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    _check_packages()
    model.require_trained("an ONNX export")
    name = immich_name(model) if layout == "immich" else None
    interface = _interface(model, layout)
    copied = _cpu_copy(model)
    with replace_directory(Path(directory)) as partial, silence_transformers():
        write_tokenizer(copied.text_transform, partial / interface.tokenizer, require_json=layout == "immich")
        if layout == "immich":
            _write_immich_settings(copied, partial)
        else:
            _write_settings(copied, partial, interface)
        check = ExportCheck(_export_images(copied, interface, partial), _export_texts(copied, interface, partial))
    log.info(f"image tower: differs from torch by at most {check.image_error:.1e}")
    log.info(f"text tower: differs from torch by at most {check.text_error:.1e}")
    if name is not None:
        log.info(
            f"put the directory into immich's model cache as clip/{name}, choose that name in the settings of smart "
            "search, and run smart search for all images"
        )
        image = model.image_transform
        if image.squash or image.resample != "bicubic" or image.shortest not in (None, image.size):
            log.warning(
                f"immich resizes the shortest side to {image.size} (bicubic) and crops the centre; this model was "
                "trained with another preprocessing"
            )
    return check


def export_text_tower(model: DualEncoder, directory: Path) -> dict[str, Any]:
    """Write text.onnx and the tokenizer of layout onnx into an existing directory.

    Returns:
        the names of the inputs, whether texts are padded to the context, and whether on the left.

    Raises:
        ValueError: the tower or its tokenizer cannot be exported, or packages are missing.
    """
    _check_packages()
    interface, copied = _interface(model, "onnx"), _cpu_copy(model)
    with silence_transformers():
        write_tokenizer(copied.text_transform, directory, require_json=True)
        _export_texts(copied, interface, directory)
    return {"inputs": list(interface.text), "fixed": interface.fixed, "left": interface.left}


def immich_name(model: DualEncoder) -> str:
    """The name of a model that immich knows, with vectors of the same width and the same inputs.

    Raises:
        ValueError: there is none.
    """
    kind, names = ("with two towers", IMMICH_TWO_TOWERS) if _has_mask(model) else ("of this kind", IMMICH_NAMES)
    if model.width not in names:
        raise ValueError(
            f"immich loads a model only under a name that it knows, and it knows no model {kind} with vectors of "
            f"{model.width} dimensions, only of {', '.join(map(str, names))}: train a model of such a width, or use "
            "--to onnx in programs other than immich"
        )
    return names[model.width]


# Files and inputs of a layout


@dataclass(frozen=True)
class _Interface:
    image_file: str
    text_file: str
    tokenizer: str  # directory
    image: str  # name of the input
    text: tuple[str, ...]  # names of the inputs: ids, and the mask if there is one
    integer: torch.dtype
    fixed: bool  # every text is padded to the context
    left: bool  # on the left


def _interface(model: DualEncoder, layout: Layout) -> _Interface:
    fixed = model.family.fixed_length
    left = fixed and model.tokenizer.padding_side == "left"
    masked = ("input_ids", "attention_mask")
    if layout == "onnx":
        text = masked if _has_mask(model) else masked[:1]
        return _Interface("image.onnx", "text.onnx", ".", "pixel_values", text, torch.int64, fixed=fixed, left=left)
    if left:
        raise ValueError("immich pads texts on the right, and this model pads them on the left; export with --to onnx")
    text = masked if _has_mask(model) else ("text",)
    files = ("visual/model.onnx", "textual/model.onnx", "textual")
    return _Interface(*files, "image", text, torch.int32, fixed=True, left=False)


def _has_mask(model: DualEncoder) -> bool:
    return model.family.kind == "vision-text-dual-encoder"


def _write_settings(model: DualEncoder, directory: Path, interface: _Interface) -> None:
    image, text = model.image_transform, model.text_transform
    image_processor(image, model.backbone.config).save_pretrained(directory)
    bias = getattr(model.backbone, "logit_bias", None)  # SigLIP's
    settings = {
        "source": model.source,
        "dimension": model.width,
        "scale": model.scale.item(),
        **({} if bias is None else {"bias": bias.item()}),
        "image_size": image.size,
        "mean": image.mean,
        "std": image.std,
        "pixel_values": f"float32 [batch, 3, {image.size}, {image.size}]: (byte / 255 - mean) / std, red green blue",
        "context": text.context,
        "pad": text.pad,
        "padding_side": "left" if interface.left else "right",
        "input_ids": f"int64 [batch, {text.context if interface.fixed else 'length'}]",
    }
    if _has_mask(model):
        settings["attention_mask"] = "int64 [batch, length]: 1 for tokens, 0 for padding"
    _write_json(directory / "hnclip.json", settings)


def _write_immich_settings(model: DualEncoder, directory: Path) -> None:
    image, text = model.image_transform, model.text_transform
    preprocessing = {
        "size": [image.size, image.size],
        "mode": "RGB",
        "mean": image.mean,
        "std": image.std,
        "interpolation": image.resample,
        "resize_mode": "squash" if image.squash else "shortest",
    }
    _write_json(directory / "visual/preprocess_cfg.json", preprocessing)
    config = {
        "embed_dim": model.width,
        "vision_cfg": {"image_size": image.size},
        "text_cfg": {"context_length": text.context, "vocab_size": len(text.tokenizer)},
    }
    _write_json(directory / "config.json", config)


def _write_json(file: Path, settings: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# Tokenizers


def write_tokenizer(transform: TextTransform, directory: Path, *, require_json: bool) -> None:
    """Write the files of a tokenizer, with a tokenizer.json that needs no Python code.

    Raises:
        ValueError: tokenizer.json gives other ids than the tokenizer, or is required and cannot be written.
    """
    from tokenizers import Tokenizer

    transform.tokenizer.save_pretrained(directory)
    file, kind = directory / "tokenizer.json", type(transform.tokenizer).__name__
    if file.is_file():
        fast = Tokenizer.from_file(str(file))
    elif kind == "SiglipTokenizer":
        fast = fast_siglip_tokenizer(directory)
    elif require_json:
        raise ValueError(f"a {kind} cannot be written as tokenizer.json")
    else:
        return
    fast.no_padding()
    fast.no_truncation()
    fast.save(str(file))
    # Capitals, punctuation, spaces and letters that tokenizers treat differently, and a text that is truncated.
    texts = [
        "a dog",
        "A red  Bench, under the tree; it's old.",
        "café (2 m²)\n – 3.5 €",
        "a small " * transform.context,
    ]
    fast.enable_truncation(max_length=transform.context)
    if [fast.encode(text).ids for text in texts] != [list(row) for row in _ids(transform, texts)]:
        raise ValueError(
            f"tokenizer.json gives other ids than this {kind}, which does a part of its work in Python, where other "
            "programs cannot do it"
        )
    file = directory / "tokenizer_config.json"
    pad = transform.tokenizer.convert_ids_to_tokens(transform.pad)
    _write_json(file, {**read_json(file), "model_max_length": transform.context, "pad_token": pad})


def _ids(transform: TextTransform, texts: Sequence[str]) -> Iterator[list[int]]:
    """The ids of texts without cleaning; a long text keeps its first ids and its end."""
    after = transform.edges[1]
    for row in transform.tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]:
        cut = len(row) > transform.context
        yield [*row[: transform.context - after], *row[len(row) - after :]] if cut else row


def fast_siglip_tokenizer(directory: Path) -> Any:
    """A saved `SiglipTokenizer` as one of `tokenizers`: what it cleans in Python becomes a normaliser."""
    from tokenizers import Regex, normalizers
    from transformers import SiglipTokenizer
    from transformers.convert_slow_tokenizer import UdopConverter

    slow = SiglipTokenizer.from_pretrained(directory, local_files_only=True)
    fast = UdopConverter(slow).converted()  # SentencePiece with `</s>` at the end, as SigLIP's
    lower = [normalizers.Lowercase()] if slow.do_lower_case else []
    punctuation = normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), "")  # string.punctuation
    fast.normalizer = normalizers.Sequence([*lower, punctuation, fast.normalizer])
    return fast


# Graphs


class _ImageTower(nn.Module):
    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.encode_pixels(pixels).vectors


class _TextTower(nn.Module):
    """Takes ids that are already padded, as every family of transformers does."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = None if mask is None else mask.long()
        output = self.backbone.get_text_features(input_ids=ids.long(), attention_mask=mask)
        return F.normalize(output.pooler_output, dim=-1)


def _check_packages() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_extra(package, "ONNX exports", "onnx")


def _cpu_copy(model: DualEncoder) -> DualEncoder:
    """A copy on the CPU in fp32 with merged adapters, for inference."""
    copied = copy.deepcopy(model).to("cpu", torch.float32)
    if copied.has_adapters:
        merge_adapters(copied)
    return copied.requires_grad_(False).eval()


@torch.no_grad()
def _export_images(model: DualEncoder, interface: _Interface, directory: Path) -> float:
    generator, size = torch.Generator().manual_seed(0), model.image_size
    batches = [torch.randn(batch, 3, size, size, generator=generator) for batch in BATCHES]
    vectors = [model.encode_pixels(pixels).vectors for pixels in batches]  # [B, D]
    if model.family.kind == "siglip2":
        # SigLIP 2 resizes its position embeddings for every image, in a loop that a graph cannot contain. All images
        # have the size of the table here, so resizing changes nothing.
        embeddings = model.backbone.vision_model.embeddings
        embeddings.resize_positional_embeddings = lambda table, *args, **kwargs: table.flatten(0, 1)[None]  # [1, P, W]
    feeds, file = [{interface.image: pixels} for pixels in batches], directory / interface.image_file
    write_graph("image", _ImageTower(model), feeds[-1], file)
    return compare("image", file, feeds, vectors)


@torch.no_grad()
def _export_texts(model: DualEncoder, interface: _Interface, directory: Path) -> float:
    batches = _sample_texts(model.text_transform)
    vectors = [model.encode_texts(batch).vectors for batch in batches]  # [B, D]
    feeds = [_text_feed(model.text_transform, batch, interface) for batch in batches]
    file, length = directory / interface.text_file, None if interface.fixed else model.context
    write_graph("text", _TextTower(model.backbone), feeds[-1], file, length=length)
    return compare("text", file, feeds, vectors)


def _sample_texts(transform: TextTransform) -> list[TextBatch]:
    """Random tokens, which fit any tokenizer; the last batch has texts of one token up to the full context."""
    generator = torch.Generator().manual_seed(0)
    tokenizer, (before, after) = transform.tokenizer, transform.edges
    whole = tokenizer("a photo", truncation=False, padding=False)["input_ids"]
    start, end = whole[:before], whole[len(whole) - after :]
    words = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    shortest = before + after + 1
    batches = []
    for batch, longest in zip(BATCHES, (shortest, (shortest + transform.context) // 2, transform.context)):
        lengths = np.linspace(shortest, longest, batch).round().astype(int)
        drawn = [words[torch.randint(len(words), (n - before - after,), generator=generator)] for n in lengths]
        batches.append(pad_texts([[*start, *row.tolist(), *end] for row in drawn], transform.pad))
    return batches


def _text_feed(transform: TextTransform, texts: TextBatch, interface: _Interface) -> dict[str, Tensor]:
    """The inputs of a text tower by name: ids, and the mask if it takes one."""
    ids = texts.ids  # [B, T]
    if interface.fixed:
        ids = F.pad(ids, (0, transform.context - ids.shape[1]), value=transform.pad)  # [B, C]
    if interface.left:
        ids = torch.stack([row.roll(len(row) - int(length)) for row, length in zip(ids, texts.lengths)])
    mask = torch.arange(ids.shape[1])[None] < texts.lengths[:, None]  # [B, T]
    return {name: tensor.to(interface.integer) for name, tensor in zip(interface.text, (ids, mask))}


def write_graph(
    which: str, tower: nn.Module, feed: dict[str, Tensor], file: Path, *, length: int | None = None
) -> None:
    """Write one tower as a graph. Weights beyond `LARGEST_GRAPH` bytes go into a second file, with the suffix `.data`.

    Args:
        which: image or text.
        feed: example inputs by name, with a batch size above one.
        length: the longest text, if the second dimension may vary.
    """
    dynamic = {0: torch.export.Dim("batch")}
    if length is not None:
        dynamic[1] = torch.export.Dim("length", max=length)
    arguments, shapes = tuple(feed.values()), tuple(dynamic for _ in feed)
    with _silence_exporter(), torch.no_grad():
        try:
            # In two steps: `torch.onnx.export` alone replaces a batch size that cannot vary by a fixed one.
            program = torch.export.export(tower, arguments, dynamic_shapes=shapes, strict=False)
            graph: Any = torch.onnx.export(
                program,
                arguments,
                dynamo=True,
                input_names=list(feed),
                output_names=[f"{which}_embeds"],
                dynamic_shapes=shapes,  # for their names
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:  # both steps raise many types
            reason = str(error).partition("\n")[0]
            raise ValueError(f"the {which} tower cannot be written as ONNX: {reason}") from error
    _remove_metadata(graph.model)
    weights = sum(value.const_value.nbytes for value in graph.model.graph.initializers.values())
    file.parent.mkdir(exist_ok=True)
    graph.save(file, external_data=weights > LARGEST_GRAPH)


def _remove_metadata(model: Any) -> None:
    """The exporter's notes contain stack traces with the paths of this machine."""
    from onnx_ir import traversal

    parts = [model, *model.graph.initializers.values()]
    for graph in (model.graph, *model.functions.values()):
        nodes = list(traversal.RecursiveGraphIterator(graph))
        parts += [graph, *nodes, *graph.inputs, *graph.outputs, *(value for node in nodes for value in node.outputs)]
    for part in parts:
        part.metadata_props.clear()
        part.doc_string = None


def compare(which: str, file: Path, feeds: Sequence[dict[str, Tensor]], expected: Sequence[Tensor]) -> float:
    """The largest difference between the vectors of a graph and those of torch.

    Raises:
        ValueError: it exceeds `TOLERANCE` or is NaN.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    differences = []
    for feed, vectors in zip(feeds, expected):
        found = session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})[0]
        differences.append(np.abs(found - vectors.numpy()).max())
    largest = float(np.max(differences))
    if not largest <= TOLERANCE:  # includes NaN
        raise ValueError(f"the {which} tower as ONNX differs from torch by {largest:.1e}, more than {TOLERANCE:.0e}")
    return largest


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """No warnings of torch's exporter: the comparison with torch finds what it could not do."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
