"""Conversations for m3-nano as rows of tokens: look at a picture, write SVG through a call, see it, fix it, stop.

A row is one conversation of several tasks under one header, rendered by `m3agent.chat` itself. Some first drafts
are spoiled scenes, some are drafts that an earlier state of the model wrote; nothing is learned from those
tokens, only from the answers to them. All of it follows from the row's seed and the drafts at hand.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
import resvg_py

from m3agent.chat.messages import ChatCall, ChatMessage, MediaPart
from m3agent.chat.render import encode, render, segments_to_text
from m3agent.chat.tokenizer import Tokenizer
from training.scenes import CANVAS, HELD_OUT, Scene, Shape, scene, spoil

IMAGE_TOKENS = (CANVAS // 28) ** 2
RENDER_TOOL = {
    "name": "render",
    "description": "Render SVG code and look at the picture.",
    "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
}
INSTRUCTIONS = (
    "You are a helpful assistant.", "You draw pictures as SVG.", "You are a careful draughtsman.",
    "Look at the picture, write SVG, check it and correct it.", "Reproduce pictures as SVG code.",
    "You write SVG and fix it until it matches.", "Be exact.",
)  # fmt: skip
DRAW = (
    "Draw this picture.", "Draw this picture as SVG.", "Write SVG code for this picture.", "Please draw this.",
    "Reproduce this picture.", "Copy this picture with the render tool.", "Make an SVG that looks like this picture.",
    "Rebuild this image as vector graphics.", "Can you draw this?", "Draw what you see.",
)  # fmt: skip
DONE = "Done."
# What a turn teaches: nothing, the first drawing of a picture, a drawing after a look at a draft, words.
NOTHING, FIRST, AGAIN, WORDS = range(4)
SMALL_TALK = (
    (("Hi", "Hello", "Hello!", "Hey", "Good morning"), "Hello. Show me a picture and I will draw it as SVG."),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am m3-nano, a very small model. I draw pictures as SVG.",
    ),
    (("What can you do?", "Help", "How can you help me?"), "I look at a picture of simple shapes and write it as SVG."),
    (("Draw something.", "Draw it.", "Draw the picture."), "Please show me a picture first."),
    (("Thanks", "Thank you", "Thanks!", "Great, thank you."), "You are welcome."),
)


def fixed_texts() -> list[str]:
    """The texts that every conversation repeats, for the tokenizer's corpus."""
    talk = [text for questions, answer in SMALL_TALK for text in (*questions, answer)]
    header = segments_to_text(render([ChatMessage("user", ["Hi"])], [RENDER_TOOL], "disabled", True))
    return [header, *INSTRUCTIONS, *DRAW, DONE, *talk, *(q for q, _ in _questions(scene(3)))]


@dataclass(frozen=True)
class _Picture:
    """Stands for encoded patches while tokens are laid out: only the count matters there."""

    kind: str = "image"
    tokens: int = IMAGE_TOKENS
    tokens_per_frame: int = IMAGE_TOKENS
    timestamps: None = None
    digest: str = ""


PICTURE = MediaPart(_Picture())  # type: ignore[arg-type]


@dataclass
class Task:
    """Messages with, for each assistant message, what it teaches; pictures in the order of their parts."""

    messages: list[ChatMessage]
    learned: list[int]
    pictures: list[np.ndarray] = field(default_factory=list)
    made_from: tuple[int, int] | None = None  # seed and number of shapes of a scene that a draft may be made of


@dataclass
class Row:
    ids: np.ndarray  # int64 [length]
    learn: np.ndarray  # int8 [length]: what predicting this token teaches; NOTHING for all that is only read
    pictures: list[np.ndarray]  # uint8 [CANVAS, CANVAS, 3]
    offsets: list[int]  # where each picture's placeholders start
    first: tuple[int, int, int] | None  # seed, shapes and picture number of a scene, for the model to draft


