"""Arithmetic with a calculator: each call computes one operation, so an expression takes several turns."""

from __future__ import annotations

import operator
import random
import re
from typing import Any

from baton.environments.tools import ToolEnvironment
from baton.errors import UserError
from baton.rewards.answer import extract_answer

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_DIGITS = 40
"""Maximum number of digits of an operand. Larger numbers are refused, so that no call takes long."""
INSTRUCTIONS = "Compute the value of the expression. Give only the final answer inside <answer> and </answer>."


def calculate(a: int, operation: str, b: int) -> str:
    """
    Compute one operation on two integers.

    Args:
        a: The first operand.
        operation: The operation (choices: ["+", "-", "*"])
        b: The second operand.
    """
    if operation not in OPERATIONS:
        return f"error: the operation is one of {', '.join(OPERATIONS)}"
    if not all(isinstance(x, int) and abs(x) < 10**MAX_DIGITS for x in (a, b)):
        return f"error: operands are integers of at most {MAX_DIGITS} digits"
    return str(OPERATIONS[operation](a, b))


class Calculator(ToolEnvironment):
    """The calculator environment. The reward is 1 if the turn without a call gives the right answer."""

    def __init__(
        self,
        num_operations: int = 4,
        digits: int = 3,
        family: str | None = None,
        max_turns: int | None = None,
        is_compact: bool = False,
    ) -> None:
        """`is_compact`: a call is a turn like `12*34=`, and the prompt is only the expression. Raises UserError if
        `num_operations` or `digits` is out of range."""
        if not 1 <= num_operations <= 50 or not 1 <= digits <= 9:
            raise UserError(
                f"calculator: got num_operations {num_operations} and digits {digits}; allowed are 1 to 50 and 1 to 9"
            )
        super().__init__([] if is_compact else [calculate], family=family, max_turns=max_turns)
        self.instructions = "" if is_compact else INSTRUCTIONS
        self._num_operations, self._largest, self._is_compact = num_operations, 10**digits - 1, is_compact

    def reset(self, *, seed: int, **row: Any) -> str:
        dice = random.Random(f"calculator:{seed}")
        self._value = dice.randint(1, self._largest)
        text = str(self._value)
        for _ in range(self._num_operations):
            operation, number = dice.choice(list(OPERATIONS)), dice.randint(1, self._largest)
            self._value = OPERATIONS[operation](self._value, number)
            text = f"({text})" if operation == "*" and not text.isdigit() else text
            text += f"{operation}{number}"
        self._numbers = [int(number) for number in re.findall(r"\d+", text)]
        return text

    def random_action(self, dice: random.Random) -> str:
        """Return a compact call with two random neighbouring numbers of the expression, and replace both by the result.
        If one number is left, return it as the answer. Raises UserError if calls are not compact."""
        if not self._is_compact:
            raise UserError("calculator: random actions are compact calls; set is_compact = true")
        if len(self._numbers) == 1:
            return f"<answer>{self._numbers[0]}</answer>"
        place, operation = dice.randrange(len(self._numbers) - 1), dice.choice(list(OPERATIONS))
        left, right = self._numbers[place : place + 2]
        self._numbers[place : place + 2] = [OPERATIONS[operation](left, right)]
        return f"{left}{operation}{right}="

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        call = re.fullmatch(r"\s*(-?\d{1,40})([-+*])(-?\d{1,40})=?\s*", action) if self._is_compact else None
        if call is None:
            return super().step(action)
        self._turn += 1
        is_over = self._is_last_turn
        result = calculate(int(call[1]), call[2], int(call[3]))
        return result, 0.0, False, is_over, {"tool": "calculate", **({"success": False} if is_over else {})}

    def score(self, response: str) -> tuple[float, dict[str, Any]]:
        is_right = extract_answer(response, "tags") == str(self._value)
        return float(is_right), {"success": is_right}
