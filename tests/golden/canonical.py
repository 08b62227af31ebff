"""Canonical instances of any struct, made from its field types alone: no name of a class or field is in here.

Field by field in the order of declaration, values count up, so that two fields of one type that change places are
noticed. There are as many instances of a type as its longest choice has members (an enumeration, a union, None or
not), and one more that has nothing but the required fields.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, get_args

import msgspec
from msgspec import inspect

from baton.types import plain

Special = dict[type, Callable[[int, bool], Any]]
"""Type → what makes its instances where field types alone do not decide what is allowed."""


class Canonical:
    """Makes instances."""

    def __init__(self, special: Special) -> None:
        self._special = special

    def instances(self, kind: Any) -> list[Any]:
        """Return the distinct canonical instances of a type, always the same ones."""
        info = inspect.type_info(kind)
        wanted = [(number, False) for number in range(self._choices(info))] + [(0, True)]
        found: list[Any] = []
        for choice, is_least in wanted:
            made = self.make(kind, choice, is_least)
            if not any(_packed(made) == _packed(other) for other in found):
                found.append(made)
        return found

    def make(self, kind: Any, choice: int, is_least: bool) -> Any:
        """Return one instance: of its choices this one, with all fields or only those that are required."""
        return self._make(inspect.type_info(kind), choice, is_least, count(1))

    def _choices(self, info: Any) -> int:
        match info:
            case inspect.EnumType(cls=cls):
                return len(cls)
            case inspect.LiteralType(values=values):
                return len(values)
            case inspect.UnionType(types=types):
                return max([len(types), *map(self._choices, types)])
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                return self._choices(item)
            case inspect.DictType(value_type=value):
                return self._choices(value)
            case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
                return 2 if cls in self._special else max([1, *(self._choices(field.type) for field in fields)])
            case inspect.Metadata(type=inner):
                return self._choices(inner)
        return 2 if isinstance(info, inspect.BoolType) else 1

    def _make(self, info: Any, choice: int, is_least: bool, numbers: Iterator[int]) -> Any:
        match info:
            case inspect.Metadata(type=inner):
                return self._make(inner, choice, is_least, numbers)
            case inspect.StructType(cls=cls, fields=fields) | inspect.DataclassType(cls=cls, fields=fields):
                if cls in self._special:
                    return self._special[cls](choice, is_least)
                given = [f for f in fields if f.required or not is_least]
                return cls(**{f.name: self._make(f.type, choice, is_least, numbers) for f in given})
            case inspect.UnionType(types=types):
                ordered = sorted(types, key=lambda each: isinstance(each, inspect.NoneType))
                return self._make(ordered[choice % len(ordered)], choice, is_least, numbers)
            case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
                made = [self._make(item, choice + number, is_least, numbers) for number in range(2)]
                return tuple(made) if isinstance(info, inspect.VarTupleType) else made
            case inspect.TupleType(item_types=items):
                return tuple(self._make(item, choice, is_least, numbers) for item in items)
            case inspect.DictType(key_type=key, value_type=value):
                return {self._make(key, 0, is_least, numbers): self._make(value, choice, is_least, numbers)}
            case inspect.EnumType(cls=cls):
                return list(cls)[choice % len(cls)]
            case inspect.LiteralType(values=values):
                return values[choice % len(values)]
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return choice % 2 == 0
            case inspect.IntType():
                return next(numbers)
            case inspect.FloatType():
                return next(numbers) + 0.5
            case inspect.StrType():
                return f"text {next(numbers)} é"
            case inspect.BytesType():
                return bytes([0, next(numbers) % 256, 255])
            case inspect.AnyType():
                return next(numbers)
            case inspect.DateTimeType():
                return datetime.datetime(2026, 1, next(numbers), tzinfo=datetime.UTC)
        raise AssertionError(f"no canonical instance of {info}")


def _packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value, enc_hook=plain)


def members(union: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(union) or (union,)


def tag_of(kind: Any) -> str:
    """Return the tag in a struct's bytes."""
    return str(kind.__struct_config__.tag)
