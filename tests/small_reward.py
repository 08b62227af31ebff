"""A reward that a random model varies in, named in the small recipe by its import path."""

from typing import Any


def evenness(prompt: Any, response: str, answer: str | None) -> float:
    """0 to 0.8 by the response's length in characters."""
    return len(response) % 5 / 5
