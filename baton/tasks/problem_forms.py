"""Compact wordings of reasoning-gym problems for small models, and the canonical form of a problem.

The train/held-out split treats two problems with the same canonical form as one problem, even if their wording differs.
Examples: `5 - 3` in chain_sum and in basic_arithmetic; a knights-and-knaves puzzle with other names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Entry = dict[str, Any]

MAX_RENUMBERED = 6
"""Maximum number of people in a puzzle for which all numberings are tried. With more people, equal puzzles are very
unlikely."""


def canonical_problem(gym_name: str, entry: Entry) -> str:
    """Return the canonical form of the problem in a reasoning-gym entry."""
    metadata = entry["metadata"]
    if gym_name in ("chain_sum", "basic_arithmetic"):
        return f"arithmetic:{_expression(entry)}"
    if gym_name == "countdown":
        return f"countdown:{sorted(int(n) for n in metadata['numbers'])}:{int(metadata['target'])}"
    if gym_name == "knights_knaves":
        return f"knights_knaves:{_without_order(metadata['statements'])}"
    return f"{gym_name}:{' '.join(str(entry['question']).lower().split())}"


def _expression(entry: Entry) -> str:
    return str(entry["metadata"]["expression"]).replace(" ", "")


def _countdown(entry: Entry) -> str:
    metadata = entry["metadata"]
    return f"{' '.join(str(n) for n in metadata['numbers'])} -> {metadata['target']}"


def _knights_knaves(entry: Entry) -> str:
    metadata = entry["metadata"]
    terms, names = metadata["knight_knave_terms"], [str(n) for n in metadata["names"]]

    def claim(statement: Any) -> str:
        operator, *parts = statement
        if operator in ("telling-truth", "lying"):
            return f"{names[parts[0]]} is {terms['a_knight' if operator == 'telling-truth' else 'a_knave']}"
        if operator == "not":
            return f"not ({claim(parts[0])})"
        return f" {operator} ".join(f"({claim(part)})" for part in parts)

    claims = "; ".join(f"{name}: {claim(s)}" for name, s in zip(names, metadata["statements"], strict=True))
    answer = ", and ".join(f"{name} is a {terms['knight']}/{terms['knave']}" for name in names)
    return f"{claims}. Answer: {answer}"


def _without_order(statements: Sequence[Any]) -> str:
    """Write the statements once for every possible numbering of the people, and return the text that sorts first. Two
    puzzles that differ only in the order of the people therefore have the same text."""
    people = range(len(statements))
    numberings = itertools.permutations(people) if len(statements) <= MAX_RENUMBERED else [tuple(people)]
    return min(
        _plain([_renumbered(statements[numbering.index(person)], numbering) for person in people])
        for numbering in numberings
    )


def _renumbered(statement: Any, numbering: Sequence[int]) -> Any:
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return (operator, numbering[parts[0]])
    return (operator, *(_renumbered(part, numbering) for part in parts))


def _plain(value: Any) -> str:
    return f"({','.join(_plain(v) for v in value)})" if isinstance(value, (tuple, list)) else str(value)


COMPACT_FORMS: dict[str, Callable[[Entry], str]] = {
    "chain_sum": _expression,
    "basic_arithmetic": _expression,
    "countdown": _countdown,
    "knights_knaves": _knights_knaves,
}
"""reasoning-gym task → function that returns the question in as few tokens as possible."""
