"""Answers in a type of yours: the model cannot write anything else, and you get the validated value.

python examples/structured_output.py [PICTURE] [--model FOLDER_OR_HUB_ID]

The form is certain with any model, also with the embedded m3-nano; what is said in it depends on the model.
"""

import argparse
from typing import Annotated, Literal

import anyio
from pydantic import BaseModel, Field

import m3agent as m3
from m3agent.loops import SvgRenderer

SCENE = '<svg viewBox="0 0 224 224"><circle cx="80" cy="100" r="40" fill="red"/></svg>'


class Shape(BaseModel):
    kind: Literal["circle", "rectangle", "triangle"]
    colour: Annotated[str, Field(max_length=12)]
    width: Annotated[int, Field(ge=1, le=224)]


class Picture(BaseModel):
    title: Annotated[str, Field(max_length=40)]
    shapes: Annotated[list[Shape], Field(min_length=1, max_length=4)]


async def main(picture: str | None, model: str | None) -> None:
    image = m3.Image(picture) if picture else SvgRenderer().render(SCENE)
    async with m3.Runtime.open(model) as runtime:
        reply = await m3.Agent(runtime, thinking="disabled").run(
            "What is in this picture?", image, output=Picture, max_tokens=400
        )
    if reply.stop == "end":
        for shape in reply.output.shapes:
            print(f"{shape.kind}, {shape.colour}, {shape.width} wide")
    print(f"[{reply.stop}; {reply.usage}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("picture", nargs="?")
    parser.add_argument("--model")
    options = parser.parse_args()
    anyio.run(main, options.picture, options.model)
