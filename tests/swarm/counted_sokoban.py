"""Sokoban that writes each action to a file before it executes it. Environment processes import this module."""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

from baton.environments.sokoban import Sokoban


class CountedSokoban(Sokoban):
    """Reads moves from any text, so that a random model gets unequal rewards. Names its instance as the tool."""

    def __init__(self, log: str, **values: Any) -> None:
        """`log`: the file, one JSON line [instance, turn, action] for each action."""
        super().__init__(form="compact", **values)
        self._file, self._instance, self._count = log, secrets.token_hex(6), 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._count += 1
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps([self._instance, self._count, action]).encode() + b"\n")
        os.close(file)
        *observed, info = super().step("".join("UDLR"[ord(letter) % 4] for letter in action))
        return (*observed, {**info, "tool": self._instance})  # type: ignore[return-value]


class UnrepeatableSokoban(CountedSokoban):
    """An environment whose actions must not be repeated."""

    replay = "never"
