"""The tasks chain_sum and basic_arithmetic, which need no other package.

Both tasks draw the same problems as the tasks with these names in reasoning-gym 0.1.25, so runs with and without that
package are equal. Two cases differ on purpose, because reasoning-gym is wrong there:

* reasoning-gym raises an error if an expression divides by zero; here, another expression is drawn.
* With `allow_parentheses = False`, reasoning-gym ignores the precedence of operators; here, the answer is the value
  of the expression. A division rounds down.
"""

from __future__ import annotations

import ast
import math
import operator
import random
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from baton.settings import Settings

MAX_REDRAWS = 1000
"""Maximum number of draws for one problem. A drawn expression that divides by zero is replaced by another draw."""
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


class _Sizes(Settings):
    """Parameters of both tasks."""

    min_terms: int = Field(default=2, ge=1)
    """Minimum number of numbers in an expression."""
    max_terms: int = 6
    """Maximum number of numbers in an expression."""
    min_digits: int = Field(default=1, ge=1)
    """Minimum number of digits. For each expression, a number of digits from `min_digits` to `max_digits` is drawn,
    which limits the size of the expression's numbers."""
    max_digits: int = 4
    """Maximum number of digits."""

    @model_validator(mode="after")
    def _are_ranges(self) -> _Sizes:
        if self.max_terms < self.min_terms or self.max_digits < self.min_digits:
            raise ValueError("max_terms and max_digits must be at least min_terms and min_digits")
        return self

    def sizes(self, dice: random.Random) -> tuple[int, int]:
        return dice.randint(self.min_terms, self.max_terms), dice.randint(self.min_digits, self.max_digits)


class ChainSum(_Sizes):
    """Sums and differences. Without negative numbers, all numbers of an expression have the same number of digits."""

    allow_negation: bool = False
    """Draw negative numbers too."""

    def draw(self, dice: random.Random) -> tuple[str, str]:
        """Return a question and its expression."""
        num_terms, num_digits = self.sizes(dice)
        most = 10**num_digits - 1
        least = -most if self.allow_negation else 0 if num_digits == 1 else 10 ** (num_digits - 1)
        numbers = [str(dice.randint(least, most)) for _ in range(num_terms)]
        signs = [dice.choice("+-") for _ in range(num_terms - 1)]
        expression = _alternate(numbers, signs)
        return f"State the final answer to the following arithmetic problem: {expression} =", expression

    def score(self, answer: str | None, reference: str) -> float:
        """Return 1 if the answer is the same number as the reference, such as `+01,000.00` for `1000`. Otherwise, if
        the answer contains the reference as text, return the ratio of the reference's length to the answer's length.
        Otherwise return 0."""
        text = (answer or "").replace(",", "")
        try:
            if text and Decimal(text) == Decimal(reference):
                return 1.0
        except (InvalidOperation, ValueError):
            pass
        return _share(text, reference)


