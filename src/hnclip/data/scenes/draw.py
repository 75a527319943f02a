"""Scenes into pixels: flat painted parks and outlined cabinets, with the box of every thing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from PIL import Image, ImageChops, ImageDraw

from hnclip.core import Box
from hnclip.data.scenes.world import COLUMNS, ROWS, TABLES, Scene, Thing

SIDE = 192  # pixels of the finished square image
_CELL = SIDE // COLUMNS
_EXTENT = {"small": 26, "medium": 40, "large": 56}  # pixels of a thing's square, inside its cell of 64

Colour = tuple[int, int, int]

_COLOURS = {name: tuple(colour) for table in TABLES.values() for name, colour in table["colours"].items()}
_SHAPES = {kind: shapes for table in TABLES.values() for kind, shapes in table["kinds"].items()}
_PARK, _SHELF = TABLES["park"]["backdrop"], TABLES["shelf"]["backdrop"]
_LIGHT_MARKS, _DARK_MARKS = (250, 250, 250), (30, 30, 40)
_OUTLINE = (40, 32, 30)


def draw_scene(scene: Scene) -> Image.Image:
    """The image of a scene: RGB, SIDE × SIDE, a function of the scene alone."""
    canvas = (_park if scene.style == "park" else _cabinet)(scene)
    outline = _OUTLINE if scene.style == "shelf" else None
    for thing in scene.things:
        left, top, right, _ = thing_box(thing)
        extent = right - left
        body, trim = _silhouette(thing.kind, extent)
        canvas.paste(_patterned(thing, extent), (left, top), body)
        if outline:
            canvas.paste(outline, (left, top), _rim(thing.kind, extent))
        for colour, mask in trim:
            canvas.paste(colour, (left, top), mask)
    return canvas


def thing_box(thing: Thing) -> Box:
    """Where a thing is, in pixels of the finished image: centred in its column, standing on the floor of its row."""
    extent = _EXTENT[thing.size]
    left = thing.column * _CELL + (_CELL - extent) // 2
    bottom = (thing.row + 1) * _CELL - 4
    return left, bottom - extent, left + extent, bottom


def _park(scene: Scene) -> Image.Image:
    hour = scene.aspect("hour")
    canvas = _gradient(*(tuple(colour) for colour in _PARK["hour"][hour])).copy()
    draw = ImageDraw.Draw(canvas)
    # Moonlight keeps the ground readable, darker than by day.
    ground = tuple(_PARK["ground"][scene.aspect("ground")]["night" if hour == "night" else "day"])
    horizon = _CELL + 16
    draw.rectangle((0, horizon, SIDE, SIDE), fill=ground)
    for row in (1, 2):  # paths under the two ground rows give the eye a depth cue
        y = (row + 1) * _CELL - 5
        draw.line((0, y, SIDE, y), fill=_darker(ground, 0.85), width=2)
    for x in _PARK["sky"][scene.aspect("sky")]:  # between the columns, where nothing in the top row can hide clouds
        draw.ellipse((x - 24, -9, x + 8, 7), fill=(238, 240, 246))
        draw.ellipse((x - 6, -10, x + 24, 6), fill=(238, 240, 246))
    return canvas


def _cabinet(scene: Scene) -> Image.Image:
    wall, wood = (tuple(_SHELF[name][scene.aspect(name)]) for name in ("wall", "wood"))
    canvas = Image.new("RGB", (SIDE, SIDE), wall)
    draw = ImageDraw.Draw(canvas)
    for x in range(8, SIDE, 16):  # wallpaper
        draw.line((x, 0, x, SIDE), fill=_darker(wall, 0.94), width=2)
    draw.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=wood, width=4)
    for row in range(ROWS):
        y = (row + 1) * _CELL - 4
        draw.rectangle((0, y, SIDE, y + 4), fill=wood, outline=_OUTLINE)
    edge = _SHELF["edge"][scene.aspect("edge")]
    if edge == "cloth":
        for x in range(0, SIDE, 8):
            draw.polygon(((x, 0), (x + 8, 0), (x + 4, 8)), fill=(200, 60, 70))
    elif edge == "hooks":
        for x in range(12, SIDE, 24):
            draw.arc((x - 4, 0, x + 4, 9), 0, 270, fill=_OUTLINE, width=2)
    return canvas


def _darker(colour: Colour, share: float) -> tuple[int, ...]:
    return tuple(int(value * share) for value in colour)


@lru_cache(maxsize=8)
def _gradient(top: Colour, bottom: Colour) -> Image.Image:
    ramp = Image.linear_gradient("L").resize((SIDE, _CELL + 16))  # black on top, white at the bottom
    sky = Image.composite(Image.new("RGB", ramp.size, bottom), Image.new("RGB", ramp.size, top), ramp)
    canvas = Image.new("RGB", (SIDE, SIDE), bottom)
    canvas.paste(sky, (0, 0))
    return canvas


def _patterned(thing: Thing, extent: int) -> Image.Image:
    """A square of the thing's colour with its pattern in a contrasting one; the marks are as wide on small things."""
    colour = _COLOURS[thing.colour]
    tile = Image.new("RGB", (extent, extent), colour)
    brightness = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]
    marks = _DARK_MARKS if brightness > 125 else _LIGHT_MARKS
    tile.paste(marks, (0, 0), _marks(thing.pattern, extent))
    return tile


