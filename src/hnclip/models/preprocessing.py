"""Image processors and tokenizers of transformers: read into the transforms of this package, and written from them.

Also OpenAI's tokenizer from its own vocabulary file, and the small tokenizer of the bundled model.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

from hnclip.data.images import ImageTransform

logger = logging.getLogger(__name__)

_HALF: Any = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# The preprocessing of each family, as in transformers, and the PIL image processor that it is saved with.
DEFAULTS = {
    "clip": ImageTransform(224),
    "siglip": ImageTransform(224, squash=True, **_HALF),
    "siglip2": ImageTransform(256, squash=True, resample="bilinear", **_HALF),
}
PROCESSORS = {
    "clip": "CLIPImageProcessorPil",
    "siglip": "SiglipImageProcessorPil",
    "siglip2": "Siglip2ImageProcessorPil",
    "vision-text-dual-encoder": "ViTImageProcessorPil",
}
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
BPE_PACKAGES = ("open_clip", "clip")  # packages that contain it
MERGES = 48_894  # 49,408 symbols without 2 · 256 bytes and two special tokens; OpenAI reads only these of the file
START, END = "<|startoftext|>", "<|endoftext|>"


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars and load reports of transformers inside the block."""
    from transformers.utils import logging as settings

    bars, verbosity = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.disable_progress_bar()
    settings.set_verbosity_error()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()


def read_image_transform(directory: Path, kind: str, image_size: int | None) -> ImageTransform:
    """The transform of a directory's image processor, or the default of its family if there is none.

    Args:
        kind: the family of the model.
        image_size: side of the images that the model takes; None if it takes any.
    """
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    if not any((directory / f"{name}_config.json").is_file() for name in ("preprocessor", "processor")):
        return default_transform(kind, image_size)
    with silence_transformers():
        try:
            try:
                processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
            except ImportError as error:  # DINOv3's processor needs torchvision; its settings are those of ViT's
                if "DINOv3" not in str(error):
                    raise
                processor = ViTImageProcessorPil.from_pretrained(directory, local_files_only=True)
            return transform_of(processor, image_size)
        except Exception as error:  # transformers raises many types for settings that it cannot use
            raise ValueError(f"the image preprocessing of {directory} cannot be used: {error}") from error


def default_transform(kind: str, image_size: int | None) -> ImageTransform:
    """The transform of a family without a processor. Two towers have no default."""
    if kind not in DEFAULTS or image_size is None:
        raise ValueError(
            "the image preprocessing of the model is unknown: add the image tower's preprocessor_config.json, or pass "
            "an image_transform"
        )
    return replace(DEFAULTS[kind], size=image_size)


def transform_of(processor: Any, image_size: int | None = None) -> ImageTransform:
    """The `ImageTransform` that equals an image processor of transformers.

    NaFlex keeps the aspect ratio of an image; here its images become squares of `image_size`, the model's size.
    """
    steps = {name for name, value in processor.to_dict().items() if name.startswith("do_") and value}
    if unknown := steps.difference(STEPS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not supported; supported are {', '.join(STEPS)}")
    if not {"do_resize", "do_rescale"} <= steps or not math.isclose(processor.rescale_factor * 255, 1, rel_tol=1e-6):
        raise ValueError("images must be resized, and rescaled by 1/255")
    size = {name: side for name, side in dict(getattr(processor, "size", None) or {}).items() if side is not None}
    if not size and image_size is not None:
        size = {"height": image_size, "width": image_size}
    squash, crop = "height" in size, "do_center_crop" in steps
    if size.keys() not in ({"shortest_edge"}, {"height", "width"}) or len(set(size.values())) > 1:
        raise ValueError(f"a size must be a shortest_edge or equal height and width, got {size}")
    if not (squash or crop):
        raise ValueError("images must become square: do_center_crop is false and size keeps the aspect ratio")
    side = next(iter(size.values()))
    if crop and processor.crop_size["height"] != processor.crop_size["width"]:
        raise ValueError(f"crop_size must be a square, got {processor.crop_size}")
    normalize = "do_normalize" in steps
    return ImageTransform(
        processor.crop_size["height"] if crop else side,
        shortest=side if crop else None,
        squash=squash,
        resample=Image.Resampling(processor.resample).name.lower(),  # type: ignore[arg-type]
        mean=_channels(processor.image_mean if normalize else 0.0),
        std=_channels(processor.image_std if normalize else 1.0),
    )


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, [values] * 3 if isinstance(values, int | float) else values)
    return red, green, blue


