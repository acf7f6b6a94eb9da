"""Check that class attributes of a user's class have the types that its base declares."""

from collections.abc import Callable, Iterator
from functools import cached_property
from inspect import isfunction, signature
from typing import Any, ClassVar, get_origin


def check_class(cls: type) -> None:
    """Raise ValueError for the first class attribute, of a user's class, of another type than the base in marl declares."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("marl.")]
    if cls in ours:
        return
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # only where there is such a class

    for base in ours:
        for fact, hint, words in declared(base):
            value = getattr(cls, fact)
            if isinstance(value, property | cached_property) and hint is not Callable:
                continue
            try:
                plain = tuple(value) if isinstance(value, list) else value
                TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(plain, strict=True)
            except ValidationError:
                raise ValueError(
                    f"{cls.__module__}.{cls.__qualname__}: {fact} = {value!r}; expected {words}, as {base.__name__} declares"
                ) from None


def declared(base: type) -> Iterator[tuple[str, Any, str]]:
    """A base's public class attributes, properties and methods: the name, the type, and the type in words."""
    for fact, hint in vars(base).get("__annotations__", {}).items():
        if get_origin(hint) is ClassVar:
            (kind,) = hint.__args__
            yield fact, kind, f"{name_of(kind)}, such as {getattr(base, fact, None)!r}"
    for fact, value in vars(base).items():
        if isfunction(value) and not fact.startswith("_"):
            yield fact, Callable, f"a method, def {fact}{signature(value)}"
        elif isinstance(value, property) and not isinstance(hint := value.fget.__annotations__.get("return"), str):
            yield fact, hint, f"{name_of(hint)}, or a property"


def name_of(hint: Any) -> str:
    return hint.__name__ if type(hint) is type else str(hint)