@lru_cache(maxsize=64)
def _marks(pattern: str, extent: int) -> Image.Image:
    mask = Image.new("L", (extent, extent), 0)
    draw = ImageDraw.Draw(mask)
    if pattern == "striped":
        for x in range(-extent, extent, 10):
            draw.line((x, extent, x + extent, 0), fill=255, width=4)
    elif pattern == "dotted":
        for row, y in enumerate(range(3, extent, 9)):
            for x in range(3 + 5 * (row % 2), extent, 10):
                draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=255)
    elif pattern == "checked":
        for row, y in enumerate(range(0, extent, 7)):
            for x in range(7 * (row % 2), extent, 14):
                draw.rectangle((x, y, x + 6, y + 6), fill=255)
    return mask


@lru_cache(maxsize=256)
def _silhouette(kind: str, extent: int) -> tuple[Image.Image, tuple[tuple[Colour, Image.Image], ...]]:
    """The mask that takes the thing's own colour, and fixed details drawn over it, at this size."""
    shapes = _SHAPES[kind]
    body = _mask(shapes["body"], extent)
    return body, tuple((tuple(colour), _mask(parts, extent)) for colour, parts in shapes["trim"])


@lru_cache(maxsize=64)
def _rim(kind: str, extent: int) -> Image.Image:
    """A two-pixel outline of the body: what remains when the mask shrunk by two pixels is cut out of it."""
    body, _ = _silhouette(kind, extent)
    padded = Image.new("L", (extent + 4, extent + 4), 0)
    padded.paste(body, (2, 2))
    inner = padded
    for dx, dy in ((-2, 0), (2, 0), (0, -2), (0, 2)):
        inner = ImageChops.darker(inner, ImageChops.offset(padded, dx, dy))
    return ImageChops.subtract(body, inner.crop((2, 2, extent + 2, extent + 2)))


def _mask(parts: list[list[Any]], extent: int) -> Image.Image:
    """Polygons and ellipses in unit coordinates, drawn at four times the size for smooth edges."""
    mask = Image.new("L", (4 * extent, 4 * extent), 0)
    draw = ImageDraw.Draw(mask)
    for shape, *numbers in parts:
        points = [number * 4 * extent for number in numbers]
        (draw.ellipse if shape == "ellipse" else draw.polygon)(points, fill=255)
    return mask.resize((extent, extent), Image.Resampling.BOX)
