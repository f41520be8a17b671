"""Vector scenes for m3-nano: what is drawn, how it is spelled as SVG, and how a draft of it goes wrong.

A scene is a ground colour and a few shapes on a 224 × 224 canvas whose numbers are multiples of 4. Its spelling is
canonical, so that a picture has one answer: larger shapes are painted first, polygons start at their topmost
point and go clockwise, lines go from left to right.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

CANVAS = 224
UNIT = 4
COLORS = (
    "white", "black", "gray", "red", "maroon", "orange", "gold", "green",
    "lime", "teal", "skyblue", "blue", "navy", "purple", "pink", "brown",
)  # fmt: skip
GROUNDS = ("white", "white", "white", "black", "gray", "skyblue", "pink", "navy", "gold", "green")
MAX_SHAPES = 6
HELD_OUT = 1 << 40  # scenes for evaluation have seeds from here on; training uses smaller ones


@dataclass(frozen=True)
class Shape:
    """One SVG element. `numbers` are its attributes in writing order; `stroke` 0 means filled."""

    tag: str  # rect | circle | ellipse | polygon | line
    numbers: tuple[tuple[str, int], ...]
    color: str
    stroke: int = 0

    @property
    def box(self) -> tuple[int, int, int, int]:
        """x0, y0, x1, y1 of the geometry, strokes not counted."""
        n = dict(self.numbers)
        if self.tag == "rect":
            return n["x"], n["y"], n["x"] + n["width"], n["y"] + n["height"]
        if self.tag in ("circle", "ellipse"):
            rx, ry = n.get("rx", n.get("r", 0)), n.get("ry", n.get("r", 0))
            return n["cx"] - rx, n["cy"] - ry, n["cx"] + rx, n["cy"] + ry
        xs, ys = self._points()
        return min(xs), min(ys), max(xs), max(ys)

    @property
    def area(self) -> float:
        """The outer area in square pixels; a line's is length times width. Decides the painting order."""
        n = dict(self.numbers)
        if self.tag == "rect":
            return n["width"] * n["height"]
        if self.tag in ("circle", "ellipse"):
            return math.pi * n.get("rx", n.get("r", 0)) * n.get("ry", n.get("r", 0))
        xs, ys = self._points()
        if self.tag == "line":
            return math.hypot(xs[1] - xs[0], ys[1] - ys[0]) * self.stroke
        return abs(sum(xs[i - 1] * ys[i] - xs[i] * ys[i - 1] for i in range(len(xs)))) / 2

    def _points(self) -> tuple[list[int], list[int]]:
        values = [value for _, value in self.numbers]
        return values[0::2], values[1::2]

    def svg(self) -> str:
        if self.tag == "polygon":
            xs, ys = self._points()
            geometry = ' points="' + " ".join(f"{x},{y}" for x, y in zip(xs, ys, strict=True)) + '"'
        else:
            geometry = "".join(f' {name}="{value}"' for name, value in self.numbers)
        if self.tag == "line":
            paint = f' stroke="{self.color}" stroke-width="{self.stroke}"'
        elif self.stroke:
            paint = f' fill="none" stroke="{self.color}" stroke-width="{self.stroke}"'
        else:
            paint = f' fill="{self.color}"'
        return f"<{self.tag}{geometry}{paint}/>"


