"""Scenes into pixels: flat painted parks and outlined cabinets, with the box of every thing."""

from __future__ import annotations

from functools import lru_cache

from PIL import Image, ImageChops, ImageDraw

from hnclip.data.scenes.world import COLUMNS, ROWS, Scene, Thing

SIDE = 192  # pixels of the finished square picture
_CELL = SIDE // COLUMNS
_EXTENT = {"small": 26, "medium": 40, "large": 56}  # pixels of a thing's square, inside its cell of 64

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels

_COLOURS: dict[str, Colour] = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (250, 220, 40),
    "green": (40, 130, 60),
    "blue": (35, 85, 205),
    "purple": (122, 45, 155),
    "pink": (245, 140, 185),
    "brown": (115, 70, 35),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
    "crimson": (178, 18, 54),
    "amber": (240, 150, 20),
    "gold": (236, 205, 60),
    "olive": (112, 124, 32),
    "teal": (10, 140, 140),
    "navy": (22, 34, 110),
    "violet": (140, 80, 200),
    "rose": (240, 120, 150),
    "ivory": (246, 240, 220),
    "charcoal": (52, 54, 62),
}
_LIGHT_MARKS = (250, 250, 250)
_DARK_MARKS = (30, 30, 40)
_GROUND: dict[str, Colour] = {
    "meadow": (134, 190, 96),
    "beach": (232, 212, 158),
    "desert": (206, 140, 88),
    "snowfield": (206, 220, 236),
}
# Moonlight keeps the ground readable, darker than by day; the desert turns dusky so that brown things stand out.
_GROUND_AT_NIGHT: dict[str, Colour] = {
    "meadow": (73, 104, 52),
    "beach": (127, 116, 86),
    "desert": (104, 66, 82),
    "snowfield": (122, 127, 132),
}
_SKY: dict[str, tuple[Colour, Colour]] = {
    "morning": ((190, 224, 244), (255, 222, 196)),
    "midday": ((96, 170, 240), (170, 214, 250)),
    "sunset": ((120, 80, 150), (250, 150, 90)),
    "night": ((14, 18, 52), (48, 56, 110)),
}
_WALL: dict[str, Colour] = {
    "cream": (244, 232, 204),
    "mint": (190, 226, 204),
    "lilac": (210, 196, 230),
    "slate": (128, 142, 158),
}
_WOOD: dict[str, Colour] = {"oak": (196, 150, 92), "walnut": (96, 62, 40), "painted white": (240, 240, 236)}
_OUTLINE = (40, 32, 30)


def draw_scene(scene: Scene) -> Image.Image:
    """The picture of a scene: RGB, SIDE × SIDE, a function of the scene alone."""
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
    """Where a thing is, in pixels of the finished picture: centred in its column, standing on the floor of its row."""
    extent = _EXTENT[thing.size]
    left = thing.column * _CELL + (_CELL - extent) // 2
    bottom = (thing.row + 1) * _CELL - 4
    return left, bottom - extent, left + extent, bottom


def _park(scene: Scene) -> Image.Image:
    canvas = _gradient(*_SKY[scene.aspect("hour")]).copy()
    draw = ImageDraw.Draw(canvas)
    grounds = _GROUND_AT_NIGHT if scene.aspect("hour") == "night" else _GROUND
    ground = grounds[scene.aspect("ground")]
    horizon = _CELL + 16
    draw.rectangle((0, horizon, SIDE, SIDE), fill=ground)
    for row in (1, 2):  # paths under the two ground rows give the eye a depth cue
        y = (row + 1) * _CELL - 5
        draw.line((0, y, SIDE, y), fill=tuple(int(channel * 0.85) for channel in ground), width=2)
    clouds = {"clear": (), "one cloud": (64,), "three clouds": (64, 128, 186)}[scene.aspect("sky")]
    for x in clouds:  # between the columns, where nothing that stands in the top row can hide them
        draw.ellipse((x - 24, -9, x + 8, 7), fill=(238, 240, 246))
        draw.ellipse((x - 6, -10, x + 24, 6), fill=(238, 240, 246))
    return canvas


