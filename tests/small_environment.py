"""Environment, tools and rewards of test runs: their processes import this module, and so neither torch nor a test."""

from __future__ import annotations

from typing import Any

from baton.types import Episode


class Evenness:
    """Three turns; a turn is worth its length modulo 5, so a random model gets unequal rewards."""

    def reset(self, *, seed: int) -> str:
        self._turn, self._seed = 0, seed
        return f"{seed % 40} + 1"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        reward = (len(action) + self._seed) % 5 / 5
        return f"{self._turn} + {self._turn} <|end|>", reward, self._turn == 3, False, {"success": reward > 0.5}


def played(response: str, episode: Episode) -> float:
    """A reward function: the share of turns that were played."""
    assert all(exchange.action in response for exchange in episode.exchanges)
    return len(episode.exchanges) / 3


def weather(city: str) -> str:
    """
    Look up.

    Args:
        city: A city.
    """
    return "sunny" if city == "Rome" else "unknown"


def distance(city: str) -> int:
    """
    Look up.

    Args:
        city: A city.
    """
    return len(city)


def right(response: str, answer: str) -> float:
    """Score the last turn."""
    return float(answer in response)
