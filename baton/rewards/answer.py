"""Extracts the answer from a response, in the format that the recipe names.

| format        | the answer is                                                        | used by                      |
|---------------|----------------------------------------------------------------------|------------------------------|
| `tags`        | inside the last `<answer>…</answer>`                                 | R1-style and Baton's recipes |
| `boxed`       | inside the last `\\boxed{…}` with balanced braces                     | MATH-500, AIME               |
| `last_line`   | the last line that is not empty                                      | models without instructions  |
| `last_number` | the last number                                                      | GSM8K                        |
| `letter`      | the letter of the choice that the response states last               | MMLU and similar tests       |
| `regex`       | the first group of the last match of `pattern`, or the whole match   | all other formats            |

If the response contains `</think>`, all formats except `tags`, `boxed` and `regex` read only the text after it. A
response that does not follow the format has no answer; the task's scorer gives it 0.
"""

from __future__ import annotations

import re
from typing import Literal

from baton.rewards.patterns import last_match

AnswerFormat = Literal["tags", "boxed", "last_line", "last_number", "letter", "regex"]

INSTRUCTIONS: dict[str, str] = {
    "tags": (
        "Think step by step inside <think> and </think>, then give only the final answer inside <answer> and </answer>."
    ),
    "boxed": "Think step by step, then put the final answer inside \\boxed{}.",
    "last_line": "Think step by step, then write only the final answer on the last line.",
    "last_number": "Think step by step, then end with the final answer as a number.",
    "letter": 'Think step by step, then end with "Answer: " and the letter of the correct choice.',
}
"""Answer format → system message asking for this format, unless `answer.instruct = false`. `regex` has no message."""

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_UNDERLINED = r"(?<=\b_)(?<![)\]}$]_)|(?<=\b__)(?<![)\]}$]__)"
"""Matches after the underscores of Markdown's emphasis (`_18_`), but not before an index (`x_1` and `(101)_2`)."""
_NUMBER = re.compile(
    rf"(?:(?:(?<![\w)])|{_UNDERLINED})[-−])?(?:(?<!\w)|{_UNDERLINED})[$€£]?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_BRACE = re.compile(r"(?<!\\)(\\*+)(boxed\{|[{}])")
"""A brace, or `\\boxed` with its brace, and all backslashes before it. The search takes linear time."""
_STATED = re.compile(
    r"(?i:answer|(?:correct|right|best)\s+(?:choice|option))[\s*_]*(?::|(?i:is|must\s+be|should\s+be|would\s+be)\b:?)"
    r"[\s:*_$({\[]*(?:\\\w+\{){0,2}([A-Z])(?![\w'’])"
)
"""A stated choice, such as `the answer is (C)` or `Answer: $\\text{C}$`."""


def extract_answer(response: str, answer_format: AnswerFormat, pattern: str = "") -> str | None:
    """Return the answer in a response, without whitespace around it, or None if the response does not follow the
    format. `pattern`: regular expression for the format `regex`. If matching takes more than 30 s of CPU time, the
    response has no answer."""
    if answer_format == "tags":
        return _last(_TAGGED, response)
    if answer_format == "boxed":
        return _last_boxed(response)
    if answer_format == "regex":
        try:
            match = last_match(pattern, response)
        except TimeoutError:
            return None
        return None if match is None else next((group for group in match[1] if group is not None), match[0]).strip()
    final = response.rpartition("</think>")[2]
    if answer_format == "last_number":
        number = _last(_NUMBER, final)
        return None if number is None else plain_number(number)
    if answer_format == "letter":
        stated = choice_letter(_last_boxed(final) or "") or _last(_STATED, final)
        line = final.strip().rpartition("\n")[2]
        return stated or choice_letter(line) or _last(re.compile(r"\(([A-Z])\)"), line)
    lines = final.strip().splitlines()
    return lines[-1].strip() if lines else None


def plain_number(text: str) -> str:
    """Return the text of a number without currency signs, and with `-` for the minus sign `−`."""
    return text.replace("−", "-").translate(str.maketrans("", "", "$€£"))


def choice_letter(text: str) -> str | None:
    """Return the letter of the choice in an answer, or None if the answer does not begin with a letter of a choice. For
    example, the answers `C`, `(C)`, `C. Paris` and `\\text{C}` all give `C`."""
    found = re.match(r"[\s($*_]*(?:\\\w+\{[\s(]*)?([A-Za-z])(?:\s*[.):}$*_]|\s*$)", text)
    return found[1].upper() if found else None


def meets_format(response: str, answer_format: AnswerFormat, pattern: str = "") -> bool:
    """Return whether a response follows the format. With `tags`, a response must have exactly one `<answer>` and end
    with the closing tag. With `boxed`, a response must have exactly one `\\boxed{…}`. With all other formats, a
    response must have an answer."""
    if answer_format == "tags":
        return response.count("<answer>") == 1 and response.rstrip().endswith("</answer>")
    if answer_format == "boxed":
        return response.count("\\boxed{") == 1 and _last_boxed(response) is not None
    return extract_answer(response, answer_format, pattern) is not None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the group of the pattern's last match, or the whole match if the pattern has no group."""
    found = pattern.findall(text)
    return found[-1].strip() if found else None


def _last_boxed(response: str) -> str | None:
    """Return the content of the last `\\boxed{…}` with balanced braces. `\\{` and `\\}` are text, not braces."""
    starts: list[int] = []
    """Position after each opening brace that is not closed yet; -1 for a brace that does not belong to `\\boxed`."""
    found = None
    for brace in _BRACE.finditer(response):
        is_escaped = len(brace[1]) % 2 == 1
        if brace[2] == "boxed{":
            starts.append(brace.end() if brace[1] else -1)
        elif brace[2] == "{" and not is_escaped:
            starts.append(-1)
        elif brace[2] == "}" and not is_escaped and starts and (start := starts.pop()) >= 0:
            found = max(found or (0, 0), (start, brace.end() - 1))
    return None if found is None else response[slice(*found)].strip()
