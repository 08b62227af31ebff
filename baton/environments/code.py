"""Programming problems: the policy writes a function, sees which examples fail, and may correct the function."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from baton.environments.sandbox import isolation, run_code
from baton.errors import UserError

INSTRUCTIONS = "Write the function in a Python code block: ```python … ```. Only the standard library is available."
MAX_SHOWN_CHARS = 300
NUM_EXAMPLES, NUM_HIDDEN = 3, 8
_DRIVER = """
import json, os, sys
_out = os.fdopen(os.dup(1), "w")
sys.stdout = sys.stderr
_entry_point, _arguments = json.loads(sys.stdin.readline())
exec(compile(sys.stdin.read(), "<answer>", "exec"), globals())
_results = []
for _one in _arguments:
    try:
        _results.append([json.loads(json.dumps(globals()[_entry_point](*_one))), None])
    except Exception as _error:
        _results.append([None, f"{type(_error).__name__}: {_error}"[:300]])
_out.write(json.dumps(_results))
_out.flush()
"""
"""Program that runs the policy's code in the sandbox. The program receives the arguments of the tests but not the
expected values, because the policy's code could otherwise return these values."""


_FENCE = re.compile(r"(^[ \t]*)?```([^\n`]*)", re.MULTILINE)


def last_code_block(text: str) -> str | None:
    """Return the last complete block of Python code in Markdown; if no block is marked as Python, the last block
    without a language. Return None if there is neither."""
    blocks: dict[bool, str] = {}
    """The last block that is marked as Python, and the last one without a language."""
    language, begin = None, 0
    for fence in _FENCE.finditer(text):
        label = fence[2].strip().lower()
        # a fence with a language at the start of a line begins a block, even if the previous block has no end
        if language is None or (fence[1] is not None and re.fullmatch(r"[a-z][\w+#-]*", label)):
            language, begin = (label.split() or [""])[0], fence.end()
            continue
        if language in ("", "python", "python3", "py") and text[begin : begin + 1] == "\n":
            blocks[bool(language)] = text[begin + 1 : fence.start()]
        language = None
    return blocks.get(True, blocks.get(False))


def run_python(code: str) -> str:
    """
    Execute Python code and return what it prints.

    Args:
        code: The source code. Only the standard library is available.
    """
    result = run_code(code)
    end = "\n[stopped: it took too long]" if result.is_timeout else ""
    return (result.stdout + result.stderr)[-4000:] + end


