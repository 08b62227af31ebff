"""Waits between retries by tenacity's exponential strategy, for code that computes when to retry and does not sleep."""

from __future__ import annotations

from tenacity import RetryCallState, Retrying, wait_exponential


def retry_wait_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the wait after `failures` ≥ 1 failures in a row: `first_s`, doubled each time, at most `longest_s`."""
    state = RetryCallState(Retrying(), fn=None, args=(), kwargs={})
    state.attempt_number = failures
    return float(wait_exponential(multiplier=first_s, max=longest_s)(state))
