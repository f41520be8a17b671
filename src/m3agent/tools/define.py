"""`@tool`: a typed Python function becomes a `Tool` that a model can call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, get_args, overload

from m3agent.chat import check_tool_names
from m3agent.chat.grammar import unenforced
from m3agent.errors import ToolError
from m3agent.tools.arguments import Arguments, clip
from m3agent.tools.context import Context
from m3agent.tools.docs import read_doc
from m3agent.tools.hand_written import JsonArguments, JsonSignature
from m3agent.tools.options import ToolOptions, check_options
from m3agent.tools.results import check_return
from m3agent.tools.signature import MISSING, Signature, as_partial, body_of, bound_names, read_signature

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Tool(Generic[P, R]):
    """A function that the model may call; for Python it stays the function that it was.

    `parameters` is the JSON schema of its arguments: {"type": "object", "properties": {…}, "required": […]}.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[P, R] = field(repr=False)
    _signature: Signature | JsonSignature = field(repr=False)
    _arguments: Arguments | JsonArguments = field(repr=False)
    needs_approval: bool | Callable[..., Any] = field(default=False, repr=False)
    timeout: float | None = field(default=None, repr=False)
    retries: int = field(default=0, repr=False)
    retry_on: tuple[type[Exception], ...] = field(default=(), repr=False)
    max_result: int | None = field(default=None, repr=False)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """JSON arguments → values in the declared types, by name. Raises ToolError with a text for the model."""
        try:
            return self._arguments.validate(arguments)
        except ToolError:
            raise
        except Exception as error:  # of a validator of the program's own, or of a value that none was written for
            raise ToolError(clip(f"Invalid arguments for {self.name}: {type(error).__name__}: {error}")) from error

    @property
    def definition(self) -> dict[str, Any]:
        """What the model is shown: name, description (left out when there is none) and parameters, in this order."""
        described = {"description": self.description} if self.description else {}
        return {"name": self.name, **described, "parameters": self.parameters}

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of the schema that guided decoding does not hold the model to, as `path: keyword`; the validation of
        a finished call does, but for the formats in `unchecked`.
        """
        return unenforced(self.parameters)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Formats of a hand-written schema that validation does not check, as `path: format`: those that JSON Schema
        does not know, or for which jsonschema needs packages that are not installed (`pip install jsonschema[format]`).
        """
        return self._arguments.unchecked

    def bind(self, arguments: Mapping[str, Any], context: Context) -> tuple[list[Any], dict[str, Any]]:
        """JSON arguments → (args, kwargs) in the declared types. Raises ToolError with a text for the model."""
        return self._signature.bind(self.validate(arguments), context)

    @staticmethod
    def from_schema(
        name: str,
        description: str,
        schema: Mapping[str, Any],
        function: Callable[..., Any],
        **options: Unpack[ToolOptions],
    ) -> Tool[..., Any]:
        """A tool from a hand-written JSON schema (2020-12) of its arguments, which is what the model is shown.

        `function(arguments)`, or `function(arguments, context)` with the second one annotated `m3agent.Context`, gets
        the validated JSON values as a dict; it may be asynchronous. options: see `ToolOptions`.
        Raises ToolDefinitionError.
        """
        arguments = JsonArguments(name, schema)
        signature = JsonSignature(function, name)
        told = check_options(name, options)
        return _checked(Tool(name, description, arguments.schema, function, signature, arguments, **told))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@overload