def _cabinet(scene: Scene) -> Image.Image:
    wall, wood = _WALL[scene.aspect("wall")], _WOOD[scene.aspect("wood")]
    canvas = Image.new("RGB", (SIDE, SIDE), wall)
    draw = ImageDraw.Draw(canvas)
    for x in range(8, SIDE, 16):  # wallpaper
        draw.line((x, 0, x, SIDE), fill=tuple(int(channel * 0.94) for channel in wall), width=2)
    draw.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=wood, width=4)
    for row in range(ROWS):
        y = (row + 1) * _CELL - 4
        draw.rectangle((0, y, SIDE, y + 4), fill=wood, outline=_OUTLINE)
    edge = scene.aspect("edge")
    if edge == "a fringed cloth":
        for x in range(0, SIDE, 8):
            draw.polygon(((x, 0), (x + 8, 0), (x + 4, 8)), fill=(200, 60, 70))
    elif edge == "a row of hooks":
        for x in range(12, SIDE, 24):
            draw.arc((x - 4, 0, x + 4, 9), 0, 270, fill=_OUTLINE, width=2)
    return canvas


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


Layer = tuple[Colour, Image.Image]


@lru_cache(maxsize=256)
def _silhouette(kind: str, extent: int) -> tuple[Image.Image, tuple[Layer, ...]]:
    """The mask that takes the thing's own colour, and fixed details drawn over it, at this size."""
    shapes = _SHAPES[kind]
    body = _mask(shapes["body"], extent)
    trim = tuple((colour, _mask(parts, extent)) for colour, parts in shapes.get("trim", ()))
    return body, trim


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


def _mask(parts: tuple[tuple[str, tuple[float, ...]], ...], extent: int) -> Image.Image:
    """Polygons and ellipses in unit coordinates, drawn at four times the size for smooth edges."""
    mask = Image.new("L", (4 * extent, 4 * extent), 0)
    draw = ImageDraw.Draw(mask)
    for shape, numbers in parts:
        points = [number * 4 * extent for number in numbers]
        if shape == "ellipse":
            draw.ellipse(points, fill=255)
        else:
            draw.polygon(points, fill=255)
    return mask.resize((extent, extent), Image.Resampling.BOX)


def _box(left: float, top: float, right: float, bottom: float) -> tuple[str, tuple[float, ...]]:
    return "polygon", (left, top, right, top, right, bottom, left, bottom)


def _oval(left: float, top: float, right: float, bottom: float) -> tuple[str, tuple[float, ...]]:
    return "ellipse", (left, top, right, bottom)


def _poly(*numbers: float) -> tuple[str, tuple[float, ...]]:
    return "polygon", numbers


