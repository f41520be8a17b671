"""Scenes follow from their seeds, have one spelling, and drafts of them are really wrong."""

import random

import pytest

from training.episodes import differing, rasterise
from training.scenes import CANVAS, HELD_OUT, MAX_SHAPES, UNIT, scene, spoil


def test_a_seed_is_a_scene() -> None:
    assert scene(7) == scene(7)
    assert scene(7, 3) != scene(8, 3)
    assert len({scene(HELD_OUT + i).svg() for i in range(300)}) == 300


@pytest.mark.parametrize("shapes", range(1, MAX_SHAPES + 1))
def test_shapes_stand_on_the_canvas_and_on_the_grid(shapes: int) -> None:
    for seed in range(200):
        made = scene(seed, shapes)
        assert 1 <= len(made.shapes) <= shapes
        for shape in made.shapes:
            x0, y0, x1, y1 = shape.box
            assert 0 <= x0 < x1 <= CANVAS or shape.tag == "line"
            assert 0 <= y0 <= y1 <= CANVAS
            assert all(value % UNIT == 0 for _, value in shape.numbers)


def test_larger_shapes_are_painted_first_and_points_go_clockwise_from_the_top() -> None:
    for seed in range(300):
        made = scene(seed)
        areas = [shape.area for shape in made.shapes]
        assert areas == sorted(areas, reverse=True)
        for shape in made.shapes:
            if shape.tag == "polygon":
                values = [value for _, value in shape.numbers]
                (x0, y0), (x1, y1), (x2, y2) = zip(values[0::2], values[1::2], strict=True)
                assert (y0, x0) == min((y0, x0), (y1, x1), (y2, x2))
                assert (x1 - x0) * (y2 - y0) - (y1 - y0) * (x2 - x0) > 0  # clockwise, y pointing down


def test_every_shape_shows() -> None:
    """Leaving a shape out changes the picture: none is hidden behind the others."""
    for seed in range(60):
        made = scene(seed)
        whole = rasterise(made.svg())
        for i in range(len(made.shapes)):
            without = type(made)(made.ground, made.shapes[:i] + made.shapes[i + 1 :])
            assert differing(rasterise(without.svg()), whole) > 0


def test_spoiled_scenes_differ_and_still_render() -> None:
    rng = random.Random(0)
    for seed in range(150):
        made = scene(seed)
        spoiled = spoil(made, rng, 1 + seed % 3)
        assert spoiled != made
        assert rasterise(spoiled.svg()).shape == (CANVAS, CANVAS, 3)
