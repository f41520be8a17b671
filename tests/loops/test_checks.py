"""How pictures are judged, and which step is the best."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3agent.loops import PixelMatch, Step, Stop, Verdict, best_of
from m3agent.loops.checks import judge
from m3agent.media.image import Image


def flat(value: int, size: int = 10) -> Image:
    return Image(np.full((size, size, 3), value, np.uint8))


def test_a_channel_may_be_off_by_sixteen_but_not_seventeen():
    for channel in range(3):
        for off, differing in ((16, 0), (17, 1)):
            pixels = np.full((10, 10, 3), 100, np.uint8)
            pixels[3, 4, channel] += off
            verdict = PixelMatch(flat(100), within=0.0)(Image(pixels))
            assert verdict.score == 1 - differing / 100
            assert verdict.passed is (differing == 0)


def test_dark_and_bright_do_not_wrap_around():
    assert PixelMatch(flat(250))(flat(4)).score == 0.0
    assert PixelMatch(flat(4))(flat(250)).score == 0.0


def test_passing_at_exactly_the_share():
    pixels = np.full((10, 10, 3), 0, np.uint8)
    pixels[0, 0] = 255
    assert PixelMatch(flat(0), within=0.01)(Image(pixels)).passed
    pixels[0, 1] = 255
    assert not PixelMatch(flat(0), within=0.01)(Image(pixels)).passed


@given(st.integers(0, 2**32 - 1))
def test_against_a_plain_loop(seed: int):
    rng = np.random.default_rng(seed)
    a = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    b = (a.astype(int) + rng.integers(-30, 31, a.shape)).clip(0, 255).astype(np.uint8)
    differing = sum(
        any(abs(int(a[y, x, c]) - int(b[y, x, c])) > 16 for c in range(3)) for y in range(5) for x in range(7)
    )
    assert PixelMatch(Image(a))(Image(b)).score == pytest.approx(1 - differing / 35)


def test_the_difference_marks_just_the_differing_pixels():
    pixels = np.full((10, 10, 3), 255, np.uint8)
    pixels[2, 5] = 0
    difference = PixelMatch(flat(255))(Image(pixels)).difference
    assert difference is not None
    red = (difference.rgb == (220, 38, 38)).all(axis=2)
    assert red.sum() == 1
    assert red[2, 5]


def test_another_size_fails_with_a_note():
    verdict = PixelMatch(flat(0, 10))(flat(0, 12))
    assert not verdict.passed
    assert verdict.score == 0
    assert "12x12" in verdict.note
    assert "10x10" in verdict.note


def test_rules_return_a_bool_or_a_score():
    def is_dark(image: Image) -> bool:
        return bool(image.rgb.mean() < 50)

    def darkness(image: Image) -> float:
        return 1 - float(image.rgb.mean()) / 255

    dark = judge([is_dark, darkness], flat(0))
    assert [(v.name, v.score, v.passed) for v in dark] == [("is_dark", 1, True), ("darkness", 1, True)]
    grey = judge([is_dark, darkness], flat(51))
    assert [v.passed for v in grey] == [False, False]
    assert grey[1].score == pytest.approx(0.8)


@pytest.mark.parametrize("result", [1.5, -0.1, float("nan")])
def test_a_score_outside_its_range_is_an_error(result: float):
    with pytest.raises(ValueError, match="between 0 and 1"):
        judge([lambda image: result], flat(0))


def test_a_rule_that_returns_nothing_is_an_error():
    with pytest.raises(TypeError, match="returned NoneType"):
        judge([lambda image: None], flat(0))  # type: ignore[list-item, return-value]


def step(index: int, score: float, *, drawn: bool = True, passed: bool = False, tokens=10, seconds=1.0) -> Step:
    verdicts = (Verdict("v", score, passed),) if drawn else ()
    return Step(index, 0, "", flat(0) if drawn else None, None, score, verdicts, tokens, seconds)


def test_the_best_is_the_first_of_the_highest():
    steps = [step(0, 0.2), step(1, 0.9), step(2, 0.9), step(3, 0.5)]
    assert best_of(steps) is steps[1]


def test_failed_renders_are_never_the_best():
    steps = [step(0, 0.0, drawn=False), step(1, 0.0)]
    assert best_of(steps) is steps[1]
    assert best_of(steps[:1]) is None
    assert best_of([]) is None


def test_without_checks_the_last_picture_is_taken():
    steps = [Step(n, 0, "", flat(n), None, 1.0, (), 1, 1.0) for n in range(3)]
    assert best_of(steps) is steps[2]
    assert not steps[2].passed


def test_stop_at_a_pass():
    assert Stop()([step(0, 0.4)]) is None
    assert Stop()([step(0, 0.4), step(1, 1.0, passed=True)]) == "passed"
    assert Stop(passing=False)([step(0, 1.0, passed=True)]) is None


def test_stop_without_gain():
    rule = Stop(patience=2)
    assert rule([step(0, 0.4), step(1, 0.4)]) is None
    assert rule([step(0, 0.4), step(1, 0.4), step(2, 0.3)]) == "no gain"
    assert rule([step(0, 0.4), step(1, 0.4), step(2, 0.5)]) is None


def test_stop_at_budgets():
    assert Stop(tokens=20)([step(0, 0.4)]) is None
    assert Stop(tokens=20)([step(0, 0.4), step(1, 0.4)]) == "tokens"
    assert Stop(seconds=1.5)([step(0, 0.4), step(1, 0.4)]) == "seconds"
    assert Stop(seconds=1.5)([]) is None


@pytest.mark.parametrize("name", ["patience", "tokens", "seconds"])
def test_limits_are_positive(name: str):
    with pytest.raises(ValueError, match=name):
        Stop(**{name: 0})
