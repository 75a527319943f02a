"""Models as ONNX graphs, one per tower, each checked against torch before anything appears on disk.

Both layouts give L2-normalised vectors and take batches of any size. What hnclip does to captions before they reach
the tokenizer (`hnclip.data.texts.clean_caption`: broken encodings, HTML) is no part of them; plain text needs none.

`onnx`, for any program:
    image.onnx                pixel_values [B, 3, H, W] float32, colours normalised -> image_embeds [B, D]
    text.onnx                 input_ids [B, T] int64, two towers also attention_mask -> text_embeds [B, D]
    tokenizer.json, …         ids, without padding and truncation
    preprocessor_config.json  pictures, as transformers reads it
    hnclip.json               context, padding, scale and the rest in a few lines
  T is any length up to the context; SigLIP was trained on texts padded to the context, so there T is the context.

`immich`, for the photo app of that name, version 3.1 (read at commit b26b0cc8 of immich-app/immich, in
machine-learning/immich_ml/models/: base.py, constants.py, transforms.py, clip/visual.py, clip/textual.py; its own
exports, in immich-app/ml-models at 8897fc0c, are normalised too):
    config.json                     text_cfg.context_length, to which every text is cut or padded on the right
    visual/model.onnx               image [B, 3, H, W] float32 -> image_embeds [B, D]
    visual/preprocess_cfg.json      size, mean, std, interpolation
    textual/model.onnx              text [B, context] int32, or for two towers input_ids and attention_mask, as its
                                    M-CLIP models -> text_embeds [B, D]
    textual/tokenizer.json          read by `tokenizers` alone, so all cleaning must be in it
    textual/tokenizer_config.json   pad_token, as a string
  immich knows its models by name, and the name alone says which inputs the text tower has and how wide the vectors
  are (CLIP_MODEL_INFO in server/src/constants.ts). So a model of one's own goes into the cache of models as
  `clip/NAME`, where NAME is a model that immich knows, of the same width; `export_onnx` reports one that fits. Three
  things to know there: a directory that fails to load is deleted and fetched anew; machines with ARM NN or RKNN look
  for other formats first and fetch immich's own model over this one, unless MACHINE_LEARNING_ANN or
  MACHINE_LEARNING_RKNN is false; and pictures always have their shortest side resized by bicubic interpolation and
  their centre cut out, whatever preprocess_cfg.json says.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hnclip.data.batches import TextBatch, pad_texts
from hnclip.data.texts import TextTransform
from hnclip.files import read_settings, replace_directory
from hnclip.models.adapters import has_adapters, merge_adapters
from hnclip.models.dual_encoder import DualEncoder
from hnclip.models.huggingface import quietly
from hnclip.models.processors import build_processor

Layout = Literal["onnx", "immich"]

OPSET = 18  # what torch writes without converting; onnxruntime reads it since 1.14
TOLERANCE = 1e-4  # fp32 on both sides; what is wrong differs by far more
LARGEST_FILE = 1_500_000_000  # bytes of weights in the graph itself; protobuf ends at 2 GB, the rest needs room
BATCHES = (1, 2, 5)
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

# Names immich knows, by the width of their vectors. Only its M-CLIP models give the text tower an attention mask.
_IMMICH_NAMES = {
    512: "ViT-B-16__openai",
    640: "ViT-B-16-plus-240__laion400m_e32",
    768: "ViT-L-14__openai",
    1024: "ViT-H-14__laion2b-s32b-b79k",
    1152: "ViT-SO400M-16-SigLIP2-384__webli",
    1536: "ViT-gopt-16-SigLIP2-384__webli",
}
_IMMICH_TWO_TOWERS = {
    512: "XLM-Roberta-Large-Vit-B-32",
    640: "XLM-Roberta-Large-Vit-B-16Plus",
    768: "XLM-Roberta-Large-Vit-L-14",
}
# Capitals, marks, spaces and letters that tokenizers treat differently.
_SENTENCES = ("a dog", "A red  Bench, under the tree; it's old.", "café (2 m²)\n – 3.5 €")


@dataclass(frozen=True)
class ExportCheck:
    """The largest difference between the normalised vectors of onnxruntime and of torch, over batches of several
    sizes and captions of several lengths."""

    image_error: float
    text_error: float


@dataclass(frozen=True)
class _Contract:
    """Where a layout keeps the graphs of a model, and what their inputs are."""

    image_file: str
    text_file: str
    image: str
    text: tuple[str, ...]  # the ids, and the mask where there is one
    integer: torch.dtype
    fixed: bool  # every text is padded to the context
    left: bool  # on its left side


def export_onnx(
    model: DualEncoder,
    directory: str | Path,
    *,
    layout: Layout = "onnx",
    report: Callable[[str], None] = lambda line: None,
) -> ExportCheck:
    """Write both towers of a model as ONNX, for programs without torch.

    The directory appears whole or not at all, and replaces one of the same name. The graphs are fp32, made on the CPU
    from a copy with its adapters merged: the model itself stays as it is.

    Args:
        layout: onnx, or immich; see above for the files.
        report: takes lines for people: what was measured, and what to do with the directory.

    Raises:
        ValueError: a tower has no ONNX form or differs from torch by more than `TOLERANCE`, the layout cannot hold
            this model, or packages are missing.
    """
    if layout not in get_args(Layout):
        raise ValueError(f"layout must be one of {', '.join(get_args(Layout))}, got {layout!r}")
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ValueError(f"ONNX export needs the package {package}: pip install 'hnclip[onnx]'")
    contract = _contract(model, layout)
    twin = _twin(model)
    pictures, texts = _sample_pictures(twin), _sample_texts(twin.text_transform)
    with torch.no_grad():
        image_vectors = [twin.encode_pixels(batch).vectors for batch in pictures]  # [B, D]
        text_vectors = [twin.encode_texts(batch).vectors for batch in texts]  # [B, D]
    dimension = image_vectors[0].shape[1]
    image_feeds = [{contract.image: batch} for batch in pictures]
    text_feeds = [_text_feed(twin.text_transform, batch, contract) for batch in texts]
    if model.family.kind == "siglip2":
        _fix_picture_size(twin.backbone)

    with replace_directory(Path(directory)) as partial, quietly():
        if layout == "immich":
            _write_immich_settings(twin, partial, dimension)
        else:
            _write_settings(twin, partial, contract, dimension)
        file = partial / contract.image_file
        _write_graph("image", _ImageTower(twin), image_feeds[-1], file)
        image_error = _compare("image", file, image_feeds, image_vectors)
        report(f"image tower: differs from torch by at most {image_error:.1e}")

        file = partial / contract.text_file
        length = None if contract.fixed else twin.context
        _write_graph("text", _TextTower(twin.backbone), text_feeds[-1], file, length=length)
        text_error = _compare("text", file, text_feeds, text_vectors)
        report(f"text tower: differs from torch by at most {text_error:.1e}")
    if layout == "immich":
        for line in _immich_advice(model, dimension):
            report(line)
    return ExportCheck(image_error, text_error)


class _ImageTower(nn.Module):
    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.encode_pixels(pixels).vectors


class _TextTower(nn.Module):
    """Ids that are padded already, as every family of transformers takes them."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = None if mask is None else mask.long()
        output = self.backbone.get_text_features(input_ids=ids.long(), attention_mask=mask)
        return F.normalize(output.pooler_output, dim=-1)


