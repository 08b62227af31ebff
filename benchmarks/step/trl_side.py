"""TRL's side: GRPOTrainer on the same prompts, model, group size, rewards and lengths; one update per step."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import Turns, own_stdout

from baton.policy.tokenizer import Tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rewards.scorer import RewardScorer
from baton.tasks.stream import PromptStream, TaskMixture

STEPS = 400
"""Steps that there are prompts for."""


class Watcher(TrainerCallback):
    """Stops the trainer between turns, and adds up its stages."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._seconds: dict[str, float] = {}
        self._begin = 0.0
        self.mean_length = 0.0
        """Of the step's responses, tokens."""

    def watch(self, owner: Any, method: str, stage: str) -> None:
        """Count the time of a method."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - begin

        setattr(owner, method, timed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set-up is done."""
        self._turns.ready()
        self._begin = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the times of a step."""
        step_s = time.perf_counter() - self._begin
        train_s = step_s - sum(self._seconds.values())
        values = {"time/train": train_s, "perf/step_time": step_s, "response_length/mean": self.mean_length}
        self._turns.stepped(self._seconds | values)
        self._seconds, self._begin = {}, time.perf_counter()


def main() -> None:
    """Train until the driver hangs up. Arguments: threads, rows per device and pass, dtype, recipe, overrides.

    With dtype bfloat16, TRL computes in autocast; its weights are float32, as Baton's master weights are.
    """
    turns = Turns(own_stdout())
    threads, rows = (int(argument) for argument in sys.argv[1:3])
    torch.set_num_threads(threads)
    recipe = load_recipe(Recipe, Path(sys.argv[4]), sys.argv[5:])
    is_dr_grpo = recipe.algorithm.name == "dr_grpo"
    rollout, batch = recipe.rollout, recipe.rollout.batch_groups * recipe.rollout.group_size
    hf = AutoTokenizer.from_pretrained(recipe.model.path, padding_side="left")
    tokenizer = Tokenizer(hf)
    mixture = TaskMixture(recipe.task, recipe.answer)
    judge = RewardScorer(mixture.tasks, recipe.reward, recipe.answer.format)
    prompts = PromptStream(mixture, recipe.run.seed).take(STEPS * rollout.batch_groups)
    texts = [tokenizer.text(tokenizer.prompt_ids(prompt.messages), keep_special=True) for prompt in prompts]
    watcher = Watcher(turns)

    def correct(completions: list[str], number: list[int], completion_ids: Any, **_: Any) -> list[float]:
        watcher.mean_length = sum(map(len, completion_ids)) / len(completion_ids)
        return [judge.score(prompts[n], text).reward for n, text in zip(number, completions, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32),
            reward_funcs=correct,
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=sys.argv[3] == "bfloat16",
                loss_type="dr_grpo" if is_dr_grpo else "dapo",
                scale_rewards=not is_dr_grpo,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=batch // rows,
                num_generations=rollout.group_size,
                max_completion_length=rollout.max_new_tokens,
                max_steps=STEPS,
                learning_rate=recipe.trainer.lr,
                lr_scheduler_type="constant",
                beta=0.0,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                save_strategy="no",
                logging_steps=100_000,
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": t, "number": n} for n, t in enumerate(texts)]),
            processing_class=hf,
            callbacks=[watcher],
        )
        watcher.watch(trainer, "_generate", "time/generate")
        watcher.watch(trainer, "_calculate_rewards", "time/judge")
        trainer.train()


if __name__ == "__main__":
    main()
