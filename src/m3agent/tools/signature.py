"""A function's signature with its types resolved, and the way from named values back to a call of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from m3agent.errors import ToolDefinitionError
from m3agent.tools.context import Context

MISSING: Any = inspect.Parameter.empty


@dataclass(frozen=True)
class Parameter:
    """One parameter. `hint` of `*rest: int` is `list[int]`; a parameter without annotation has `Any`."""

    name: str
    hint: Any
    default: Any  # MISSING where there is none; only ever compared with `is`
    positional: bool  # has to be passed by position
    variadic: bool  # `*rest`
    injected: bool  # annotated Context: filled by the session, unseen by the model

    @property
    def required(self) -> bool:
        return self.default is MISSING and not self.variadic


@dataclass(frozen=True)
class Signature:
    """`parameters` in the function's order; `returns` is MISSING without an annotation."""

    parameters: tuple[Parameter, ...]
    returns: Any

    def bind(self, values: Mapping[str, Any], context: Context) -> tuple[list[Any], dict[str, Any]]:
        """(args, kwargs) of the call. Parameters absent from `values` keep the function's own defaults."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.variadic:
                args.extend(values.get(parameter.name, ()))
            elif parameter.positional:
                args.append(context if parameter.injected else values.get(parameter.name, parameter.default))
            elif parameter.injected:
                kwargs[parameter.name] = context
            elif parameter.name in values:
                kwargs[parameter.name] = values[parameter.name]
        return args, kwargs


def body_of(function: Callable[..., Any], *, unwrap: bool = True) -> Callable[..., Any]:
    """The function that is written out: behind partials, objects that can be called, classes and, with `unwrap`,
    decorators that follow `functools.wraps`.
    """
    while True:
        if (bound := as_partial(function)) is not None:
            function = bound.func
        elif unwrap and hasattr(function, "__wrapped__"):
            function = inspect.unwrap(function)
        elif isinstance(function, type):
            return function.__init__
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def as_partial(function: Callable[..., Any]) -> partial[Any] | None:
    return cast("partial[Any]", function) if isinstance(function, partial) else None


def bound_names(function: Callable[..., Any]) -> set[str]:
    """Parameters whose values a partial holds."""
    bound = as_partial(function)
    if bound is None:
        return set()
    return set(inspect.signature(bound.func).parameters) - {parameter.name for parameter in _free(bound)}


def _free(function: partial[Any]) -> list[inspect.Parameter]:
    """The parameters of a partial that have no value yet. By keyword bound ones could still be given another; they are
    the program's, not the model's.
    """
    # Of a new one: `functools.update_wrapper` would make it look as if nothing were bound.
    signature = inspect.signature(partial(function.func, *function.args, **function.keywords))
    return [parameter for name, parameter in signature.parameters.items() if name not in function.keywords]


def read_signature(function: Callable[..., Any], tool: str, local_names: Mapping[str, Any]) -> Signature:
    """Read `function`. `local_names` are looked up too, for annotations that name something in an enclosing function.

    Raises ToolDefinitionError for annotations that cannot be resolved, for `**kwargs`, and for a method without its
    object.
    """
    bound = as_partial(function)
    try:
        found = list(inspect.signature(function).parameters.values()) if bound is None else _free(bound)
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(f"tool {tool!r}: its signature cannot be read ({error}); wrap it in a def") from error
    hints = _hints(function, tool, local_names)
    kinds = [parameter.kind for parameter in found]
    by_position = inspect.Parameter.VAR_POSITIONAL in kinds
    parameters: list[Parameter] = []
    for position, parameter in enumerate(found):
        name = parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            raise ToolDefinitionError(
                f"tool {tool!r}, parameter '**{name}': the model has to be told every name; "
                "write the parameters out, or take one dict"
            )
        if position == 0 and name not in hints and _is_loose_method(function):
            raise ToolDefinitionError(
                f"tool {tool!r}, parameter {name!r}: this is a method without its object; "
                f"make the tool from a bound method, m3agent.tool(instance.{function.__name__})"
            )
        hint = hints.get(name, Any)
        variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        positional = parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            by_position and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        parameters.append(
            Parameter(
                name, list[hint] if variadic else hint, parameter.default, positional, variadic, _wants_context(hint)
            )
        )
    return Signature(tuple(parameters), hints.get("return", MISSING))


def _hints(function: Callable[..., Any], tool: str, local_names: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return get_type_hints(body_of(function), localns=dict(local_names), include_extras=True)
    except Exception as error:
        raise ToolDefinitionError(
            f"tool {tool!r}: an annotation cannot be resolved ({error}); import the name where the function is defined"
        ) from error


def _is_loose_method(function: Callable[..., Any]) -> bool:
    if inspect.ismethod(function):
        return False
    scope = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(scope) and not scope.endswith("<locals>")


def _wants_context(hint: Any) -> bool:
    if get_origin(hint) in (Annotated, Union, UnionType):
        return any(_wants_context(part) for part in get_args(hint))
    return hint is Context or get_origin(hint) is Context


def type_name(hint: Any) -> str:
    """How an error message names a type."""
    return hint.__name__ if isinstance(hint, type) else str(hint)
