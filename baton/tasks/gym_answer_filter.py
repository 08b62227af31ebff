"""Filters answers for the reasoning-gym scorers that evaluate an answer as Python.

Some scorers pass the answer to `eval`, or to sympy's `parse_expr`, which calls `eval`. An answer such as
`__import__('os').system(…)` would be executed, and `9**9**9**9` would not return. Answers are untrusted, because the
policy writes them. The filter admits only the plain form that the task asks for; every other answer scores 0.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[-+]?[\d\s.,/]*([eE][-+]?\d{1,2})?\s*%?")
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/.()]*", re.DOTALL)
_LITERAL = re.compile(r"[\w\s,'\"\[\]-]*")
_FORMULA = re.compile(
    r"(?!.*[\d.]\s*\*\s*\*)"  # refuses a power of a number: 9**9**9
    r"([\d\s+\-*/.()=]|(?<![A-Za-z.\d])(sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z]))*",
    re.DOTALL,
)
_PLAIN: dict[str, re.Pattern[str]] = {
    "binary_matrix": _LITERAL,
    "coin_flip": _NUMBER,
    "countdown": _ARITHMETIC,
    "intermediate_integration": _FORMULA,
    "n_queens": _LITERAL,
    "polynomial_multiplication": _FORMULA,
    "puzzle24": _ARITHMETIC,
    "simple_integration": _FORMULA,
    "spiral_matrix": _LITERAL,
    "string_insertion": _LITERAL,
}
"""reasoning-gym task whose scorer evaluates the answer → pattern of the admitted answers."""
_MAX_CHARACTERS = 2_000
"""Maximum length of an answer. Longer answers could be nested so deeply that the evaluation exhausts time or stack."""


def may_be_scored(gym_name: str, answer: str) -> bool:
    """Return whether the answer may be passed to the task's scorer."""
    plain = _PLAIN.get(gym_name)
    return plain is None or (len(answer) <= _MAX_CHARACTERS and plain.fullmatch(answer) is not None)
