"""A reward in which the responses of any model differ, so that every row has a gradient."""

from __future__ import annotations


def length(response: str) -> float:
    """0 to 0.8 by the response's length in characters."""
    return len(response) % 5 / 5
