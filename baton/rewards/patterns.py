"""Regular expressions of a recipe, matched against text of a model.

The matches have a deadline, because a pattern such as `(a|a)+$` takes exponential time on some texts. `re` has no
deadlines; the package `regex` has them and accepts the same patterns.
"""

from __future__ import annotations

import regex

DEADLINE_S = 30.0
"""Maximum CPU time of a search, in seconds. The package `regex` counts the CPU time of all threads of the process. The
limit is therefore so high that a usual pattern does not reach it, even while other threads compute."""


def check_pattern(pattern: str) -> int:
    """Return the number of groups of a pattern. Raises ValueError if the pattern is not a regular expression; the
    error's text is a sentence for the user."""
    try:
        return int(regex.compile(pattern).groups)
    except regex.error as error:
        raise ValueError(f"pattern: got {pattern!r}, which is not a regular expression: {error}") from error


def last_match(pattern: str, text: str) -> tuple[str, tuple[str | None, ...]] | None:
    """Return the text of the last match and the texts of its groups; None without a match. Raises TimeoutError after
    `DEADLINE_S` of CPU time."""
    found = list(regex.compile(pattern).finditer(text, timeout=DEADLINE_S))
    return (found[-1][0], found[-1].groups()) if found else None