@dataclass(frozen=True)
class Scene:
    ground: str
    shapes: tuple[Shape, ...]

    def svg(self) -> str:
        """The scene as the SVG text that m3-nano learns to write."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CANVAS} {CANVAS}">'
        ground = f'<rect width="{CANVAS}" height="{CANVAS}" fill="{self.ground}"/>'
        return "\n".join([head, ground, *(shape.svg() for shape in self.shapes), "</svg>"])


def scene(seed: int, shapes: int | None = None) -> Scene:
    """The scene of a seed; `shapes` (1 to 6) sets the difficulty, None draws it from the seed."""
    rng = random.Random(f"scene {seed} {shapes}")
    count = shapes or rng.randint(1, MAX_SHAPES)
    ground = rng.choice(GROUNDS)
    placed: list[Shape] = []
    for _ in range(200):
        if len(placed) == count:
            break
        candidate = _random_shape(rng, ground, count)
        if all(_can_stand_together(candidate, other) for other in placed):
            placed.append(candidate)
    return Scene(ground, _paint_order(placed))


def _paint_order(shapes: list[Shape]) -> tuple[Shape, ...]:
    return tuple(sorted(shapes, key=lambda s: (-s.area, s.box, s.tag, s.color)))


def _step(rng: random.Random, low: int, high: int) -> int:
    """A multiple of UNIT in [low, high]; low and high are multiples already."""
    return rng.randrange(low, high + 1, UNIT)


def _random_shape(rng: random.Random, ground: str, crowd: int) -> Shape:
    color = rng.choice([c for c in COLORS if c != ground])
    tag = rng.choices(("rect", "circle", "ellipse", "polygon", "line"), (30, 25, 15, 18, 12))[0]
    largest = 140 if crowd <= 3 else 108
    outlined = rng.random() < 0.2
    stroke = rng.choice((4, 8)) if outlined else 0
    margin = UNIT if stroke else 0
    if tag == "rect":
        w, h = _step(rng, 16, largest), _step(rng, 16, largest)
        x, y = _step(rng, margin, CANVAS - w - margin), _step(rng, margin, CANVAS - h - margin)
        numbers = [("x", x), ("y", y), ("width", w), ("height", h)]
        if min(w, h) >= 32 and rng.random() < 0.2:
            numbers.append(("rx", rng.choice((8, 12, 16))))
        return Shape(tag, tuple(numbers), color, stroke)
    if tag == "circle":
        r = _step(rng, 8, largest // 8 * 4)
        cx, cy = (_step(rng, r + margin, CANVAS - r - margin) for _ in range(2))
        return Shape(tag, (("cx", cx), ("cy", cy), ("r", r)), color, stroke)
    if tag == "ellipse":
        rx, ry = _step(rng, 8, largest // 8 * 4), _step(rng, 8, largest // 8 * 4)
        if rx == ry:
            ry = rx - UNIT if rx > 16 else rx + UNIT
        cx, cy = _step(rng, rx + margin, CANVAS - rx - margin), _step(rng, ry + margin, CANVAS - ry - margin)
        return Shape(tag, (("cx", cx), ("cy", cy), ("rx", rx), ("ry", ry)), color, stroke)
    if tag == "polygon":
        return Shape(tag, _random_triangle(rng, largest), color)
    width = rng.choice((4, 8, 12))
    while True:
        (x1, y1), (x2, y2) = sorted((_step(rng, 8, CANVAS - 8), _step(rng, 8, CANVAS - 8)) for _ in range(2))
        if math.hypot(x2 - x1, y2 - y1) >= 40:
            return Shape(tag, (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2)), color, width)


def _random_triangle(rng: random.Random, largest: int) -> tuple[tuple[str, int], ...]:
    while True:
        x0, y0 = _step(rng, 0, CANVAS - 32), _step(rng, 0, CANVAS - 32)
        points = [
            (_step(rng, x0, min(CANVAS, x0 + largest)), _step(rng, y0, min(CANVAS, y0 + largest))) for _ in range(3)
        ]
        corners = _clockwise(points)
        shape = Shape("polygon", corners, "red")
        x_min, y_min, x_max, y_max = shape.box
        longest = max(x_max - x_min, y_max - y_min)
        if shape.area >= 400 and shape.area >= 0.15 * longest * longest:
            return corners


def _clockwise(points: list[tuple[int, int]]) -> tuple[tuple[str, int], ...]:
    """The points from the topmost (then leftmost) one on, clockwise on the screen."""
    first = min(points, key=lambda p: (p[1], p[0]))
    a, b = [p for p in points if p is not first]
    cross = (a[0] - first[0]) * (b[1] - first[1]) - (a[1] - first[1]) * (b[0] - first[0])
    ordered = [first, a, b] if cross > 0 else [first, b, a]
    return tuple((axis + str(i), p[k]) for i, p in enumerate(ordered) for k, axis in enumerate("xy"))


def _can_stand_together(a: Shape, b: Shape) -> bool:
    """Both stay recognisable: little overlap, or a small one on a clearly larger one of another colour."""
    ax0, ay0, ax1, ay1 = a.box
    bx0, by0, bx1, by1 = b.box
    common = max(0, min(ax1, bx1) - max(ax0, bx0)) * max(0, min(ay1, by1) - max(ay0, by0))
    if not common:
        return True
    if a.color == b.color:
        return False
    small, large = sorted(((ax1 - ax0) * (ay1 - ay0), (bx1 - bx0) * (by1 - by0)))
    share = common / max(small, 1)
    return share <= 0.3 or (share == 1 and small <= 0.4 * large)


def spoil(original: Scene, rng: random.Random, edits: int) -> Scene:
    """A draft of the scene with mistakes: moved, resized, recoloured, missing, additional or mistaken shapes."""
    for _ in range(20):
        ground, shapes = original.ground, list(original.shapes)
        for _ in range(edits):
            kind = rng.choices(("nudge", "color", "drop", "add", "swap", "ground"), (68, 10, 6, 5, 8, 3))[0]
            if kind == "ground":
                ground = rng.choice([g for g in GROUNDS if g != ground])
            elif kind == "add":
                shapes.append(_random_shape(rng, ground, 6))
            elif shapes:
                i = rng.randrange(len(shapes))
                if kind == "drop":
                    del shapes[i]
                elif kind == "color":
                    shapes[i] = replace(shapes[i], color=rng.choice([c for c in COLORS if c != shapes[i].color]))
                elif kind == "nudge":
                    shapes[i] = _nudge(shapes[i], rng)
                else:
                    shapes[i] = _mistake_kind(shapes[i], rng)
        spoiled = Scene(ground, tuple(shapes))
        if spoiled != original:
            return spoiled
    return Scene(rng.choice([g for g in GROUNDS if g != original.ground]), original.shapes)


def _nudge(shape: Shape, rng: random.Random) -> Shape:
    """One or two numbers off by a step or a few; a shape keeps a positive size."""
    numbers = dict(shape.numbers)
    for name in rng.sample(list(numbers), rng.choice((1, 1, 2))):
        off = rng.choice((1, 1, 1, 1, 2, 2, 3, 5)) * rng.choice((-UNIT, UNIT))
        low = UNIT if name in ("width", "height", "r", "rx", "ry") else 0
        numbers[name] = min(CANVAS, max(low, numbers[name] + off))
    return replace(shape, numbers=tuple(numbers.items()))


def _mistake_kind(shape: Shape, rng: random.Random) -> Shape:
    """The same box taken for another kind of shape, or filled for outlined."""
    if shape.tag == "line":
        return replace(shape, stroke=rng.choice([w for w in (4, 8, 12) if w != shape.stroke]))
    if shape.tag in ("rect", "circle", "ellipse") and rng.random() < 0.5:
        return replace(shape, stroke=0 if shape.stroke else rng.choice((4, 8)))
    x0, y0, x1, y1 = (value // UNIT * UNIT for value in shape.box)
    if shape.tag == "rect":
        rx, ry = max(UNIT, (x1 - x0) // 8 * 4), max(UNIT, (y1 - y0) // 8 * 4)
        return Shape("ellipse", (("cx", x0 + rx), ("cy", y0 + ry), ("rx", rx), ("ry", ry)), shape.color, shape.stroke)
    return Shape("rect", (("x", x0), ("y", y0), ("width", x1 - x0), ("height", y1 - y0)), shape.color, shape.stroke)
