"""Picture settings as Hugging Face directories keep them: read into an `ImageTransform`, and written from one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from PIL import Image

from hnclip.data.images import OPENAI_MEAN, OPENAI_STD, ImageTransform, Resample

_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Habits(NamedTuple):
    """What an image processor of transformers does where its settings say nothing."""

    squash: bool
    crop: bool
    resample: Resample
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


# By the name in image_processor_type, without its ending.
_HABITS = {
    "CLIP": _Habits(False, True, "bicubic", OPENAI_MEAN, OPENAI_STD),
    "ChineseCLIP": _Habits(False, True, "bicubic", OPENAI_MEAN, OPENAI_STD),
    "Siglip": _Habits(True, False, "bicubic", _HALF, _HALF),
    "Siglip2": _Habits(True, False, "bilinear", _HALF, _HALF),
    "ViT": _Habits(True, False, "bilinear", _HALF, _HALF),
    "DeiT": _Habits(True, True, "bicubic", _HALF, _HALF),
    "Bit": _Habits(False, True, "bicubic", OPENAI_MEAN, OPENAI_STD),
    "Blip": _Habits(True, False, "bicubic", OPENAI_MEAN, OPENAI_STD),
    "DINOv3ViT": _Habits(True, False, "bilinear", _IMAGENET_MEAN, _IMAGENET_STD),
}
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb")

# Which of transformers' processors a family of models is saved with.
_PROCESSORS = {
    "clip": "CLIPImageProcessorPil",
    "siglip": "SiglipImageProcessorPil",
    "siglip2": "Siglip2ImageProcessorPil",
    "vision-text-dual-encoder": "ViTImageProcessorPil",
}


def read_processor(settings: Mapping[str, Any], *, model_image_size: int) -> ImageTransform:
    """The transform that a `preprocessor_config.json` means, or the `image_processor` of a `processor_config.json`.

    Understood are the processors of CLIP, Chinese-CLIP, SigLIP, SigLIP 2, ViT, DeiT, BiT (which DINOv2 uses), BLIP and
    DINOv3, also under their older names. What is not said, or null, is what the named processor does by itself, and a
    side that is not said is the model's. NaFlex keeps a picture's shape by changing the number of patches; here its
    pictures become squares of the model's size.

    Args:
        settings: the content of the file.
        model_image_size: side of the square that the model takes.

    Raises:
        ValueError: names the setting that is unknown, contradictory or not supported.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    habits = _habits(given)
    if unknown := [key for key in given if key.startswith("do_") and given[key] and key not in _STEPS]:
        raise ValueError(f"{unknown[0]} is not supported; a picture may only pass {', '.join(_STEPS)}")
    if not given.get("do_resize", True):
        raise ValueError(f"do_resize must be true: every picture has to become {model_image_size} pixels wide and high")
    if not given.get("do_rescale", True) or not _is_inverse_of_255(given.get("rescale_factor", 1 / 255)):
        raise ValueError(
            f"do_rescale must be true and rescale_factor 1/255, as pixels come to the model between 0 and 1; got "
            f"{given.get('do_rescale', True)} and {given.get('rescale_factor', 1 / 255)}"
        )
    squash, shortest, size = _geometry(given, habits, model_image_size)
    if size != model_image_size:
        raise ValueError(
            f"{'size' if shortest is None else 'crop_size'} makes pictures of {size} pixels, the model takes "
            f"{model_image_size}: change the one that is wrong"
        )
    normalize = given.get("do_normalize", True)
    return ImageTransform(
        size,
        shortest=shortest,
        squash=squash,
        resample=_resample(given["resample"]) if "resample" in given else habits.resample,
        mean=_colours("image_mean", given.get("image_mean", habits.mean)) if normalize else (0.0, 0.0, 0.0),
        std=_colours("image_std", given.get("image_std", habits.std)) if normalize else (1.0, 1.0, 1.0),
    )


def default_transform(kind: str, size: int | None) -> ImageTransform:
    """The transform of a family whose directory says nothing of pictures; two towers can be anything and must say."""
    names = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}
    if kind not in names or size is None:
        raise ValueError(
            "how its pictures are prepared is not known: add the picture tower's preprocessor_config.json, or give an "
            "image_transform"
        )
    return read_processor({"image_processor_type": f"{names[kind]}ImageProcessor"}, model_image_size=size)


def processor_size(settings: Mapping[str, Any]) -> int | None:
    """Side of the pictures that these settings make, for a model that takes any; None if they do not say."""
    crop = settings.get("crop_size") if settings.get("do_center_crop", True) else None
    size = crop or settings.get("size")
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    return size if isinstance(size, int) else None