def _contract(model: DualEncoder, layout: Layout) -> _Contract:
    siglip = model.family.kind in ("siglip", "siglip2")
    left = siglip and model.tokenizer.padding_side == "left"
    masked = ("input_ids", "attention_mask")
    if layout == "onnx":
        text = masked if _is_two_towers(model) else masked[:1]
        return _Contract("image.onnx", "text.onnx", "pixel_values", text, torch.int64, fixed=siglip, left=left)
    if left:
        raise ValueError("this model pads its texts on the left, immich always on the right: it would misread them")
    text = masked if _is_two_towers(model) else ("text",)
    visual, textual = "visual/model.onnx", "textual/model.onnx"
    return _Contract(visual, textual, "image", text, torch.int32, fixed=True, left=False)


def _is_two_towers(model: DualEncoder) -> bool:
    return model.family.kind == "vision-text-dual-encoder"


def _twin(model: DualEncoder) -> DualEncoder:
    """A copy on the CPU in fp32, ready for inference; only the tokenizer is shared."""
    memo: dict[int, Any] = {id(model.text_transform): model.text_transform}
    for weight in model.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to("cpu", torch.float32, copy=True), requires_grad=False)
    for buffer in model.buffers():
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        memo[id(buffer)] = buffer.detach().to("cpu", dtype, copy=True)
    twin = copy.deepcopy(model, memo)
    if has_adapters(twin):
        merge_adapters(twin)
    return twin.requires_grad_(False).eval()


def _fix_picture_size(backbone: Any) -> None:
    """SigLIP 2 resizes its table of positions for every picture, in a loop that no graph can hold. All pictures are of
    the table's own size here, so resizing changes nothing and is left out."""
    embeddings = backbone.vision_model.embeddings
    embeddings.resize_positional_embeddings = lambda table, *args, **kwargs: table.flatten(0, 1)[None]  # [1, P, W]


def _sample_pictures(model: DualEncoder) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = model.image_size
    return [torch.randn(batch, 3, size, size, generator=generator) for batch in BATCHES]