class BasicArithmetic(_Sizes):
    """Expressions of the four operations, with or without parentheses."""

    operators: tuple[Literal["+", "-", "*", "/"], ...] = Field(default=("+", "-", "*", "/"), min_length=1)
    """Operators of the expressions."""
    allow_parentheses: bool = True
    """False: expressions have neither parentheses nor negative numbers."""
    allow_negation: bool = True
    """Put a minus sign before some parentheses. With `allow_parentheses`, numbers may be negative even if
    `allow_negation` is False."""
    format_style: Literal["simple", "natural"] = "simple"
    """Wording of the question. natural: one of four wordings."""
    whitespace: Literal["no_space", "single", "random"] = "single"
    """Spaces between numbers and operators."""

    def draw(self, dice: random.Random) -> tuple[str, str]:
        """Return a question and its expression."""
        num_terms, num_digits = self.sizes(dice)
        if self.allow_parentheses:
            expression = self._spaced(self._terms(dice, num_terms, num_digits), dice)
        else:
            numbers = [str(dice.randint(0, 10**num_digits)) for _ in range(num_terms)]
            expression = _alternate(numbers, [dice.choice(self.operators) for _ in range(num_terms - 1)])
        form = "Calculate {}."
        if self.format_style == "natural":
            form = dice.choice(["What is {}?", "Solve {}.", "Compute {}.", "Evaluate: {}."])
        return form.format(expression), expression

    def score(self, answer: str | None, reference: str) -> float:
        """If the answer contains the reference as text, return the ratio of the reference's length to the answer's
        length, which is 1 if the texts are equal. Otherwise return 0."""
        return _share(answer or "", reference)

    def _terms(self, dice: random.Random, num_terms: int, num_digits: int) -> list[str]:
        """Return a random expression as a list of its parts. The left operand contains some of the numbers, and the
        right operand contains the others."""
        most = 10**num_digits - 1
        num_left = dice.randint(1, num_terms)
        if num_left > 1 and dice.random() > 0.5:
            is_negated = dice.random() > 0.5 and self.allow_negation
            parts = ["-(" if is_negated else "(", *self._terms(dice, num_left, num_digits), ")"]
        else:
            parts = []
            for position in range(num_left):
                if position:
                    parts.append(dice.choice([each for each in self.operators if each != "/"]))
                parts.append(str(dice.randint(-most, most)))
        num_right = num_terms - num_left
        if num_right == 0:
            return parts
        symbol = dice.choice(self.operators)
        if symbol != "/":
            return [*parts, symbol, *self._terms(dice, num_right, num_digits)]
        dividend = value("".join(parts) if parts[-1] == ")" else parts[-1])
        if num_right == 1:
            return [*parts, "/", _divisor(dice, dividend, most)]
        rest = self._terms(dice, num_right - 1, num_digits)
        if rest[-1] != ")":
            return [*parts, "/", _divisor(dice, dividend, most), "+", *rest]
        divisor = value("".join(rest))  # a summand at the end turns this value into a divisor of the dividend
        summand = dice.choice(_common_divisors(dividend, divisor)) - divisor if divisor else 1
        return [*parts, "/", *rest[:-1], "+", str(summand), ")"]

    def _spaced(self, parts: Sequence[str], dice: random.Random) -> str:
        if self.whitespace == "random":
            text = "".join(" " + part if dice.random() < 0.15 else part for part in parts).strip()
        else:
            text = ("" if self.whitespace == "no_space" else " ").join(parts)
        return text.replace("/ 0", "/ 1")


OWN_TASKS: dict[str, type[ChainSum | BasicArithmetic]] = {"chain_sum": ChainSum, "basic_arithmetic": BasicArithmetic}
"""Task → its parameters, with their default values."""


class ArithmeticProblems:
    """The problems of one task and one seed. The interface is that of a dataset of reasoning-gym."""

    def __init__(self, name: str, seed: int, params: dict[str, Any]) -> None:
        """Raises ValueError if the task does not have these parameters."""
        try:
            self._params = OWN_TASKS[name].model_validate(params)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(": ".join([*map(str, first["loc"]), message])) from error
        self._seed = seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a problem. Raises ValueError if the parameters allow only divisions by zero."""
        dice = random.Random(self._seed + index)
        for _ in range(MAX_REDRAWS):
            try:
                question, expression = self._params.draw(dice)
                answer = str(value(expression))
            except ZeroDivisionError:
                continue
            return {"question": question, "answer": answer, "metadata": {"expression": expression}}
        raise ValueError(f"{MAX_REDRAWS} expressions divide by zero")

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return self._params.score(answer, entry["answer"])


def value(expression: str) -> int:
    """Return the value of an expression of integers; a division rounds down. Raises ZeroDivisionError."""
    return _value(ast.parse(expression.replace("/", "//"), mode="eval").body)


def _value(tree: ast.expr) -> int:
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=symbol, right=right):
            return int(_OPERATIONS[type(symbol)](_value(left), _value(right)))
        case _:
            raise TypeError(ast.dump(tree))


def _alternate(numbers: Sequence[str], symbols: Sequence[str]) -> str:
    rest = (f" {symbol} {number}" for symbol, number in zip(symbols, numbers[1:], strict=True))
    return numbers[0] + "".join(rest)


def _divisor(dice: random.Random, dividend: int, most: int) -> str:
    return str(dice.choice(_common_divisors(dividend, 0)) if dividend else dice.randint(1, most))


def _common_divisors(one: int, other: int) -> list[int]:
    """Return the divisors of the numbers' greatest common divisor g: ascending d ≤ √g, each followed by g / d."""
    greatest = math.gcd(one, other)
    small = (each for each in range(1, math.isqrt(greatest) + 1) if greatest % each == 0)
    return [divisor for each in small for divisor in dict.fromkeys((each, greatest // each))]


def _share(text: str, reference: str) -> float:
    return len(reference) / len(text) if reference in text else 0.0
