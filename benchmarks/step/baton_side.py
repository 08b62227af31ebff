"""Baton's side: the recipe's own loop, two engine processes and a trainer with all cores.

Arguments: [--every-row] RECIPE [overrides]. With --every-row, rows of advantage 0 run forward and backward, as in TRL.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turns import Turns, own_stdout

from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.records.evaluation import Evaluation
from baton.run.assemble import build_loop
from baton.trainer import local_trainer
from baton.trainer.microbatches import MiniBatch, cut
from baton.trainer.samples import TrainingSample


class Watcher:
    """Watches a run as the terminal does, and stops it between turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Nothing is shown."""
        yield lambda done: None

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Report the times of a step."""
        kept = {name: value for name, value in metrics.items() if name.startswith(("time/", "tokens/", "perf/"))}
        self._turns.stepped(kept | {"response_length/mean": metrics["response_length/mean"]})

    def evaluated(self, step: int, results: Sequence[Evaluation]) -> None:
        """The evaluation before the first step: set-up is done."""
        self._turns.ready()

    def said(self, text: str) -> None:
        """Nobody listens."""


def _cut_every_row(rows: Sequence[TrainingSample], *, is_flat: bool, **named: Any) -> MiniBatch:
    """Cut minibatches without the rule that rows of advantage 0 run forward only."""
    return cut(rows, is_flat=False, **named)


def main() -> None:
    """Train until the driver hangs up."""
    turns = Turns(own_stdout())
    arguments = sys.argv[1:]
    if arguments[0] == "--every-row":
        local_trainer.cut = _cut_every_row
        arguments = arguments[1:]
    file, same = Path(arguments[0]), arguments[1:]
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*same, f"run.directory={scratch}", "run.steps=10000", "eval.every=0", "checkpoint.every=10000"]
        recipe = load_recipe(Recipe, file, overrides)
        loop = build_loop(recipe, Watcher(turns), resume=False, overwrite=False)
        loop.train()


if __name__ == "__main__":
    main()