def _habits(given: Mapping[str, Any]) -> _Habits:
    name = given.get("image_processor_type", given.get("feature_extractor_type"))
    if name is None:
        # Before they gave their names, CLIP's processors wrote down their crop, and ViT's had none to write.
        return _HABITS["ViT" if "size" in given and not {"do_center_crop", "crop_size"} & given.keys() else "CLIP"]
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    if kind not in _HABITS:
        supported = ", ".join(f"{known}ImageProcessor" for known in _HABITS)
        raise ValueError(f"image_processor_type {name!r} is not supported; supported are {supported}")
    return _HABITS[kind]


def _geometry(given: Mapping[str, Any], habits: _Habits, model_image_size: int) -> tuple[bool, int | None, int]:
    """Whether to squash, the shortest side before a crop (None for no crop), and the side that comes out."""
    squash, side = _read_size("size", given.get("size", model_image_size), habits.squash)
    if not given.get("do_center_crop", habits.crop):
        if not squash:
            raise ValueError(
                f"do_center_crop is false and size {given.get('size')} keeps a picture's shape: the model takes "
                "squares, so crop, or give size an equal height and width"
            )
        return squash, None, side
    square, crop = _read_size("crop_size", given.get("crop_size", model_image_size), True)
    if not square:
        raise ValueError(f"crop_size must be one number, or equal height and width, got {given['crop_size']}")
    if crop > side:
        raise ValueError(f"crop_size {crop} is larger than size {side}: padding is not supported, make it smaller")
    return squash, side, crop


def _read_size(key: str, size: Any, square: bool) -> tuple[bool, int]:
    """Whether a size is that of a square, and its side. A number alone is one if `square`, else the shortest side."""
    if isinstance(size, (list, tuple)) and len(size) == 2:
        size = {"height": size[0], "width": size[1]}
    if not isinstance(size, Mapping):
        size = {"height": size, "width": size} if square else {"shortest_edge": size}
    sides = {edge: side for edge, side in size.items() if side is not None}
    first, *others = sides.values() or [None]
    if sides.keys() not in ({"shortest_edge"}, {"height", "width"}) or others not in ([], [first]):
        raise ValueError(f"{key} must be a number, shortest_edge, or equal height and width; got {size}")
    if not isinstance(first, int) or first < 1:
        raise ValueError(f"{key} must be a whole number of pixels, got {first!r}")
    return "height" in sides, first


def _is_inverse_of_255(factor: Any) -> bool:
    return isinstance(factor, (int, float)) and math.isclose(factor * 255, 1, rel_tol=1e-6)


def _resample(number: Any) -> Resample:
    for name in get_args(Resample):
        if number == Image.Resampling[name.upper()]:
            return name
    numbers = ", ".join(f"{Image.Resampling[name.upper()].value} ({name})" for name in get_args(Resample))
    raise ValueError(f"resample must be one of Pillow's filters {numbers}, got {number!r}")


def _colours(key: str, values: Any) -> tuple[float, float, float]:
    values = [values] * 3 if isinstance(values, (int, float)) else values
    try:
        red, green, blue = map(float, values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key} must hold a number for each of the 3 colours, got {values}") from error
    return red, green, blue


def build_processor(transform: ImageTransform, kind: str, *, patch_size: int = 16) -> Any:
    """The image processor of transformers that gives a model of this kind the same pictures, without torchvision.

    `read_processor` reads back what its `save_pretrained` writes.

    Args:
        kind: the model's family: "clip", "siglip", "siglip2" or "vision-text-dual-encoder".
        patch_size: side of a patch; only for "siglip2", whose processor cuts pictures into patches itself. It keeps
            their shape, so only square pictures are the same there.
    """
    import transformers

    if kind not in _PROCESSORS:
        raise ValueError(f"kind must be one of {', '.join(_PROCESSORS)}, got {kind!r}")
    shape: dict[str, Any]
    cropped = not transform.squash or transform.shortest is not None
    if kind == "siglip2":
        if cropped or transform.size % patch_size:
            raise ValueError(
                f"siglip2 takes squashed, uncropped pictures of whole {patch_size}-pixel patches: {transform}"
            )
        shape = {"patch_size": patch_size, "max_num_patches": (transform.size // patch_size) ** 2}
    else:
        side = transform.shortest or transform.size
        shape = {
            "size": {"height": side, "width": side} if transform.squash else {"shortest_edge": side},
            "do_center_crop": cropped,
            **({"crop_size": {"height": transform.size, "width": transform.size}} if cropped else {}),
        }
    return getattr(transformers, _PROCESSORS[kind])(
        **shape,
        resample=Image.Resampling[transform.resample.upper()],
        image_mean=list(transform.mean),
        image_std=list(transform.std),
        do_convert_rgb=True,
    )