def image_processor(transform: ImageTransform, config: Any) -> Any:
    """The PIL image processor of transformers that equals a transform; `transform_of` reads it back.

    SigLIP 2's cuts images into patches itself and keeps the aspect ratio, so only square images give the same pixels.

    Args:
        config: the configuration of the backbone.
    """
    import transformers

    cropped = not transform.squash or transform.shortest is not None
    shape: dict[str, Any]
    if config.model_type == "siglip2":
        patch = config.vision_config.patch_size
        if cropped or transform.size % patch:
            raise ValueError(f"SigLIP 2 takes squashed, uncropped images of whole {patch}-pixel patches: {transform}")
        shape = {"patch_size": patch, "max_num_patches": (transform.size // patch) ** 2}
    else:
        side = transform.shortest or transform.size
        shape = {
            "size": {"height": side, "width": side} if transform.squash else {"shortest_edge": side},
            "do_center_crop": cropped,
            **({"crop_size": {"height": transform.size, "width": transform.size}} if cropped else {}),
        }
    return getattr(transformers, PROCESSORS[config.model_type])(
        **shape,
        resample=Image.Resampling[transform.resample.upper()],
        image_mean=list(transform.mean),
        image_std=list(transform.std),
        do_convert_rgb=True,
    )


def open_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory, a fast one if possible."""
    from transformers import AutoTokenizer

    with silence_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # many types for damaged files and missing packages
            raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one without its files
        raise ValueError(f"{directory} has no tokenizer.json: texts cannot be tokenised without it")
    for name in ("is_local", "local_files_only"):  # arguments of this call, which save_pretrained would store
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def openai_tokenizer(near: Path | None = None, vocabulary: int = 49_408) -> Any:
    """The `CLIPTokenizer` of OpenAI's models, fast and with offsets.

    Hugging Face tokenizer files next to the model come first, if they fit it. Otherwise it is built from OpenAI's file
    of merges, which models and packages that need it contain.

    For texts cleaned by `clean_caption`, its ids are OpenAI's except for
    - "<|startoftext|>" and "<|endoftext|>" in a caption: both read them as the special tokens, OpenAI also in capitals,
      but not directly after punctuation. (open_clip calls them <start_of_text> and <end_of_text>.)
    - letters that cleaning leaves decomposed (an entity next to "<", lower case of a capital sigma): composed here;
    - "'ſ", which is "'s" in OpenAI's pattern, and U+0345, which it skips;
    - letters too new for one of the two Unicode tables.

    Args:
        near: the directory of the model.
        vocabulary: symbols that the model embeds; its end token has the highest id.
    """
    if near is not None and any((near / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        from transformers import CLIPTokenizer

        try:
            tokenizer = CLIPTokenizer.from_pretrained(near, local_files_only=True)
            # transformers adds the special tokens to any vocabulary, and reads every word as unknown.
            if tokenizer.vocab_size > tokenizer.eos_token_id == vocabulary - 1:
                return tokenizer
            problem = f"it does not belong to a CLIP with {vocabulary} symbols"
        except Exception as error:  # damaged files raise many types, including Exception itself
            problem = str(error)
        logger.warning("the tokenizer in %s is not used (%s), but OpenAI's %s", near, problem, BPE_FILE)
    with gzip.open(find_bpe_file(near), "rt", encoding="utf-8", newline="\n") as text:
        lines = text.read().split("\n")
    return _clip_tokenizer([tuple(line.split()) for line in lines[1 : MERGES + 1]])  # the first line is a version


def find_bpe_file(near: Path | None = None) -> Path:
    """OpenAI's `bpe_simple_vocab_16e6.txt.gz`: next to the model, or in an installed package, which is not imported.

    Args:
        near: the directory of the model; `model/` in it and next to it is searched too, as in Long-CLIP's repository.
    """
    places = [] if near is None else [near, near / "model", near.parent / "model"]
    for spec in map(find_spec, BPE_PACKAGES):
        places += map(Path, (spec and spec.submodule_search_locations) or ())
    for place in places:
        if (place / BPE_FILE).is_file():
            return place / BPE_FILE
    raise ValueError(
        f"OpenAI's vocabulary {BPE_FILE} was not found: pip install --no-deps open_clip_torch, or pass the directory "
        "of a tokenizer"
    )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A small CLIP tokenizer (lower-case byte-level BPE, OpenAI's rules) trained on `texts`.

    All 256 bytes are in the vocabulary, so it can represent any text.
    """
    from tokenizers import pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    backend = CLIPTokenizer(vocab={START: 0, END: 1}, merges=[]).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    return _clip_tokenizer(merges)


def _clip_tokenizer(merges: list[tuple[str, ...]]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    # OpenAI's order: bytes, bytes at the end of a word, merged symbols, start, end. The order of single symbols in a
    # trainer's own vocabulary differs from process to process.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*alphabet, *(f"{letter}</w>" for letter in alphabet)]
    symbols = dict.fromkeys([*letters, *("".join(pair) for pair in merges), START, END])
    return CLIPTokenizer(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=merges)
