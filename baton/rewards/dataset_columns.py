"""Finds reference answers, nested columns and conversations in the columns of a dataset row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.types import Message

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "Question", "Problem")
"""Columns that may hold the prompt, in order of preference."""
REFERENCE_COLUMNS = (
    "answer",
    "ground_truth",
    "solution",
    "label",
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "expected_answer",
    "final_answer",
    "answerKey",
    "Answer",
)
"""Columns that may hold the reference answer, in order of preference. A dot in a name selects a nested column."""

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; None if the row does not have it. For a nested column such as `a.b`, the value in
    column `a` may be an object or the JSON text of an object."""
    value: Any = row
    for part in (column,) if column in row else column.split("."):
        if isinstance(value, str):
            value = _from_json(value)
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def find_reference(row: Mapping[str, Any]) -> Any:
    """Return the first value that the row has in one of the `REFERENCE_COLUMNS`; None if the row has no such value."""
    return next((value for c in REFERENCE_COLUMNS if (value := lookup(row, c)) is not None), None)


def choices_of(row: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the labels and the texts of a row's choices. If the row has no choices, both lists are empty. The column
    `choices` or `options` holds a list of texts, or, as in ARC, an object with the lists `text` and `label`."""
    found = row.get("choices", row.get("options"))
    texts = found.get("text") if isinstance(found, Mapping) else found
    if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS):
        return [], []
    labels = found.get("label") if isinstance(found, Mapping) else None
    return labels if isinstance(labels, list) else list(LETTERS[: len(texts)]), [str(text) for text in texts]


def messages_of(prompt: Any) -> tuple[Message, ...] | None:
    """Return the messages of a prompt that is a conversation or the JSON text of a conversation; None for any other
    text. Raises ValueError if a conversation is empty or ends with an assistant message, or if a message lacks role or
    content."""
    turns = prompt
    if isinstance(prompt, str):
        turns = _from_json(prompt) if prompt.lstrip().startswith("[") else None
        if not isinstance(turns, list) or not turns or not all(map(_is_turn, turns)):
            return None
    elif not isinstance(prompt, list):
        raise ValueError("must be a string, or messages with role and content")
    wrong = next((turn for turn in turns if not _is_turn(turn)), None)
    if not turns or wrong is not None:
        raise ValueError(f"must be a string, or messages with role and content as strings; got {wrong!r}")
    if turns[-1]["role"] == "assistant":
        raise ValueError("ends with an assistant message, but the policy generates that message: remove it")
    return tuple(Message(turn["role"], turn["content"]) for turn in turns)


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _from_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
