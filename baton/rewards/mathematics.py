"""Mathematical equality by math-verify. Only for the main thread of a process that somebody else may kill."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache
from typing import Any

from baton.errors import UserError
from baton.rewards.scorer_protocol import CallFailure, CallValue, Outcome
from baton.types import FailureCause


def check_installed() -> None:
    """Raise UserError with the command that installs math-verify, where it is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("math-verify is not installed: run `pip install 'baton-rl[math]'`")


def load() -> None:
    """Import math-verify, so that no call's deadline pays for it."""
    check_installed()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off: ours is on
    _parsed("1")


def math_score(answer: str | None, reference: str | None) -> Outcome:
    """1 when the answer equals the reference as mathematics, else 0; `1/2` equals `\\frac{1}{2}`.

    A reference that math-verify cannot read is a failure: nobody's answer could equal it.
    """
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
    # its own timeouts use signal.alarm and swallow what they interrupt; the deadline of the worker process rules
    return CallValue(float(math_verify.verify(gold, _parsed(answer), timeout_seconds=None, raise_on_error=True)))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list[Any]:
    import math_verify

    marked = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    return list(math_verify.parse(marked, parsing_timeout=None))
