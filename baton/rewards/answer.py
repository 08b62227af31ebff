"""Extracts the answer from a response, in the format that the recipe names.

| format      | the answer is                                                      | used by                        |
|-------------|--------------------------------------------------------------------|--------------------------------|
| `tags`      | inside the last `<answer>…</answer>`                               | R1-style and Baton's recipes   |
| `boxed`     | inside the last `\\boxed{…}` with balanced braces                   | mathematics                    |
| `last_line` | the last line that is not empty, after `</think>` if it is present | models without instructions    |

A response that does not follow the format has no answer; the task's scorer gives it 0.
"""

from __future__ import annotations

import re
from typing import Literal

AnswerFormat = Literal["tags", "boxed", "last_line"]

INSTRUCTIONS: dict[str, str] = {
    "tags": (
        "Think step by step inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
    ),
    "boxed": "Think step by step, then put the final answer inside \\boxed{}.",
    "last_line": "Think step by step, then write only the final answer on the last line.",
}
"""Answer format → system message that asks for this format. `answer.instruct = false` omits the message."""


def extract_answer(response: str, answer_format: AnswerFormat) -> str | None:
    """Return the answer in a response, without outer blanks, or None if the response does not follow the format."""
    if answer_format == "tags":
        found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", response, flags=re.DOTALL)
        return found[-1].strip() if found else None
    if answer_format == "boxed":
        return _last_boxed(response)
    lines = [line.strip() for line in response.rpartition("</think>")[2].splitlines() if line.strip()]
    return lines[-1] if lines else None


def meets_format(response: str, answer_format: AnswerFormat) -> bool:
    """Return whether a response has exactly one answer and, for `tags`, no text after the closing tag."""
    if answer_format == "tags":
        return response.count("<answer>") == 1 and response.rstrip().endswith("</answer>")
    if answer_format == "boxed":
        return response.count("\\boxed{") == 1 and _last_boxed(response) is not None
    return extract_answer(response, answer_format) is not None


def _last_boxed(response: str) -> str | None:
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for place in range(begin, len(response)):
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if depth == 0:
            return response[begin:place].strip()
    return None
