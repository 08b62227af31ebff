"""Processor time of a train step with and without `trainer.share_prompts`, on models with random weights.

One trainer makes both kinds of steps in turn, in one thread. The least of several steps counts, because other processes
use the same cores. No engine runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from baton.policy.tokenizer import Tokenizer
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.settings import TrainerSettings
from baton.types import (
    Batch,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Segment,
    Trajectory,
)

RESULTS = Path(__file__).parent / "results" / "shared_prompts.json"
QUICKSTART = Path(__file__).parents[2] / "models" / "quickstart"
CASES: dict[str, tuple[str, str, int, int, tuple[int, int]]] = {
    # name: model, data type, groups, prompt tokens, least and most response tokens
    "smollm2": ("smollm2", "float32", 1, 60, (35, 35)),
    "smollm2, bfloat16": ("smollm2", "bfloat16", 1, 60, (35, 35)),
    "smollm2, bfloat16, mixed lengths": ("smollm2", "bfloat16", 1, 60, (6, 64)),
    "quickstart": ("quickstart", "float32", 16, 60, (35, 35)),
    "quickstart, mixed lengths": ("quickstart", "float32", 16, 60, (6, 64)),
    "quickstart, short rows": ("quickstart", "float32", 32, 11, (4, 20)),
}
GROUP_SIZE = 8


def random_model(name: str) -> PreTrainedModel:
    """Return a model of the shape of SmolLM2-135M, or of the shipped model, with random weights."""
    torch.manual_seed(0)
    if name == "quickstart":
        return Qwen3ForCausalLM(Qwen3Config.from_pretrained(QUICKSTART))
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def random_batch(step: int, num_groups: int, prompt: int, lengths: tuple[int, int], vocabulary: int) -> Batch:
    """Return a batch of random tokens. All rows have an advantage, so all run forward and backward."""
    dice = random.Random(step)
    groups = []
    for group_id in range(num_groups):
        prompt_ids = tuple(dice.randrange(2, vocabulary) for _ in range(prompt))
        members = []
        for index in range(GROUP_SIZE):
            ids = tuple(dice.randrange(2, vocabulary) for _ in range(dice.randint(*lengths)))
            segment = Segment(ids, (-1.0,) * len(ids), step - 1)
            trajectory = Trajectory(group_id, index, prompt_ids, (segment,), FinishReason.STOP)
            reward = float(index % 2)
            members.append(ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0)))
        groups.append(Group(group_id, Prompt(f"prompt {group_id}", "case", ()), tuple(members)))
    return Batch(step, tuple(groups))


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the processor seconds of `rounds` steps of each kind, in turn."""
    model_name, dtype, num_groups, prompt, lengths = CASES[name]
    model = random_model(model_name)
    trainer = LocalTrainer(
        model,
        Tokenizer(AutoTokenizer.from_pretrained(QUICKSTART)),
        TrainerSettings(
            lr=1e-6,
            dtype=dtype,
            max_tokens_per_microbatch=2048,
            share_prompts=True,
            max_mismatch_kl=(1e9, 1e9),  # the batches have invented log-probabilities
            max_logprob_diff=(1e9, 1e9),
        ),
        AlgorithmSettings(name="dr_grpo"),
        temperature=1.0,
        total_steps=1000,
        version=PolicyVersion("random", 0),
        max_new_tokens=lengths[1],
    )
    seconds: dict[str, list[float]] = {"separate": [], "shared": []}
    entropies: dict[str, list[float]] = {"separate": [], "shared": []}
    for step in range(1, 2 * rounds + 1):
        kind = ("separate", "shared")[step % 2]
        trainer.passes = replace(trainer.passes, can_share=kind == "shared")
        batch = random_batch(step, num_groups, prompt, lengths, model.config.vocab_size)
        begin = time.process_time()
        metrics = trainer.step(batch)
        seconds[kind].append(round(time.process_time() - begin, 4))
        entropies[kind].append(metrics["policy/entropy"])
        print(name, kind, seconds[kind][-1], file=sys.stderr, flush=True)
    least = {kind: min(values) for kind, values in seconds.items()}
    rows = [t for group in batch.groups for t in (m.trajectory for m in group.members)]
    num_separate = sum(prompt + row.num_tokens for row in rows)
    return {
        "case": name,
        "rows": len(rows),
        "tokens_separate": num_separate,
        "tokens_shared": num_separate - prompt * (len(rows) - num_groups),
        "processor_s": seconds,
        "least_s": least,
        "ratio": least["separate"] / least["shared"],
        "mean_entropy": {kind: sum(values) / len(values) for kind, values in entropies.items()},
    }


def main() -> None:
    """Measure the cases and write the raw results of those that were measured."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else []
    for name in given.cases:
        case = measured(name, given.rounds)
        print(json.dumps(case), flush=True)
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=True)
        cpu = Path("/proc/cpuinfo").read_text().split("model name", 1)[1].splitlines()[0].strip("\t :")
        facts = {"commit": git.stdout.strip(), "hardware": cpu, "torch": torch.__version__, "threads": 1}
        facts["python"] = platform.python_version()
        found = [*(one for one in found if one["case"] != name), case | facts]
        RESULTS.write_text(json.dumps({"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
