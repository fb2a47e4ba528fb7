"""A property that is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazy_property(Generic[T]):
    """A property that is computed on first access and stored in the instance.

    `functools.cached_property` holds a lock, which breaks the graph of ``torch.compile``.
    """

    def __init__(self, compute: Callable[[Any], T]):
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: Any = None) -> T:
        value = self.compute(instance)
        # This descriptor has no __set__, so later reads find the instance's attribute first.
        object.__setattr__(instance, self.name, value)
        return value
