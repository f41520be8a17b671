"""What the model is shown of a function, and what the function receives of a call."""

from __future__ import annotations

import base64
import datetime
import enum
import json
import threading
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import numpy as np
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pil

import m3agent as m3


def received(tool: m3.Tool[..., Any], /, **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    return tool.bind(arguments, m3.Context(tool.name, "call_1"))


def properties(tool: m3.Tool[..., Any]) -> dict[str, Any]:
    return tool.parameters["properties"]


def test_the_definition_is_exact() -> None:
    @m3.tool
    async def render(code: str) -> m3.Image:
        """Render SVG code and look at the picture."""
        raise NotImplementedError

    assert json.dumps(render.definition) == (
        '{"name": "render", "description": "Render SVG code and look at the picture.", "parameters": '
        '{"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}'
    )


def test_no_parameters_no_description() -> None:
    assert m3.tool(lambda: 1, name="one").definition == {
        "name": "one",
        "parameters": {"type": "object", "properties": {}},
    }


class Shelf(enum.Enum):
    top = "t"
    low = "l"


class Fur(str, enum.Enum):  # noqa: UP042
    short = "s"
    long = "l"


@dataclass
class Point:
    """A place."""

    x: int
    y: float = 0.0


class Order(pydantic.BaseModel):
    id: int
    title: str = pydantic.Field(description="what it is called")
    at: Point | None = None


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


CASES: list[tuple[Any, dict[str, Any], Any, Any]] = [
    (int, {"type": "integer"}, 3, 3),
    (Literal["north", "south"], {"type": "string", "enum": ["north", "south"]}, "north", "north"),
    (Shelf, {"type": "string", "enum": ["t", "l"]}, "l", Shelf.low),
    (list[int], {"type": "array", "items": {"type": "integer"}}, [1, 2], [1, 2]),
    (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1}, {"a": 1.0}),
    (
        datetime.datetime,
        {"type": "string", "format": "date-time"},
        "2026-01-02T03:04:05",
        datetime.datetime(2026, 1, 2, 3, 4, 5),
    ),
    (datetime.date, {"type": "string", "format": "date"}, "2026-01-02", datetime.date(2026, 1, 2)),
    (Path, {"type": "string", "format": "path"}, "a/b.txt", Path("a/b.txt")),
    (bytes, {"type": "string", "format": "base64url"}, base64.b64encode(b"\xff\xfe?").decode(), b"\xff\xfe?"),
    (
        Point,
        {
            "type": "object",
            "description": "A place.",
            "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.0}},
            "required": ["x"],
        },
        {"x": 1},
        Point(1, 0.0),
    ),
    (tuple[int, str], None, [1, "a"], (1, "a")),
    (set[int], {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 2], {1, 2}),
    (
        Annotated[int, pydantic.Field(ge=1, description="how many")],
        {"type": "integer", "description": "how many", "minimum": 1},
        2,
        2,
    ),
]


@pytest.mark.parametrize(("hint", "schema", "sent", "arrived"), CASES, ids=lambda value: str(value)[:30])
def test_types(hint: Any, schema: dict[str, Any] | None, sent: Any, arrived: Any) -> None:
    def use(value):
        pass

    use.__annotations__ = {"value": hint}
    tool = m3.tool(use)
    if schema is not None:
        assert properties(tool)["value"] == schema
    _, kwargs = received(tool, value=sent)
    assert kwargs == {"value": arrived}
    assert type(kwargs["value"]) is type(arrived)


def test_models_stand_in_place_and_recursive_ones_by_reference() -> None:
    @m3.tool
    def take(order: Order, tree: Tree) -> None: ...

    order = properties(take)["order"]
    assert order["properties"]["title"] == {"type": "string", "description": "what it is called"}
    assert order["properties"]["at"]["anyOf"][0]["properties"]["x"] == {"type": "integer"}
    assert properties(take)["tree"] == {"$ref": "#/$defs/Tree"}
    assert list(take.parameters["$defs"]) == ["Tree"]
    _, kwargs = received(take, order={"id": 1, "title": "x"}, tree={"name": "a", "children": [{"name": "b"}]})
    assert kwargs["order"] == Order(id=1, title="x")
    assert kwargs["tree"].children[0] == Tree(name="b")


