"""Processor time of SmolLM2's train stage, and of its parts, with and without rows of advantage 0.

    .venv/bin/python benchmarks/smollm2/train_stage.py

A batch as that of a step of recipes/smollm2-sums.toml: 16 of its problems with 8 responses each, of random tokens and
6 to 64 of them; 7 of the 16 groups have equal rewards, as in the first steps of the recipe. One thread. No engine runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.policy import head
from baton.policy.load import load_model
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.trainer import local_trainer
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.microbatches import MiniBatch, cut
from baton.trainer.samples import TrainingSample
from baton.types import (
    Batch,
    FinishReason,
    Group,
    Message,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

HERE = Path(__file__).parent
NUM_EQUAL, NUM_GROUPS, GROUP_SIZE = 7, 16, 8
SIDES: dict[str, dict[str, bool]] = {
    "skipped": {},
    "forward only": {"skips_flat": False},
    "every row": {"is_flat": False},
}
"""What happens to rows of advantage 0, as arguments of `cut`; `forward only` is `trainer.metrics_of_all_tokens`."""


def build(recipe: Recipe) -> LocalTrainer:
    """Return a trainer of the recipe whose weights hardly move."""
    changes: dict[str, Any] = {"lr": 1e-8, "dtype": "bfloat16"}
    changes |= {"max_mismatch_kl": (1e9, 1e9), "max_logprob_diff": (1e9, 1e9)}  # the logprobs are invented
    return LocalTrainer(
        load_model(recipe.model.path, dtype=torch.float32, device="cpu"),
        load_tokenizer(recipe.model.path),
        recipe.trainer.model_copy(update=changes),
        recipe.algorithm,
        temperature=1.0,
        total_steps=1000,
        version=PolicyVersion("measured", 0),
        max_new_tokens=recipe.rollout.max_new_tokens,
    )


def random_batch(recipe: Recipe, step: int) -> Batch:
    """Return the same batch for every step."""
    dice, tokenizer = random.Random(0), load_tokenizer(recipe.model.path)
    groups = []
    for group_id, line in enumerate((HERE / "sums-train.jsonl").read_text().splitlines()[:NUM_GROUPS]):
        prompt_ids = tuple(tokenizer.prompt_ids([Message("user", json.loads(line)["prompt"])]))
        members = []
        for index in range(GROUP_SIZE):
            ids = tuple(dice.randrange(2, 49152) for _ in range(dice.randint(6, recipe.rollout.max_new_tokens)))
            trajectory = Trajectory(
                group_id, index, prompt_ids, (Segment(ids, (-1.0,) * len(ids), step - 1),), FinishReason.STOP
            )
            reward = float(index == 0 and group_id >= NUM_EQUAL)
            members.append(ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0)))
        groups.append(Group(group_id, Prompt(f"prompt {group_id}", "sums", ()), tuple(members)))
    return Batch(step, tuple(groups))


class Parts:
    """Processor time by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, inner: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a function and count its time."""
        begin = time.process_time()
        try:
            return inner(*arguments, **named)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - begin


def with_choices(choices: dict[str, bool], rows: Sequence[TrainingSample], **named: Any) -> MiniBatch:
    """Cut minibatches with other choices than the trainer's."""
    return cut(rows, **{**named, **choices})


def main() -> None:
    """Measure the sides in turn, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "train_stage.json")
    given = parser.parse_args()
    set_up_threads(1)
    recipe = load_recipe(Recipe, Path("recipes/smollm2-sums.toml"), [])
    trainer, parts = build(recipe), Parts()
    for name in ("forward", "backward"):
        inner = getattr(head._HeadScores, name)
        setattr(head._HeadScores, name, staticmethod(partial(parts.timed, f"head, {name}", inner)))
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in given.sides}
    for step, side in enumerate([given.sides[0], *given.sides * given.rounds], 1):
        local_trainer.cut = partial(with_choices, SIDES[side])
        parts.seconds = {}
        metrics = parts.timed("step", trainer.step, random_batch(recipe, step))
        found = {name: round(seconds, 3) for name, seconds in parts.seconds.items()}
        found |= {"grad_norm": metrics["policy/grad_norm"]}
        print(side, found, file=sys.stderr, flush=True)
        if step > 1:  # the first one warms up
            steps[side].append(found)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=True)
    cpu = Path("/proc/cpuinfo").read_text().split("model name", 1)[1].splitlines()[0].strip("\t :")
    facts = {
        "commit": git.stdout.strip(),
        "hardware": cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    given.out.write_text(
        json.dumps(facts | {"threads": 1, "unit": "processor seconds", "steps": steps}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