_DARK, _PALE, _WOODEN, _METAL = (45, 40, 45), (250, 246, 230), (110, 74, 44), (150, 155, 165)
_SHAPES: dict[str, dict] = {
    "house": {
        "body": (_poly(0.5, 0, 1, 0.4, 0.9, 0.4, 0.9, 1, 0.1, 1, 0.1, 0.4, 0, 0.4),),
        "trim": ((_DARK, (_box(0.42, 0.68, 0.6, 1),)), (_PALE, (_box(0.18, 0.48, 0.34, 0.62),))),
    },
    "tree": {
        "body": (_oval(0.05, 0, 0.95, 0.72),),
        "trim": ((_WOODEN, (_box(0.43, 0.68, 0.57, 1),)),),
    },
    "tent": {
        "body": (_poly(0.5, 0.1, 1, 1, 0, 1),),
        "trim": ((_DARK, (_poly(0.5, 0.55, 0.64, 1, 0.36, 1),)),),
    },
    "car": {
        "body": (_poly(0.2, 0.35, 0.72, 0.35, 0.86, 0.56, 1, 0.6, 1, 0.86, 0, 0.86, 0, 0.56, 0.1, 0.56),),
        "trim": (
            (_DARK, (_oval(0.1, 0.72, 0.36, 1), _oval(0.64, 0.72, 0.9, 1))),
            (_PALE, (_box(0.28, 0.4, 0.46, 0.54), _box(0.52, 0.4, 0.68, 0.54))),
        ),
    },
    "balloon": {
        "body": (_oval(0.1, 0, 0.9, 0.74),),
        "trim": ((_DARK, (_poly(0.3, 0.72, 0.42, 0.82, 0.38, 0.82), _box(0.38, 0.82, 0.62, 1))),),
    },
    "umbrella": {
        "body": (_poly(0, 0.5, 0.08, 0.28, 0.28, 0.1, 0.5, 0.04, 0.72, 0.1, 0.92, 0.28, 1, 0.5),),
        "trim": ((_METAL, (_box(0.47, 0.5, 0.53, 1), _box(0.47, 0.93, 0.68, 1))),),
    },
    "flag": {
        "body": (_poly(0.16, 0.02, 1, 0.16, 0.82, 0.34, 1, 0.52, 0.16, 0.56),),
        "trim": ((_METAL, (_box(0.08, 0, 0.16, 1),)),),
    },
    "flower": {
        "body": (
            _oval(0.32, 0, 0.68, 0.34),
            _oval(0.32, 0.34, 0.68, 0.68),
            _oval(0.1, 0.16, 0.46, 0.52),
            _oval(0.54, 0.16, 0.9, 0.52),
        ),
        "trim": ((_PALE, (_oval(0.38, 0.22, 0.62, 0.46),)), ((50, 140, 60), (_box(0.46, 0.66, 0.54, 1),))),
    },
    "mushroom": {
        "body": (_poly(0, 0.58, 0.06, 0.3, 0.26, 0.1, 0.5, 0.04, 0.74, 0.1, 0.94, 0.3, 1, 0.58),),
        "trim": ((_PALE, (_box(0.34, 0.58, 0.66, 1),)),),
    },
    "sailboat": {
        "body": (_poly(0.52, 0, 0.96, 0.62, 0.52, 0.62), _poly(0.44, 0.12, 0.44, 0.62, 0.1, 0.62)),
        "trim": ((_WOODEN, (_poly(0, 0.7, 1, 0.7, 0.82, 1, 0.18, 1), _box(0.45, 0, 0.51, 0.7))),),
    },
    "book": {
        "body": (_box(0.2, 0.04, 0.8, 1),),
        "trim": ((_PALE, (_box(0.74, 0.08, 0.8, 0.96), _box(0.32, 0.18, 0.62, 0.3))),),
    },
    "cup": {
        "body": (_poly(0.08, 0.3, 0.72, 0.3, 0.64, 1, 0.16, 1), _oval(0.58, 0.4, 1, 0.82)),
        "trim": ((_DARK, (_oval(0.74, 0.52, 0.88, 0.7),)),),
    },
    "bottle": {
        "body": (_poly(0.4, 0.1, 0.6, 0.1, 0.6, 0.36, 0.78, 0.5, 0.78, 1, 0.22, 1, 0.22, 0.5, 0.4, 0.36),),
        "trim": ((_WOODEN, (_box(0.4, 0, 0.6, 0.1),)),),
    },
    "vase": {
        "body": (_poly(0.3, 0.4, 0.7, 0.4, 0.66, 0.5, 0.9, 0.72, 0.7, 1, 0.3, 1, 0.1, 0.72, 0.34, 0.5),),
        "trim": (((60, 130, 60), (_poly(0.5, 0.4, 0.2, 0.02, 0.34, 0), _poly(0.5, 0.4, 0.8, 0.02, 0.66, 0))),),
    },
    "clock": {
        "body": (_oval(0.02, 0.06, 0.98, 0.96),),
        "trim": (
            (_PALE, (_oval(0.22, 0.26, 0.78, 0.78),)),
            (_DARK, (_box(0.47, 0.32, 0.53, 0.54), _box(0.47, 0.48, 0.7, 0.55), _box(0.2, 0.92, 0.8, 1))),
        ),
    },
    "lamp": {
        "body": (_poly(0.28, 0.02, 0.72, 0.02, 1, 0.6, 0, 0.6),),
        "trim": ((_METAL, (_box(0.46, 0.6, 0.54, 0.92), _box(0.22, 0.92, 0.78, 1))),),
    },
    "candle": {
        "body": (_box(0.24, 0.26, 0.76, 0.9),),
        "trim": (((255, 190, 60), (_oval(0.42, 0, 0.58, 0.24),)), (_METAL, (_box(0.14, 0.9, 0.86, 1),))),
    },
    "box": {
        "body": (_box(0.02, 0.28, 0.98, 1),),
        "trim": ((_DARK, (_box(0.02, 0.42, 0.98, 0.48), _box(0.44, 0.4, 0.56, 0.58))),),
    },
    "ball": {"body": (_oval(0.06, 0.12, 0.94, 1),)},
    "frame": {
        "body": (_box(0.02, 0.1, 0.98, 1),),
        "trim": (
            ((150, 200, 230), (_box(0.24, 0.32, 0.76, 0.78),)),
            ((90, 150, 90), (_poly(0.24, 0.78, 0.5, 0.46, 0.76, 0.78),)),
        ),
    },
}
