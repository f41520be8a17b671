"""The film strip: everything of the run is on the page, nothing comes from outside, and no code becomes markup."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from m3agent.loops import PixelMatch, Refinement, Step, best_of
from m3agent.loops.checks import judge
from m3agent.loops.report import film_strip, percent
from m3agent.media.image import Image

TARGET = Image(np.full((8, 8, 3), 200, np.uint8))


def refinement(codes: list[str]) -> Refinement:
    steps: list[Step] = []
    for index, code in enumerate(codes):
        image = Image(np.full((8, 8, 3), 180 + index * 10, np.uint8)) if code else None
        verdicts = judge([PixelMatch(TARGET)], image) if image else ()
        error = None if image else "the code is empty"
        score = verdicts[0].score if verdicts else 0.0
        steps.append(Step(index, 0, code, image, error, score, verdicts, 100 + index, 0.5))
    return Refinement(best_of(steps), tuple(steps), "passed", "Done.", None)  # type: ignore[arg-type]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        if self.tags[-1:] != ["style"] or "{" not in data:
            self.words += data


def test_every_step_is_on_the_page():
    page = Page(
        film_strip(refinement(["<first/>", "", "<third/>"]), goal="Draw this.", target=TARGET, facts={"model": "m3"})
    )
    for words in ("Draw this.", "<first/>", "<third/>", "the code is empty", "101 tokens", "m3"):
        assert words in page.words
    assert re.search(r"tokens\s*303\b", page.words)
    assert page.words.count("best") == 2  # the figure at the top and one tag
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert len(pictures) == 5  # the target, and render and difference of the two that could be drawn
    first = Image(base64.b64decode(pictures[0].partition(",")[2]))
    assert first == TARGET


def test_nothing_comes_from_elsewhere():
    text = film_strip(refinement(["<a/>"]), goal="g", target=TARGET)
    page = Page(text)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert not {"script", "link", "iframe", "base"} & set(page.tags)
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("evil", ["</pre><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ steps }}"])
def test_code_goal_and_facts_are_shown_not_run(evil: str):
    text = film_strip(refinement([evil]), goal=evil, title=evil, facts={evil: evil}, target=TARGET)
    page = Page(text)
    assert "script" not in page.tags
    assert "x" not in page.addresses
    assert page.words.count(evil) >= 4


def test_without_target_and_without_steps():
    page = Page(film_strip(refinement([]), goal="g"))
    assert "Target" not in page.words
    assert "none" in page.words


@pytest.mark.parametrize("reason", ["passed", "no gain", "tokens", "seconds", "rounds", "answered"])
def test_every_reason_to_stop_has_words(reason: str):
    text = film_strip(replace(refinement(["<a/>"]), stopped=reason), goal="g")
    (words,) = re.findall(r"<dt>ended</dt><dd>(.+)</dd>", text)
    assert len(words) > len(reason)


def test_a_hundred_percent_is_said_of_perfection_alone():
    assert percent(1.0) == "100%"
    assert percent(0.99999) == "99.9%"
    assert percent(0.0) == "0.0%"