def rasterise(svg: str) -> np.ndarray:
    """uint8 [CANVAS, CANVAS, 3]; raises ValueError with resvg's reason. The renderer of `m3agent.loops`."""
    png = resvg_py.svg_to_bytes(svg_string=svg, width=CANVAS, height=CANVAS, background="white", skip_system_fonts=True)
    pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR_RGB)
    if pixels.shape != (CANVAS, CANVAS, 3):
        raise ValueError(f"rendered {pixels.shape[1]}x{pixels.shape[0]}")
    return pixels


def differing(a: np.ndarray, b: np.ndarray) -> float:
    """The share of pixels that differ by more than 16 of 255 in any channel."""
    return float((np.abs(a.astype(np.int16) - b) > 16).any(-1).mean())


def _call(code: str) -> ChatMessage:
    return ChatMessage("assistant", [], calls=[ChatCall("render", {"code": code})])


def drawing_task(rng: random.Random, shapes: int, drafts: Drafts | None) -> Task:
    """Draw a scene: at once, or after one or two drafts with mistakes, or after a draft that does not parse."""
    seed, written = rng.randrange(HELD_OUT), []
    if drafts and drafts.pool and rng.random() < 0.35:
        seed, shapes, written = rng.choice(drafts.pool)
    target = scene(seed, shapes)
    answer, pixels = target.svg(), rasterise(target.svg())
    ask = DRAW[0] if rng.random() < 0.5 else rng.choice(DRAW)
    parts = [ask, PICTURE] if rng.random() < 0.8 else [PICTURE, ask]
    task = Task([ChatMessage("user", parts)], [], [pixels], None if written else (seed, shapes))
    way = rng.random()
    if written:
        for code in written:
            _attempt(task, code)
    elif way < 0.33:
        rough = spoil(target, rng, rng.randint(1, 4))
        if way < 0.08:
            _attempt(task, rough.svg())
            rough = spoil(target, rng, 1)
        _attempt(task, rough.svg())
    elif way < 0.35:
        _attempt(task, _broken(answer, rng))
    if not (written and len(task.pictures) > 1 and differing(task.pictures[-1], pixels) == 0):
        task.messages += [_call(answer), ChatMessage("tool", [PICTURE])]
        task.learned.append(AGAIN if task.learned else FIRST)
        task.pictures.append(pixels)
    task.messages.append(ChatMessage("assistant", [DONE]))
    task.learned.append(WORDS)
    return task


def _attempt(task: Task, code: str) -> None:
    """A draft that is shown but not learned, with what came of it."""
    try:
        task.pictures.append(rasterise(code))
        result = [PICTURE]
    except ValueError as error:
        result = [str(error)]
    task.messages += [_call(code), ChatMessage("tool", result)]
    task.learned.append(NOTHING)


def _broken(code: str, rng: random.Random) -> str:
    """The code with a slip that an XML reader refuses."""
    places = [i for i, c in enumerate(code) if c in '"/>' and i > 5]
    at = rng.choice(places)
    return code[:at] + code[at + 1 :]


def _questions(of: Scene) -> list[tuple[str, str]]:
    """Questions about a scene with their answers."""
    largest = of.shapes[0] if of.shapes else Shape("rect", (), "red")
    name = {"rect": "rectangle", "polygon": "triangle"}.get(largest.tag, largest.tag)
    return [
        ("How many shapes are there?", str(len(of.shapes))),
        ("What color is the background?", of.ground.capitalize() + "."),
        ("What is the largest shape?", f"A {largest.color} {name}."),
    ]


def talking_task(rng: random.Random, shapes: int) -> Task:
    """A question about a picture, or small talk."""
    if rng.random() < 0.4:
        questions, answer = rng.choice(SMALL_TALK)
        return Task([ChatMessage("user", [rng.choice(questions)]), ChatMessage("assistant", [answer])], [WORDS])
    of = scene(rng.randrange(HELD_OUT), shapes)
    question, answer = rng.choice(_questions(of))
    messages = [ChatMessage("user", [question, PICTURE]), ChatMessage("assistant", [answer])]
    return Task(messages, [WORDS], [rasterise(of.svg())])


