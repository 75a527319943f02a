"""Image processors and tokenizers of transformers: read into the transforms of this package, and written from them.

Also OpenAI's tokenizer from its own vocabulary file, and the small tokenizer of the bundled model.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from hnclip.data.images import ImageTransform
from hnclip.util.files import read_json

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder

logger = logging.getLogger(__name__)

ANY_SIZE = 224  # pixels, if neither the model nor its processor specifies a size
# The PIL image processor of transformers that each family is saved with.
PROCESSORS = {
    "clip": "CLIPImageProcessorPil",
    "siglip": "SiglipImageProcessorPil",
    "siglip2": "Siglip2ImageProcessorPil",
    "vision-text-dual-encoder": "ViTImageProcessorPil",
}
STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
BPE_PACKAGES = ("open_clip", "clip", "longclip", "sam3", "hpsv2")  # packages that contain it
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
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        if (file := directory / name).is_file():
            settings = read_json(file) if key is None else read_json(file).get(key)
            if settings:
                break
    else:
        return default_transform(kind, image_size)
    try:
        return transform_of(_open_processor(directory, settings), settings, image_size)
    except Exception as error:  # transformers raises many types for settings that it cannot use
        raise ValueError(f"{file}: {error}") from error


def default_transform(kind: str, image_size: int | None) -> ImageTransform:
    """The transform of a family without a processor. Two towers have no default."""
    if kind == "vision-text-dual-encoder" or image_size is None:
        raise ValueError(
            "the image preprocessing of the model is unknown: add the image tower's preprocessor_config.json, or pass "
            "an image_transform"
        )
    import transformers

    return transform_of(getattr(transformers, PROCESSORS[kind])(), {}, image_size)


def _open_processor(directory: Path, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor, ViTImageProcessorPil

    with silence_transformers():
        if "DINOv3" in str(settings.get("image_processor_type")):  # its own processor needs torchvision
            return ViTImageProcessorPil(**{key: value for key, value in settings.items() if value is not None})
        return AutoImageProcessor.from_pretrained(directory, local_files_only=True)


def transform_of(processor: Any, settings: Mapping[str, Any], image_size: int | None) -> ImageTransform:
    """The `ImageTransform` that equals an image processor of transformers.

    NaFlex keeps the aspect ratio of an image; here its images become squares of the model's size.

    Args:
        settings: the content of its file; a size that is not specified there is the model's.
        image_size: side of the square images that the model takes; None if it takes any.
    """
    steps = {name for name in settings if name.startswith("do_") and getattr(processor, name, None)}
    if unknown := steps.difference(STEPS):
        raise ValueError(f"{', '.join(sorted(unknown))} is not supported; supported are {', '.join(STEPS)}")
    if not (processor.do_resize and processor.do_rescale):
        raise ValueError("do_resize and do_rescale must be true")
    if not math.isclose(processor.rescale_factor * 255, 1, rel_tol=1e-6):
        raise ValueError(f"rescale_factor must be 1/255, got {processor.rescale_factor}")
    squash, side = _read_size(getattr(processor, "size", None), settings.get("size"), image_size)
    shortest: int | None = None
    if getattr(processor, "do_center_crop", None):
        square, crop = _read_size(processor.crop_size, settings.get("crop_size"), image_size)
        if not square or crop > side:
            raise ValueError(f"crop_size must be a square that is not larger than size {side}, got {crop}")
        shortest, side = side, crop
    elif not squash:
        raise ValueError("images must become square: do_center_crop is false and size keeps the aspect ratio")
    if image_size is not None and side != image_size:
        raise ValueError(f"images of {side} pixels do not fit a model that takes {image_size}")
    normalize = processor.do_normalize
    return ImageTransform(
        side,
        shortest=shortest,
        squash=squash,
        resample=Image.Resampling(processor.resample).name.lower(),  # type: ignore[arg-type]
        mean=_channels(processor.image_mean) if normalize else (0.0, 0.0, 0.0),
        std=_channels(processor.image_std) if normalize else (1.0, 1.0, 1.0),
    )


def _read_size(size: Any, given: Any, default: int | None) -> tuple[bool, int]:
    """Whether the size is that of a square, and its side; `default`, if the file specifies none."""
    sides = (
        {}
        if size is None
        else {
            name: size[name]
            for name in ("height", "width", "shortest_edge", "longest_edge")
            if size.get(name) is not None
        }
    )
    if sides.keys() not in (set(), {"shortest_edge"}, {"height", "width"}) or len(set(sides.values())) > 1:
        raise ValueError(f"a size must be a shortest_edge or equal height and width, got {sides}")
    square = "shortest_edge" not in sides
    if given is None and default is not None:
        return square, default
    return square, next(iter(sides.values()), default or ANY_SIZE)


def _channels(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, [values] * 3 if isinstance(values, int | float) else values)
    return red, green, blue


def image_processor(model: DualEncoder) -> Any:
    """The image processor of transformers that gives a model its pixels."""
    patch = getattr(model.backbone.config.vision_config, "patch_size", 16)  # only SigLIP 2's processor uses it
    return build_processor(model.image_transform, model.family.kind, patch_size=patch)


def build_processor(transform: ImageTransform, kind: str, *, patch_size: int = 16) -> Any:
    """The PIL image processor of transformers that equals a transform; `transform_of` reads it back.

    Args:
        kind: the family of the model.
        patch_size: for "siglip2", whose processor cuts images into patches itself. It keeps the aspect ratio, so only
            square images give the same pixels.
    """
    import transformers

    cropped = not transform.squash or transform.shortest is not None
    shape: dict[str, Any]
    if kind == "siglip2":
        if cropped or transform.size % patch_size:
            raise ValueError(
                f"siglip2 takes squashed, uncropped images of whole {patch_size}-pixel patches: {transform}"
            )
        shape = {"patch_size": patch_size, "max_num_patches": (transform.size // patch_size) ** 2}
    else:
        side = transform.shortest or transform.size
        shape = {
            "size": {"height": side, "width": side} if transform.squash else {"shortest_edge": side},
            "do_center_crop": cropped,
            **({"crop_size": {"height": transform.size, "width": transform.size}} if cropped else {}),
        }
    return getattr(transformers, PROCESSORS[kind])(
        **shape,
        resample=Image.Resampling[transform.resample.upper()],
        image_mean=list(transform.mean),
        image_std=list(transform.std),
        do_convert_rgb=True,
    )


def open_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory, a fast one if possible."""
    from transformers import AutoTokenizer

    # Without its files, transformers would create an empty tokenizer.
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{directory} has no tokenizer.json: texts cannot be tokenised without it")
    with silence_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except ImportError as error:
            raise ValueError(
                f"the tokenizer in {directory} needs another package: {error}; for SigLIP, pip install 'hnclip[siglip]'"
            ) from error
        except Exception as error:  # many types for damaged files
            raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
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
        near: the file or directory of the model.
        vocabulary: symbols that the model embeds; its end token has the highest id.
    """
    if near is not None:
        directory = _directory(near)
        whole, *parts = ((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        if whole or all(parts):
            try:
                return _read_clip_tokenizer(directory, vocabulary)
            except ValueError as error:
                logger.warning("%s; using OpenAI's %s instead", error, BPE_FILE)
    return _clip_tokenizer(_read_merges(find_bpe_file(near)))


def find_bpe_file(near: Path | None = None) -> Path:
    """OpenAI's `bpe_simple_vocab_16e6.txt.gz`: next to the model, or in an installed package, which is not imported.

    Args:
        near: the file or directory of the model; `model/` in it and next to it is searched too, as in Long-CLIP's
            repository.
    """
    if near is not None:
        directory = _directory(near)
        for place in (directory, directory / "model", directory.parent / "model"):
            if (place / BPE_FILE).is_file():
                return place / BPE_FILE
    for package in BPE_PACKAGES:
        for place in _package_directories(package):
            for file in sorted(place.rglob(BPE_FILE)):
                return file
    where = "" if near is None else f"next to {near} or "
    raise ValueError(
        f"OpenAI's vocabulary {BPE_FILE} was not found {where}in the packages {', '.join(BPE_PACKAGES)}: "
        "pip install --no-deps open_clip_torch, or pass the directory of a tokenizer"
    )


def _directory(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _package_directories(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except ValueError:  # a module of this name without a file
        return []
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def _read_clip_tokenizer(directory: Path, vocabulary: int) -> Any:
    from transformers import CLIPTokenizer

    try:
        tokenizer = CLIPTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # damaged files raise many types, including Exception itself
        raise ValueError(f"the tokenizer in {directory} cannot be read: {error}") from error
    # transformers adds the special tokens to any vocabulary, and reads every word as unknown.
    if tokenizer.eos_token_id >= tokenizer.vocab_size or tokenizer.eos_token_id != vocabulary - 1:
        raise ValueError(f"the tokenizer in {directory} does not belong to a CLIP with {vocabulary} symbols")
    return tokenizer


def _read_merges(file: Path) -> list[tuple[str, ...]]:
    try:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as text:
            lines = text.read().split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is damaged ({error}): download it again") from error
    merges = [tuple(line.split()) for line in lines[1 : MERGES + 1]]  # the first line is a version
    pairs = sum(len(merge) == 2 for merge in merges)
    if pairs != MERGES:
        raise ValueError(f"{file} has {pairs:,} merges instead of {MERGES:,}: download it again")
    return merges


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