def tool(
    function: Callable[P, R],
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    **options: Unpack[ToolOptions],
) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    **options: Unpack[ToolOptions],
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    **options: Unpack[ToolOptions],
) -> Any:
    """Make a tool from a typed function, synchronous (run in a thread) or asynchronous: `@tool` or `@tool(name=…)`.

    The schema comes from the annotations, the descriptions from the docstring (Google, NumPy or Sphinx style) or from
    `Annotated[T, pydantic.Field(description=…)]`. The model's arguments arrive as the declared types. A parameter
    annotated `m3agent.Context` is filled by the session. The function may return text, anything with a JSON form,
    `m3agent.Image`, `m3agent.Video`, a Pillow image, or a list of these; `m3agent.ToolError` tells the model why a
    call failed. What a generator yields, plain or async, is progress while it runs, and its last value the result.

    Of a `functools.partial` the model sees the parameters that are not bound.

    schema: a JSON schema written by hand, instead of one from the annotations; see `Tool.from_schema`.
    options: see `ToolOptions`: approval, a time limit, retries.

    Raises ToolDefinitionError, which names the tool and the parameter. Warns (UserWarning) when the docstring
    describes a parameter that does not exist, and of what in the schema guided decoding cannot hold to.
    """
    local_names = _names_around_the_tool()

    def define(function: Callable[..., Any]) -> Tool[..., Any]:
        called = name or _name_of(function)
        if schema is not None:
            told = read_doc(_docstring_of(function)).description if description is None else description
            return Tool.from_schema(called, told, schema, function, **options)
        return _define(function, called, description, local_names, options)

    return define if function is None else define(function)


def _names_around_the_tool() -> dict[str, Any]:
    """Annotations may name classes of the function around the tool; they are found in that function's frame only."""
    frame = inspect.currentframe()
    try:
        caller = frame and frame.f_back and frame.f_back.f_back
        return dict(caller.f_locals) if caller else {}
    finally:
        del frame  # a frame that refers to itself is freed late


def _name_of(function: Callable[..., Any]) -> str:
    if (bound := as_partial(function)) is not None:
        return _name_of(bound.func)
    return getattr(function, "__name__", type(function).__name__)


def _docstring_of(function: Callable[..., Any]) -> str | None:
    """Its own, or that of the function behind a partial, or the class of an object that can be called."""
    if (bound := as_partial(function)) is not None:
        return vars(bound).get("__doc__") or _docstring_of(bound.func)
    written = inspect.isroutine(function) or isinstance(function, type)
    return function.__doc__ if written else type(function).__doc__


def _define(
    function: Callable[..., Any],
    name: str,
    description: str | None,
    local_names: Mapping[str, Any],
    options: ToolOptions,
) -> Tool[..., Any]:
    signature = read_signature(function, name, local_names)
    if signature.returns is not MISSING:
        check_return(name, _result_of(function, signature.returns))
    doc = read_doc(_docstring_of(function))
    descriptions = {documented.lstrip("*"): text for documented, text in doc.parameters.items()}
    known = {parameter.name for parameter in signature.parameters} | bound_names(function)
    for unknown in descriptions.keys() - known:
        warnings.warn(f"tool {name!r}: its docstring describes {unknown!r}, which is no parameter", stacklevel=3)
    shown = [parameter for parameter in signature.parameters if not parameter.injected]
    arguments = Arguments(name, shown, descriptions)
    made = Tool(
        name,
        doc.description if description is None else description,
        arguments.schema,
        function,
        signature,
        arguments,
        **check_options(name, options),
    )
    return _checked(made)


def _result_of(function: Callable[..., Any], returns: Any) -> Any:
    """The type of the result, which is what a generator yields."""
    plain = body_of(function)
    if not (inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)):
        return returns
    return next(iter(get_args(returns)), Any)


def _checked(made: Tool[..., Any]) -> Tool[..., Any]:
    check_tool_names(made.definition)
    # Of a set pydantic asks for unique items, and takes others as well.
    missed = [where for where in made.unenforced if not where.endswith("uniqueItems")]
    if missed:
        but = f", but the formats {', '.join(made.unchecked)} are not checked" if made.unchecked else ""
        warnings.warn(
            f"tool {made.name!r}: guided decoding does not hold the model to {', '.join(missed)}; a call that does not "
            f"fit is still refused when it is complete{but}",
            stacklevel=4,
        )
    return made
