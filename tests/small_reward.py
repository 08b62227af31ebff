"""A reward that a random model varies in, named in the small recipe by its import path."""


def evenness(response: str) -> float:
    """0 to 0.8 by the response's length in characters."""
    return len(response) % 5 / 5