def _sample_texts(transform: TextTransform) -> list[TextBatch]:
    """Captions of random words, so that any tokenizer will do; the last batch reaches from one word to the context."""
    generator = torch.Generator().manual_seed(0)
    tokenizer, (before, after) = transform.tokenizer, transform.edges
    whole = tokenizer("a photo", truncation=False, padding=False)["input_ids"]
    start, end = whole[:before], whole[len(whole) - after :]
    words = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    least = before + after + 1
    widths = (least, (least + transform.context) // 2, transform.context)
    batches = []
    for batch, width in zip(BATCHES, widths):
        lengths = np.linspace(least, width, batch).round().astype(int)
        drawn = [words[torch.randint(len(words), (n - before - after,), generator=generator)] for n in lengths]
        batches.append(pad_texts([[*start, *row.tolist(), *end] for row in drawn], transform.pad))
    return batches


def _text_feed(transform: TextTransform, texts: TextBatch, contract: _Contract) -> dict[str, Tensor]:
    """The inputs of a text tower, named: ids and, where it has one, the mask of what is not padding."""
    ids = texts.ids  # [B, T]
    if contract.fixed:
        ids = F.pad(ids, (0, transform.context - ids.shape[1]), value=transform.pad)  # [B, C]
    if contract.left:
        ids = torch.stack([row.roll(len(row) - int(length)) for row, length in zip(ids, texts.lengths)])
    mask = torch.arange(ids.shape[1])[None] < texts.lengths[:, None]  # [B, T]
    return {name: tensor.to(contract.integer) for name, tensor in zip(contract.text, (ids, mask))}


def _write_graph(
    which: str, tower: nn.Module, feed: dict[str, Tensor], file: Path, *, length: int | None = None
) -> None:
    """One tower as a graph. Weights beyond `LARGEST_FILE` go into a file beside it, with `.data` after its name.

    Args:
        which: image or text.
        feed: example inputs by name, a batch of more than one.
        length: the longest text, where the second dimension may change.
    """
    dynamic = {0: torch.export.Dim("batch")}
    if length is not None:
        dynamic[1] = torch.export.Dim("length", max=length)
    arguments, shapes = tuple(feed.values()), tuple(dynamic for _ in feed)
    with _silence(), torch.no_grad():
        try:
            # In two steps: `torch.onnx.export` alone would answer a batch that cannot change with a fixed one.
            program = _trace(tower, arguments, shapes)
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
        _strip(graph.model)
        weights = sum(value.const_value.nbytes for value in graph.model.graph.initializers.values())
        file.parent.mkdir(exist_ok=True)
        graph.save(file, external_data=weights > LARGEST_FILE)


def _trace(tower: nn.Module, arguments: tuple[Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(tower, arguments, dynamic_shapes=shapes, strict=False)
    except Exception:  # slower, but it follows Python that the other takes for constant, such as len() of a batch
        return torch.export.export(tower, arguments, dynamic_shapes=shapes, strict=True)


def _strip(model: Any) -> None:
    """Without the notes of the exporter: they hold the traces, paths and all, of the machine it ran on."""
    from onnx_ir import traversal

    for part in (model, model.graph, *model.functions.values()):
        part.metadata_props.clear()
        part.doc_string = None
    for graph in (model.graph, *model.functions.values()):
        values = [*graph.inputs, *graph.outputs]
        for node in traversal.RecursiveGraphIterator(graph):
            node.metadata_props.clear()
            node.doc_string = None
            values += node.outputs
        for value in values:
            value.metadata_props.clear()
            value.doc_string = None
    for value in model.graph.initializers.values():
        value.metadata_props.clear()


def _compare(which: str, file: Path, feeds: Sequence[dict[str, Tensor]], expected: Sequence[Tensor]) -> float:
    """The largest difference between what the file computes and what torch has computed; an error if it is large."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    differences = []
    for feed, vectors in zip(feeds, expected):
        found = session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})[0]
        differences.append(np.abs(found - vectors.numpy()).max())
    largest = float(np.max(differences))
    if not largest <= TOLERANCE:  # not a number is no match either
        raise ValueError(
            f"the {which} tower as ONNX differs from torch by {largest:.1e}, more than {TOLERANCE:.0e}; nothing was "
            "written"
        )
    return largest


def _write_settings(model: DualEncoder, directory: Path, contract: _Contract, dimension: int) -> None:
    """Everything of the plain layout but its graphs."""
    _write_tokenizer(model.text_transform, directory)
    image, text = model.image_transform, model.text_transform
    patch = getattr(model.backbone.config.vision_config, "patch_size", 16)  # only SigLIP 2's processor asks
    build_processor(image, model.family.kind, patch_size=patch).save_pretrained(directory)
    bias = getattr(model.backbone, "logit_bias", None)  # SigLIP's
    about = {
        "source": model.source,
        "dimension": dimension,
        "scale": model.scale.item(),
        **({} if bias is None else {"bias": bias.item()}),
        "image_size": image.size,
        "mean": image.mean,
        "std": image.std,
        "pixel_values": f"float32 [batch, 3, {image.size}, {image.size}]: (byte / 255 - mean) / std, red green blue",
        "context": text.context,
        "pad": text.pad,
        "padding_side": "left" if contract.left else "right",
        "input_ids": f"int64 [batch, {text.context if contract.fixed else 'length'}]",
    }
    if _is_two_towers(model):
        about["attention_mask"] = "int64 [batch, length]: 1 for tokens, 0 for padding"
    _write_json(directory / "hnclip.json", about)


def _write_immich_settings(model: DualEncoder, directory: Path, dimension: int) -> None:
    """Everything of immich's layout but its graphs."""
    _write_tokenizer(model.text_transform, directory / "textual")
    if not (directory / "textual/tokenizer.json").is_file():
        kind = type(model.tokenizer).__name__
        raise ValueError(f"immich reads tokenizer.json, and a {kind} cannot be written as one")
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
        "embed_dim": dimension,
        "vision_cfg": {"image_size": image.size},
        "text_cfg": {"context_length": text.context, "vocab_size": len(text.tokenizer)},
    }
    _write_json(directory / "config.json", config)


def _write_tokenizer(transform: TextTransform, directory: Path) -> None:
    """The tokenizer's files. SigLIP's, which is Python around SentencePiece, is written as tokenizer.json too."""
    from tokenizers import Tokenizer

    transform.tokenizer.save_pretrained(directory)
    file = directory / "tokenizer.json"
    if file.is_file():
        fast = Tokenizer.from_file(str(file))
    elif type(transform.tokenizer).__name__ == "SiglipTokenizer":
        fast = _fast_siglip_tokenizer(directory)
    else:
        return
    fast.no_padding()
    fast.no_truncation()
    fast.save(str(file))
    _check_tokenizer(fast, transform)
    file = directory / "tokenizer_config.json"
    pad = transform.tokenizer.convert_ids_to_tokens(transform.pad)
    _write_json(file, {**read_settings(file), "model_max_length": transform.context, "pad_token": pad})


def _fast_siglip_tokenizer(directory: Path) -> Any:
    """A saved `SiglipTokenizer` as one of `tokenizers`: the cleaning that it does in Python becomes a normaliser."""
    from tokenizers import Regex, normalizers
    from transformers import SiglipTokenizer
    from transformers.convert_slow_tokenizer import UdopConverter

    slow = SiglipTokenizer.from_pretrained(directory, local_files_only=True)
    fast = UdopConverter(slow).converted()  # SentencePiece with `</s>` at the end, as SigLIP's
    fast.normalizer = normalizers.Sequence(
        [
            *([normalizers.Lowercase()] if slow.do_lower_case else []),
            normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), ""),  # string.punctuation
            fast.normalizer,
        ]
    )
    return fast


