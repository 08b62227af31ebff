"""Cases that CI omits, because a cheaper test or another case holds the same law: `BATON_ALL_STAGES=1` runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
ALL = bool(os.environ.get("BATON_ALL_STAGES"))


def chosen(in_ci: Sequence[T], others: Sequence[T]) -> list[T]:
    """Return the cases of CI, or all."""
    return [*in_ci, *(others if ALL else ())]
