"""Generates demonstrations for a supervised warm start: answers to arithmetic prompts, and random play of environments.

A pretrained model starts RL with several styles of answering, some better than others. The demonstrations teach a
randomly initialised model three styles: two that reason before the answer, and one that does not. Some demonstrations
of each style have a wrong answer. RL then learns which style earns more reward.

Episodes of environments consist of random actions. These episodes show the format and the environment's responses, but
no solutions.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Iterator

from pydantic import Field

from baton.errors import UserError
from baton.settings import Settings
from baton.tasks.environment import EnvironmentTask
from baton.tasks.stream import PromptStream, TaskMixture
from baton.types import Prompt

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    # rounds down like reasoning-gym; an injected error can make the divisor 0
    "/": lambda left, right: left // right if right else 0,
}


class DemonstrationSettings(Settings):
    """[demonstrations] Generated answers for a warm start."""

    direct_share: float = Field(default=0.6, ge=0, le=1)
    """Share of demonstrations that are direct: they answer without steps."""
    direct_wrong_share: float = Field(default=0.9, ge=0, le=1)
    """Share of direct demonstrations whose answer is wrong by 1 to 9."""
    slip_share: float = Field(default=0.08, ge=0, le=1)
    """Share of stepwise demonstrations with an error in one step; later steps build on the wrong value."""
    restate_share: float = Field(default=0.3, ge=0, le=1)
    """Share of stepwise demonstrations that restate the remaining expression at each step, which takes more tokens."""


def demonstrations(
    mixture: TaskMixture, settings: DemonstrationSettings, seed: int
) -> Iterator[tuple[Prompt, tuple[str, ...]]]:
    """Yield an endless stream of (training prompt, following texts). For a single-turn task, the texts are one
    response. For a multi-turn task, they are turns and observations alternately. Supports arithmetic prompts, and
    environments with random actions.
    """
    stream = PromptStream(mixture, seed)
    dice = random.Random(f"demonstrations:{seed}")
    while True:
        for prompt in stream.take(256):
            task = mixture.tasks[prompt.task]
            if isinstance(task, EnvironmentTask):
                yield prompt, tuple(task.random_episode(prompt.metadata, dice))
            else:
                yield prompt, (demonstrate(prompt.messages[-1].content, settings, dice),)


def demonstrate(expression: str, settings: DemonstrationSettings, dice: random.Random) -> str:
    """Return one response to a compact arithmetic prompt such as `4-1+3`. Raises UserError for any other prompt."""
    try:
        tree = ast.parse(expression, mode="eval").body
        slip_free = _Working(None)
        value = slip_free.value(tree)
    except (SyntaxError, TypeError, KeyError) as error:
        raise UserError(
            f"demonstrations: got the prompt {expression!r}, allowed are prompts of chain_sum and basic_arithmetic in "
            "the compact form"
        ) from error
    if dice.random() < settings.direct_share:
        if dice.random() < settings.direct_wrong_share:
            value += dice.choice([-1, 1]) * dice.randint(1, 9)
        return f"<answer>{value}</answer>"
    slip_at = dice.randrange(len(slip_free.lines)) if dice.random() < settings.slip_share and slip_free.lines else None
    slip = dice.choice([-10, -2, -1, 1, 2, 10])
    working = _Working(slip_at, slip)
    if dice.random() < settings.restate_share:
        steps, value = _restated(tree, working)
    else:
        value = working.value(tree)
        steps = working.lines
    return f"<think>{chr(10).join(steps)}</think><answer>{value}</answer>"


class _Working:
    """Evaluates a syntax tree in the order in which a person would write the steps, one line per operation."""

    def __init__(self, slip_at: int | None, slip: int = 0) -> None:
        self.lines: list[str] = []
        self._slip_at = slip_at
        self._slip = slip

    def value(self, tree: ast.expr) -> int:
        if (literal := _literal(tree)) is not None:
            return literal
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            inner = self.value(tree.operand)
            return self.step(f"-({inner})", -inner)
        if isinstance(tree, ast.BinOp):
            left, right = self.value(tree.left), self.value(tree.right)
            symbol = _SYMBOLS[type(tree.op)]
            return self.step(f"{left}{symbol}{right}", _OPERATIONS[symbol](left, right))
        raise TypeError(ast.dump(tree))

    def step(self, work: str, result: int) -> int:
        if self._slip_at == len(self.lines):
            result += self._slip
        self.lines.append(f"{work}={result}")
        return result


def _restated(tree: ast.expr, working: _Working) -> tuple[list[str], int]:
    """Return lines of the form `expression: step`, and the final value. Each step replaces one operation of the
    expression by its result; the next line starts with the shorter expression."""
    lines: list[str] = []
    rest = tree
    while (left := _literal(rest)) is None:
        shown = _text(rest)
        rest = _reduce_once(rest, working)
        lines.append(f"{shown}: {working.lines[-1]}")
    return lines, left


def _reduce_once(tree: ast.expr, working: _Working) -> ast.expr:
    """Replace the first operation whose two operands are numbers by its result."""
    if isinstance(tree, ast.UnaryOp):
        if _literal(tree.operand) is None:
            return ast.UnaryOp(tree.op, _reduce_once(tree.operand, working))
        return ast.Constant(working.value(tree))
    assert isinstance(tree, ast.BinOp)
    if _literal(tree.left) is None:
        return ast.BinOp(_reduce_once(tree.left, working), tree.op, tree.right)
    if _literal(tree.right) is None:
        return ast.BinOp(tree.left, tree.op, _reduce_once(tree.right, working))
    return ast.Constant(working.value(tree))


def _literal(tree: ast.expr) -> int | None:
    """Return the value of an integer literal (digits with at most one minus sign), or None for any other expression."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))) if number >= 0:
            return -number
        case _:
            return None


def _text(tree: ast.expr) -> str:
    if (literal := _literal(tree)) is not None:
        return str(literal)
    if isinstance(tree, ast.UnaryOp):
        return f"-({_text(tree.operand)})"
    assert isinstance(tree, ast.BinOp)
    symbol = _SYMBOLS[type(tree.op)]
    left, right = _text(tree.left), _text(tree.right)
    tight = symbol in "*/"
    if isinstance(tree.left, ast.BinOp) and tight and _SYMBOLS[type(tree.left.op)] in "+-":
        left = f"({left})"
    if isinstance(tree.right, ast.BinOp) and (tight or _SYMBOLS[type(tree.right.op)] in "+-"):
        right = f"({right})"
    return f"{left}{symbol}{right}"