def _check_tokenizer(fast: Any, transform: TextTransform) -> None:
    """tokenizer.json must say what the model's own tokenizer says, also where it cuts a text."""
    sentences = [*_SENTENCES, "a small house and " * transform.context]
    rows = transform.tokenizer(sentences, truncation=False, padding=False, verbose=False)["input_ids"]
    fast.enable_truncation(max_length=transform.context)
    after = transform.edges[1]
    for sentence, row in zip(sentences, rows):
        cut = row if len(row) <= transform.context else [*row[: transform.context - after], *row[len(row) - after :]]
        if fast.encode(sentence).ids != cut:
            kind = type(transform.tokenizer).__name__
            raise ValueError(
                f"tokenizer.json reads {sentence[:40]!r} otherwise than the {kind} of this model: part of its work is "
                "done in Python, where other programs do not see it"
            )


def _immich_advice(model: DualEncoder, dimension: int) -> Iterator[str]:
    """What to do with the directory, and where immich will treat pictures otherwise than here."""
    known = _IMMICH_TWO_TOWERS if _is_two_towers(model) else _IMMICH_NAMES
    if dimension in known:
        yield (
            f"immich takes names it knows only: put the directory into its cache of models as clip/{known[dimension]}, "
            "choose that name in the settings of smart search, and run that job for all pictures"
        )
    else:
        widths = ", ".join(str(width) for width in known)
        yield f"immich has no name for vectors of {dimension} numbers: its server stores those of {widths}"
    image = model.image_transform
    if image.squash or image.resample != "bicubic" or image.shortest not in (None, image.size):
        yield (
            f"immich resizes the shortest side to {image.size} (bicubic) and cuts out the centre; this model was made "
            "for pictures prepared otherwise"
        )


def _write_json(file: Path, settings: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _silence() -> Iterator[None]:
    """No warnings and log lines from torch's exporter: what it could not do, the comparison with torch finds."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