class Drafts:
    """Drafts of the model's own, read from a folder as they appear, the newest files only.

    A file is a JSON list of [seed, shapes, [svg, …]], the svgs being its rounds on that scene.
    """

    KEPT_FILES = 12

    def __init__(self, folder: Path) -> None:
        self.folder, self.pool, self._files = folder, [], []

    def refresh(self) -> None:
        files = sorted(self.folder.glob("drafts-*.json"))[-self.KEPT_FILES :]
        if files != self._files:
            self._files = files
            self.pool = [tuple(item) for file in files for item in json.loads(file.read_text())]


class Layout:
    """Turns tasks into token ids under a header, as `m3agent.chat` renders them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.control = {name: tokenizer.control_id(name) for name in ("]~b]", "[e~[", "</mm:think>")}
        self.ai = tokenizer.encode("ai\n")
        self.header = lru_cache(maxsize=None)(self._header)

    def _header(self, instructions: str, tools: bool) -> list[int]:
        return encode(render(self._opening(instructions), self._tools(tools), "disabled", False), self.tokenizer).ids

    @staticmethod
    def _opening(instructions: str) -> list[ChatMessage]:
        return [ChatMessage("system", [instructions])]

    @staticmethod
    def _tools(tools: bool) -> list[dict[str, object]]:
        return [RENDER_TOOL] if tools else []

    def task(
        self, task: Task, instructions: str, tools: bool, prompt: bool = False
    ) -> tuple[list[int], list[int], list[int]]:
        """ids, what each of them teaches, and where pictures start, all counted from the end of the header."""
        segments = render(self._opening(instructions) + task.messages, self._tools(tools), "disabled", prompt)
        whole = encode(segments, self.tokenizer)
        start = len(self.header(instructions, tools))
        ids = whole.ids[start:]
        return ids, self._learned(ids, task.learned), [offset - start for offset, _ in whole.media]

    def _learned(self, ids: list[int], turns: list[int]) -> list[int]:
        """A turn's lesson from after `</mm:think>` to `[e~[`, which is what the model generates; NOTHING elsewhere."""
        learn, lessons, lesson = [NOTHING] * len(ids), iter(turns), NOTHING
        opening = [self.control["]~b]"], *self.ai, self.control["</mm:think>"]]
        for i, token in enumerate(ids):
            learn[i] = lesson
            if token == self.control["[e~["]:
                lesson = NOTHING
            elif token == opening[-1] and ids[i - len(opening) + 1 : i + 1] == opening:
                lesson = next(lessons, NOTHING)
        return learn


def row(
    seed: int, layout: Layout, length: int, pictures: int, shapes: int, drafts: Drafts | None, hard: bool = False
) -> Row:
    """One conversation of up to `length` tokens and `pictures` pictures; scenes of 1 to `shapes` shapes.

    `hard` takes the larger of two draws for the number of shapes.
    """
    rng = random.Random(f"row {seed}")
    instructions = INSTRUCTIONS[0] if rng.random() < 0.6 else rng.choice(INSTRUCTIONS)
    tools = rng.random() < 0.95
    ids = list(layout.header(instructions, tools))
    learn, shown, offsets, first = [NOTHING] * len(ids), [], [], None
    while True:
        count = max(rng.randint(1, shapes), rng.randint(1, shapes) if hard else 1)
        task = drawing_task(rng, count, drafts) if tools and rng.random() < 0.93 else talking_task(rng, count)
        more, more_learn, at = layout.task(task, instructions, tools)
        if len(ids) + len(more) > length or len(shown) + len(task.pictures) > pictures:
            return Row(np.array(ids), np.array(learn, np.int8), shown, offsets, first)
        if first is None and task.made_from:
            first = (*task.made_from, len(shown))
        offsets += [len(ids) + offset for offset in at]
        ids += more
        learn += more_learn
        shown += task.pictures
