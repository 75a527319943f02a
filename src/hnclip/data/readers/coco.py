"""JSON files whose rows lie below a key: Karpathy's splits and COCO's own captions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows_of_object(path: Path, content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON object, each with its place.

    - Karpathy's splits, {"images": [{"filename", "filepath"?, "split", "sentences": [{"raw"}]}]}: a row per picture,
      `filename` with the directory in `filepath`;
    - COCO's captions, {"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}: a row per caption,
      with the keys of its picture, and one without caption for a picture that has none;
    - an object with one list of objects, such as {"annotations": [{"image", "caption"}]}: the rows of the list.
    """
    lists = [key for key, value in content.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if "images" in lists and "sentences" in content["images"][0]:
        return _numbered("images", map(_with_directory, content["images"]))
    if "images" in lists and "annotations" in lists and "image_id" in content["annotations"][0]:
        return _joined(content["images"], content["annotations"])
    if len(lists) == 1:
        return _numbered(lists[0], iter(content[lists[0]]))
    raise ValueError(
        f"{path} holds a JSON object with the keys {', '.join(map(repr, list(content)[:8]))}; a list of objects is "
        'needed, or {"images": […]} as Karpathy or COCO write it'
    )


def _numbered(part: str, rows: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows):
        yield f"{part}[{number}]", row


def _with_directory(image: Any) -> Any:
    if not isinstance(image, dict) or not image.get("filepath"):
        return image
    rest = {key: value for key, value in image.items() if key != "filepath"}
    return {**rest, "filename": f"{image['filepath']}/{image.get('filename', '')}"}


def _joined(images: list[Any], annotations: list[Any]) -> Iterator[tuple[str, Any]]:
    places = {str(image["id"]): row for row, image in enumerate(images) if isinstance(image, dict) and "id" in image}
    described = set()
    for place, annotation in _numbered("annotations", iter(annotations)):
        if isinstance(annotation, dict):
            picture = str(annotation.get("image_id"))
            described.add(picture)
            yield place, {**annotation, **(images[places[picture]] if picture in places else {})}
        else:
            yield place, annotation
    for picture, row in places.items():
        if picture not in described:
            yield f"images[{row}]", images[row]