@pytest.mark.parametrize("hint", [Optional[int], int | None, Union[int, None]], ids=str)  # noqa: UP007, UP045
def test_schema_01_optional_without_a_default_is_required_and_nullable(hint: Any) -> None:
    def t(p1, p2):
        pass

    t.__annotations__ = {"p1": str, "p2": hint}
    tool = m3.tool(t)
    assert tool.parameters == {
        "type": "object",
        "properties": {"p1": {"type": "string"}, "p2": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "required": ["p1", "p2"],
    }
    assert received(tool, p1="a", p2=None) == ([], {"p1": "a", "p2": None})
    with pytest.raises(m3.ToolError, match="p2: Field required"):
        received(tool, p1="a")


def test_schema_01_optional_with_a_default_is_not_required() -> None:
    @m3.tool
    def t(p1: str, p2: int | None = None) -> None: ...

    assert t.parameters["required"] == ["p1"]
    assert received(t, p1="a") == ([], {"p1": "a"})


def test_schema_03_parameters_before_star_args_bind_once() -> None:
    @m3.tool
    def f(first: str, second: str = "s", *rest: int, last: bool = False) -> tuple[Any, ...]:
        """F.

        Args:
            *rest: the others
        """
        return (first, second, rest, last)

    assert properties(f)["rest"] == {"type": "array", "description": "the others", "items": {"type": "integer"}}
    assert f.parameters["required"] == ["first"]
    args, kwargs = received(f, first="a", rest=[1, 2], last=True)
    assert f(*args, **kwargs) == ("a", "s", (1, 2), True)
    args, kwargs = received(f, first="a")
    assert f(*args, **kwargs) == ("a", "s", (), False)


def test_positional_only_parameters() -> None:
    @m3.tool
    def f(a: int, b: int = 2, /, c: int = 3) -> tuple[int, int, int]:
        return (a, b, c)

    args, kwargs = received(f, a=1, c=9)
    assert f(*args, **kwargs) == (1, 2, 9)


NAMES = (
    "agent name kind summary title default properties args context call_id session self_ cls type id model_config "
    "model_fields schema json copy dict description required items tool function arguments arg0 _private class_ ctx"
)


@pytest.mark.parametrize("name", NAMES.split())
def test_schema_05_ordinary_names_are_ordinary_parameters(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def f({name}: str, other: int = 1): return {name}", scope)
    tool = m3.tool(scope["f"])
    assert properties(tool) == {name: {"type": "string"}, "other": {"type": "integer", "default": 1}}
    args, kwargs = received(tool, **{name: "value"})
    assert tool(*args, **kwargs) == "value"


def test_schema_05_only_the_annotation_injects() -> None:
    @m3.tool
    def f(context: str, ctx: m3.Context, *rest: int, other: m3.Context | None = None) -> tuple[Any, ...]:
        return (context, ctx, rest, other)

    assert list(properties(f)) == ["context", "rest"]
    context = m3.Context("f", "call_7")
    args, kwargs = f.bind({"context": "x", "rest": [1]}, context)
    assert f(*args, **kwargs) == ("x", context, (1,), context)


def test_schema_08_defaults_that_cannot_be_compared_or_written() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("never compare me")

    odd = Odd()

    @m3.tool
    def f(
        mask=np.zeros(3),  # noqa: B008
        odd: Any = odd,
        when: datetime.date = datetime.date(2026, 1, 2),
        n: float = float("nan"),
    ):
        return mask

    assert properties(f) == {
        "mask": {},
        "odd": {},
        "when": {"type": "string", "format": "date", "default": "2026-01-02"},
        "n": {"type": "number"},
    }
    assert "required" not in f.parameters
    assert received(f) == ([], {})
    repr(f)


def test_schema_10_typed_dicts() -> None:
    class Old(typing.TypedDict, total=False):
        a: typing.Required[int]

    class New(typing_extensions.TypedDict, total=False):
        a: typing_extensions.Required[int]
        b: str

    with pytest.raises(m3.ToolDefinitionError, match=r"tool 'f', parameter 'td'.*typing_extensions.TypedDict"):

        @m3.tool
        def f(td: Old) -> None: ...

    @m3.tool
    def g(td: New) -> None: ...

    assert properties(g)["td"]["required"] == ["a"]
    assert received(g, td={"a": 1}) == ([], {"td": {"a": 1}})


def test_schema_11_enums_and_literals() -> None:
    @m3.tool
    def f(fur: Fur, maybe: Fur | None, mixed: Literal["a", 1, None]) -> None: ...

    assert properties(f) == {
        "fur": {"type": "string", "enum": ["s", "l"]},
        "maybe": {"anyOf": [{"type": "string", "enum": ["s", "l"]}, {"type": "null"}]},
        "mixed": {"enum": ["a", 1, None]},
    }
    _, kwargs = received(f, fur="s", maybe="l", mixed=1)
    assert kwargs == {"fur": Fur.short, "maybe": Fur.long, "mixed": 1}
    assert isinstance(kwargs["fur"], Fur)
    _, kwargs = received(f, fur="s", maybe=None, mixed=None)
    assert kwargs["maybe"] is None
    with pytest.raises(m3.ToolError, match="fur: Input should be"):
        received(f, fur=None, maybe=None, mixed=None)


def test_classes_of_the_enclosing_function_are_found() -> None:
    class Local(pydantic.BaseModel):
        n: int

    @m3.tool(description="D")
    def f(local: Local) -> None: ...

    assert received(f, local={"n": 1})[1]["local"] == Local(n=1)
    assert f.description == "D"


class Shop:
    def __init__(self) -> None:
        self.closed = False

    def close(self, hard: bool) -> bool:
        """Close the shop."""
        self.closed = hard
        return hard


def test_methods() -> None:
    shop = Shop()
    close = m3.tool(shop.close)
    assert close.definition["parameters"]["required"] == ["hard"]
    args, kwargs = received(close, hard=True)
    close(*args, **kwargs)
    assert shop.closed
    with pytest.raises(m3.ToolDefinitionError, match=r"m3agent.tool\(instance.close\)"):
        m3.tool(Shop.close)


class Unknown:
    pass


def unsupported() -> list[tuple[Any, str]]:
    def unknown(a: int, b: Unknown) -> None: ...
    def inside(b: list[Unknown]) -> None: ...
    def picture(b: m3.Image) -> None: ...
    def pictures(b: list[m3.Image] | None) -> None: ...
    def words(**b: int) -> None: ...
    def closure(b: typing.Callable[[], int]) -> None: ...
    def reserved(invoke: str) -> None: ...
    def lost(b: NotThere) -> None: ...  # noqa: F821  # pyright: ignore

    return [
        (unknown, "parameter 'b': Unknown has no JSON form"),
        (inside, "parameter 'b'"),
        (picture, "parameter 'b': a model cannot write a picture"),
        (pictures, "parameter 'b': a model cannot write a picture"),
        (words, r"parameter '\*\*b'"),
        (closure, "parameter 'b'"),
        (reserved, "parameter name 'invoke'"),
        (lost, "NotThere"),
    ]


@pytest.mark.parametrize(("function", "message"), unsupported(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_has_no_schema_is_refused_by_name(function: Any, message: str) -> None:
    with pytest.raises(m3.ToolDefinitionError, match=f"tool '{function.__name__}'.*{message}"):
        m3.tool(function)


@dataclass
class Framed:
    picture: m3.Image
    window: Unknown | None = None


@pytest.mark.parametrize(
    "hint",
    [
        str,
        None,
        list[str | m3.Image],
        m3.Video,
        Pil.Image,
        tuple[str, Pil.Image],
        Order,
        Literal["a"],
        Any,
        Annotated[int, "x"],
    ],
    ids=str,
)
def test_image_10_declared_results(hint: Any) -> None:
    def f():
        pass

    f.__annotations__ = {"return": hint}
    m3.tool(f)


@pytest.mark.parametrize("hint", [Unknown, list[Unknown], dict[str, Unknown], Framed], ids=str)
def test_image_10_unknown_results_are_refused(hint: Any) -> None:
    def f():
        pass

    f.__annotations__ = {"return": hint}
    with pytest.raises(m3.ToolDefinitionError, match="neither text, JSON nor a picture"):
        m3.tool(f)


def test_generators_yield_what_a_result_may_be() -> None:
    def f() -> typing.Iterator[int]:
        yield 1

    def g() -> typing.Iterator[threading.Lock]:
        yield threading.Lock()

    assert m3.tool(f).parameters == {"type": "object", "properties": {}}
    with pytest.raises(m3.ToolDefinitionError, match="neither text, JSON nor a picture"):
        m3.tool(g)


def test_nameless_functions_are_refused() -> None:
    with pytest.raises(m3.ToolDefinitionError, match="<lambda>"):
        m3.tool(lambda: 1)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_any_arguments_are_typed_or_refused_with_a_short_text(arguments: dict[str, Any]) -> None:
    try:
        args, kwargs = received(HARD, **arguments)
    except m3.ToolError as error:
        refused = str(error)
    else:
        refused = "typed"
        assert args == []
        assert isinstance(kwargs["n"], int)
    assert 0 < len(refused) <= 800


@m3.tool
def HARD(n: int, order: Order | None = None, points: list[Point] | None = None) -> None: ...


def test_errors_name_the_place_and_stay_short() -> None:
    with pytest.raises(m3.ToolError, match=r"points\.1\.x: Input should be a valid integer"):
        received(HARD, n=1, points=[{"x": 1}, {"x": "no"}])
    with pytest.raises(m3.ToolError, match="and 95 more") as caught:
        received(HARD, n=1, points=[{"x": "no"}] * 100)
    assert len(str(caught.value)) <= 800


@pytest.mark.parametrize(
    "docstring",
    [
        "Args:\n    a (int): the\n        first one\nKeyword Args:\n    k: the key\nReturns:\n    nothing",
        "Parameters\n----------\na\n    the\n    first one\n\nOther Parameters\n----------------\nk\n    the key\n",
        ":param int a: the\n    first one\n:keyword k: the key\n:returns: nothing",
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_schema_07_descriptions_from_any_docstring(docstring: str) -> None:
    def f(a: int, *, k: str = "") -> None: ...

    f.__doc__ = f"Do it.\n\nSlowly, and\nwith care.\n\n{docstring}"
    tool = m3.tool(f)
    assert tool.description == "Do it.\n\nSlowly, and\nwith care."
    assert properties(tool)["a"]["description"] == "the\nfirst one"
    assert properties(tool)["k"]["description"] == "the key"


@pytest.mark.parametrize(
    "docstring", ["Args:\n    a: one", "Parameters\n----------\na : int\n    one", ":param a: one"], ids=["g", "n", "s"]
)
def test_a_docstring_that_opens_with_its_parameters(docstring: str) -> None:
    def f(a: int) -> None: ...

    f.__doc__ = docstring
    tool = m3.tool(f)
    assert properties(tool)["a"]["description"] == "one"
    assert "description" not in tool.definition


def test_schema_07_a_documented_name_that_is_no_parameter_warns() -> None:
    def f(a: int, context: m3.Context) -> None:
        """F.

        Args:
            a: one
            b: two
            context: known to Python only
        """

    with pytest.warns(UserWarning, match=r"tool 'f'.*'b', which is no parameter"):
        m3.tool(f)


@given(st.text(max_size=200))
def test_any_docstring_is_read(docstring: str) -> None:
    def f(a: int) -> None: ...

    f.__doc__ = docstring
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        m3.tool(f)
