"""Checks of the types and shapes in signatures, in a fraction of the time that jaxtyping's own decorator takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

__all__ = ["check_signatures_quickly"]

_thorough = jaxtyping.jaxtyped
_dimensions = jaxtyping.jaxtyped("context")
_check = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def check_signatures_quickly() -> None:
    """Make `--jaxtyping-packages` decorate functions with `quick` instead of `jaxtyping.jaxtyped`, which binds every
    argument and checks it twice in each call. Packages that are already imported keep their decorators."""
    jaxtyping.jaxtyped = quick  # the code that the option adds to a module looks the decorator up there


def quick(*, typechecker: Any) -> Callable[[Any], Any]:
    """Return a decorator of functions and classes that checks arguments and results once per call. The dimensions of
    shapes agree within a call, as in jaxtyping. Generators, and functions with shapes that name arguments, keep
    jaxtyping's own decorator."""

    def decorate(target: Any) -> Any:
        if inspect.isclass(target):
            own = vars(target).get("__init__")
            if dataclasses.is_dataclass(target) and own is not None and not hasattr(own, "__wrapped__"):
                target.__init__ = _checked(own)  # type: ignore[misc]
            return target
        names_arguments = "{" in "".join(map(str, target.__annotations__.values()))  # Float[Tensor, "{count}"]
        if names_arguments or inspect.isgeneratorfunction(target):
            return _thorough(target, typechecker=typechecker)
        return _checked(target)

    return decorate


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    annotations = function.__annotations__
    function.__annotations__ = _resolved(function)
    checked = _check(function)
    function.__annotations__ = annotations
    if checked is function:  # because nothing is annotated
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        with _dimensions:
            return checked(*args, **kwargs)

    return call


def _resolved(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations that can be evaluated when a function is defined. As in jaxtyping, names that are imported
    for the type checker alone, or defined further down, stand for anything."""
    found = {}
    for name, annotation in function.__annotations__.items():
        with contextlib.suppress(Exception):
            found[name] = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    return found
