"""Tests mathematical equality with math-verify. Call only in the main thread of a process that can be killed."""

from __future__ import annotations

import importlib.util
import logging
import re
from functools import lru_cache
from typing import Any

from baton.errors import UserError
from baton.rewards.scorer_protocol import CallFailure, CallValue, Outcome
from baton.types import FailureCause

_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""Marks by which math-verify finds the mathematics in a text. `\\$` is a currency sign, not a mark."""


def check_installed() -> None:
    """Raise UserError with the installation command if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("math-verify is not installed: run `pip install 'baton-rl[math]'`")


def load() -> None:
    """Import math-verify in advance, so that the import does not count towards the deadline of the first call."""
    check_installed()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # suppresses math-verify's warning about disabled timeouts
    _parsed("1")


def math_score(answer: str | None, reference: str | None) -> Outcome:
    """Return 1 if answer and reference are mathematically equal, else 0. For example, `1/2` equals `\\frac{1}{2}`. The
    outcome is a failure if math-verify cannot read the reference, because then no answer could be correct."""
    if answer is None:
        return CallValue(0.0)
    if reference is None:
        return CallFailure(FailureCause.MALFORMED, "has no reference answer to compare with")
    if answer.strip() == reference.strip():
        return CallValue(1.0)
    import math_verify

    gold = _parsed(reference)
    if not gold:
        return CallFailure(FailureCause.MALFORMED, f"cannot read the reference {reference[:80]!r} as mathematics")
    # math-verify's own timeouts are disabled, because a timeout would look like an unreadable answer; if a call exceeds
    # its deadline, the process is killed instead
    return CallValue(float(math_verify.verify(gold, _parsed(answer), timeout_seconds=None, raise_on_error=True)))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    import math_verify

    marked = text if _MARKED.search(text) else f"\\boxed{{{text}}}"
    return list(math_verify.parse(marked, parsing_timeout=None))
