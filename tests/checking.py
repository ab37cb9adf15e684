"""Checks of the types and shapes in signatures, in a fraction of the time that jaxtyping's own decorator takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

_thorough = jaxtyping.jaxtyped
_dimensions = jaxtyping.jaxtyped("context")
_check = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
_calls: dict[int, int] = {}
"""Number of calls of each function since the test began, by the identity of the function's code. Functions that are
defined anew in each call of another function share their code."""


def begin_test() -> None:
    """Count calls from 0, so that the choice of checked calls does not depend on earlier tests."""
    _calls.clear()


def check_signatures_quickly() -> None:
    """Make `--jaxtyping-packages` decorate functions with `quick` instead of `jaxtyping.jaxtyped`, which binds every
    argument and checks it twice in each call. Packages that are already imported keep their decorators."""
    jaxtyping.jaxtyped = quick  # the code that the option adds to a module looks the decorator up there


def quick(*, typechecker: Any) -> Callable[[Any], Any]:
    """Return a decorator of functions and classes that checks arguments and results in the first, second, fourth,
    eighth and so on call of each test. Functions inside of functions are checked in the first call alone, because their
    checks are made anew for each. The dimensions of shapes agree within a call, as in jaxtyping. Generators, and
    functions with shapes that name arguments, are checked by jaxtyping's own decorator."""

    def decorate(target: Any) -> Any:
        if inspect.isclass(target):
            own = vars(target).get("__init__")
            if dataclasses.is_dataclass(target) and own is not None and not hasattr(own, "__wrapped__"):
                target.__init__ = _sampled(own, _checked)  # type: ignore[misc]
            return target
        names_arguments = "{" in "".join(map(str, target.__annotations__.values()))  # Float[Tensor, "{count}"]
        if names_arguments or inspect.isgeneratorfunction(target):
            return _sampled(target, _thorough(typechecker=typechecker))
        return _sampled(target, _checked)

    return decorate


def _sampled(function: Callable[..., Any], decorator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, or `function` with checks in some calls. Checks are made when they are
    first needed, because making them takes about a millisecond."""
    if not function.__annotations__:
        return function
    is_inner = "<locals>" in function.__qualname__
    annotations = {} if is_inner else _resolved(function)
    key = id(function.__code__)
    checked: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:  # first, because the compiler makes a graph for each number of calls
            return function(*args, **kwargs)
        _calls[key] = number = _calls.get(key, 0) + 1
        if number > 1 if is_inner else number & (number - 1):  # the latter is 0 for powers of two
            return function(*args, **kwargs)
        if checked is None:
            checked = decorator(_copied(function, _resolved(function) if is_inner else annotations))
        return checked(*args, **kwargs)

    return call


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    checked = _check(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _dimensions:
            return checked(*args, **kwargs)

    return call


def _copied(function: Callable[..., Any], annotations: dict[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function with other annotations."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, annotations
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _resolved(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be evaluated when a function is defined. As in jaxtyping, names that are imported
    for the type checker alone, or defined further down, stand for anything."""
    found = {}
    for name, annotation in function.__annotations__.items():
        with contextlib.suppress(Exception):
            found[name] = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    return found