class CodeTask:
    """The programming environment. The reward is 1 if all tests pass, including the tests that are not shown."""

    def __init__(
        self, max_turns: int = 4, timeout_s: float = 5.0, memory_mib: int = 512, allow_unisolated: bool = False
    ) -> None:
        """`timeout_s`: maximum CPU time of all tests of a turn together. Raises UserError if an argument is out of
        range."""
        if max_turns < 1 or timeout_s <= 0 or memory_mib < 32:
            raise UserError(
                f"code: got max_turns {max_turns}, timeout_s {timeout_s}, memory_mib {memory_mib}; allowed are at "
                "least 1 turn, a positive time and 32 MiB"
            )
        self.instructions = INSTRUCTIONS
        self._turns_left = max_turns
        self._run = partial(
            run_code, timeout_s=timeout_s, memory_bytes=memory_mib * 2**20, allow_unisolated=allow_unisolated
        )

    @classmethod
    def prepare(cls, *, allow_unisolated: bool = False, **_: Any) -> str:
        """Return a description of the isolation. Raises UserError if the isolation is incomplete."""
        try:
            return isolation(allow_unisolated=allow_unisolated)
        except PermissionError as error:
            raise UserError(str(error)) from error

    def reset(
        self, *, seed: int, prompt: str | None = None, entry_point: str = "solve", tests: Sequence[Any] = (), **_: Any
    ) -> str:
        """Return the problem of a dataset row, or a problem generated from the seed if there is no row. `tests`: pairs
        (arguments, result); the first pairs are shown as examples."""
        if prompt is None:
            prompt, tests = _generated(random.Random(f"code:{seed}"))
        if not tests:
            raise ValueError("the row has no tests")
        self._entry_point, self._tests = entry_point, [(list(arguments), result) for arguments, result in tests]
        self._statement = prompt
        shown = "\n".join(f"{entry_point}{_shown(a)} == {r!r}" for a, r in self._tests[:NUM_EXAMPLES])
        return f"{prompt}\n\nExamples:\n{shown}"

    def canonical(self) -> str:
        """Return the problem without its examples."""
        return self._statement

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the last code block on the examples and, if these pass, on the other tests."""
        self._turns_left -= 1
        is_last = self._turns_left <= 0
        code = last_code_block(action)
        if code is None:
            text = "There is no code block. Write the function in ```python … ```."
            return text, 0.0, False, is_last, {"success": False, "tool": "code", "passed": 0.0}
        outcomes = self._outcomes(code)
        failed = [(test, got) for test, got in zip(self._tests, outcomes, strict=True) if got != (test[1], None)]
        passed = 1 - len(failed) / len(self._tests)
        examples = [one for one in failed if one[0] in self._tests[:NUM_EXAMPLES]]
        info = {"success": not failed, "tool": "code", "passed": passed}
        if not examples:
            return "", float(not failed), True, False, info
        lines = [
            f"{self._entry_point}{_shown(arguments)}: expected {expected!r}, got {error or repr(got)}"[:MAX_SHOWN_CHARS]
            for (arguments, expected), (got, error) in examples
        ]
        return "\n".join(["These examples fail:", *lines]), 0.0, False, is_last, info

    def _outcomes(self, code: str) -> list[tuple[Any, str | None]]:
        order = json.dumps([self._entry_point, [arguments for arguments, _ in self._tests]])
        result = self._run(_DRIVER, f"{order}\n{code}")
        try:
            found = [(value, error) for value, error in json.loads(result.stdout)]
            assert len(found) == len(self._tests)
        except (ValueError, TypeError, AssertionError, RecursionError):
            lines = result.stderr.strip().splitlines()
            why = "it took too long" if result.is_timeout else lines[-1] if lines else "the program ended early"
            return [(None, why)] * len(self._tests)
        return found


def _shown(arguments: list[Any]) -> str:
    return f"({', '.join(map(repr, arguments))})"


_Numbers = list[int]
_SELECTIONS: list[tuple[str, Callable[[int, int], bool]]] = [
    ("greater than {k}", lambda x, k: x > k),
    ("less than {k}", lambda x, k: x < k),
    ("divisible by {k}", lambda x, k: x % k == 0),
    ("not divisible by {k}", lambda x, k: x % k != 0),
]
_CHANGES: list[tuple[str, Callable[[int, int], int]]] = [
    ("squared", lambda x, k: x * x),
    ("times {k}", lambda x, k: x * k),
    ("plus {k}", lambda x, k: x + k),
    ("modulo {k}", lambda x, k: x % k),
]
_RESULTS: list[tuple[str, Callable[[_Numbers], Any]]] = [
    ("their sum", sum),
    ("the largest of them, or 0 if there is none", lambda xs: max(xs, default=0)),
    ("the number of different values among them", lambda xs: len(set(xs))),
    ("them as a list in ascending order", sorted),
    ("them as a list in reversed order", lambda xs: xs[::-1]),
]


def _generated(dice: random.Random) -> tuple[str, list[tuple[list[Any], Any]]]:
    (selection, selects), (change, changes) = dice.choice(_SELECTIONS), dice.choice(_CHANGES)
    result, reduces = dice.choice(_RESULTS)
    k, m = dice.randint(2, 9), dice.randint(2, 9)
    text = (
        f"Write a function `solve(numbers)` that takes a list of integers. Select the numbers that are "
        f"{selection.format(k=k)}, replace each by itself {change.format(k=m)}, and return {result}."
    )
    lists = [[dice.randint(-20, 20) for _ in range(dice.randint(3, 8))] for _ in range(NUM_EXAMPLES + NUM_HIDDEN - 1)]
    return text, [([xs], reduces([changes(x, m) for x in xs if selects(x, k)])) for xs in [*lists, []]]
