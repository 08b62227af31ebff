"""Processor time of generation and of a train step with top-p, top-k and their sampling masks, and without.

One embedded engine generates the same number of tokens in every way, in turn, and one trainer makes one update of each
batch. The least of several rounds counts, because other processes use the same cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from baton.policy.load import load_model
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.run.tokenization import PromptEncoder
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.settings import TrainerSettings
from baton.types import Batch, Group, PolicyVersion, RewardResult, ScoredTrajectory, Trajectory, plain

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "sampling_masks.json"
WAYS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20": {"top_k": 20},
    "top_k 512": {"top_k": 512},
}
GROUP_SIZE, TOKENS = 8, 32


def cpu_s(work: Any) -> tuple[float, Any]:
    """Return the processor seconds of a call, and its result."""
    begin = time.process_time()
    found = work()
    return time.process_time() - begin, found


def measured(path: str, num_groups: int, rounds: int) -> dict[str, Any]:
    """Return the least processor seconds of engine and trainer for each way."""
    recipe, version = load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml", []), PolicyVersion("m", 0)
    tokenizer, cpu = load_tokenizer(path), torch.device("cpu")
    settings = EngineSettings(slots=64, max_context_tokens=256, dtype="float32")
    # without end ids, every way generates the same number of tokens
    engine = EmbeddedEngine(load_model(path, dtype=torch.float32, device=cpu), tokenizer, settings, version, ())
    rollout = EvalRollout(WorkerClient(LocalTransport(engine), max_context_tokens=256))
    encoder = PromptEncoder(load_tokenizer(recipe.model.path), recipe.task)
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, tool_format=encoder.tool_format)
    prompts = PromptStream(mixture, 0).take(num_groups)
    vocabulary = engine.network.model.config.vocab_size
    ids = [tuple(i % vocabulary for i in encoder.ids(prompt)) for prompt in prompts]
    seconds: dict[str, dict[str, list[float]]] = {way: {"engine": [], "trainer": []} for way in WAYS}
    sizes: dict[str, dict[str, float]] = {}
    trainer = LocalTrainer(
        load_model(path, dtype=torch.float32, device=cpu),
        tokenizer,
        TrainerSettings(lr=1e-9, dtype="float32", max_tokens_per_microbatch=2048),
        AlgorithmSettings(name="dr_grpo"),
        temperature=1.0,
        total_steps=10_000,
        version=version,
        max_new_tokens=TOKENS,
    )
    step = 0
    for number in range(rounds):
        for way, keys in WAYS.items():
            sampling = RolloutSettings(max_new_tokens=TOKENS, **keys).sampling()
            requests = [EvalGroup(i, own, GROUP_SIZE) for i, own in enumerate(ids)]
            generating, grown = cpu_s(
                lambda s=sampling, r=requests, n=number: list(rollout.rollout(r, s, noise_seed=n, version=0))
            )
            step += 1
            batch = batch_of(step, grown, prompts)
            training, metrics = cpu_s(lambda b=batch: trainer.step(b))
            # The learning rate is so small that the trainer keeps the engine's weights.
            seconds[way]["engine"].append(round(generating, 4))
            seconds[way]["trainer"].append(round(training, 4))
            packed = len(msgspec.msgpack.encode(grown, enc_hook=plain))
            wide = 2 if vocabulary <= 1 << 16 else 4
            kept = [len(mask) // wide for t in grown for mask in t.kept]
            sizes[way] = {
                "bytes_per_token": packed / sum(t.num_tokens for t in grown),
                "mean_kept": sum(kept) / max(1, len(kept)),
                "max_kept": max(kept, default=0),
            }
            print(way, seconds[way], sizes[way], metrics.get("policy/logprob_diff_max"), file=sys.stderr, flush=True)
    least = {way: {part: min(values) for part, values in own.items()} for way, own in seconds.items()}
    base = least["whole vocabulary"]
    return {
        "model": Path(path).name,
        "vocabulary": vocabulary,
        "tokens": num_groups * GROUP_SIZE * TOKENS,
        "processor_s": seconds,
        "least_s": least,
        "ratio": {way: {part: own[part] / base[part] for part in own} for way, own in least.items()},
        "sizes": sizes,
    }


def batch_of(step: int, grown: list[Trajectory], prompts: Any) -> Batch:
    """Return the groups of a batch, with rewards that differ, under the version before the step."""
    groups = []
    for group_id, prompt in enumerate(prompts):
        members = []
        for index, trajectory in enumerate(sorted((t for t in grown if t.group_id == group_id), key=_index)):
            segments = tuple(msgspec.structs.replace(s, policy_version=step - 1) for s in trajectory.segments)
            own = msgspec.structs.replace(trajectory, segments=segments)
            reward = float(index % 2)
            members.append(ScoredTrajectory(own, RewardResult(reward, {"correct": reward}, reward == 1.0)))
        groups.append(Group(group_id, prompt, tuple(members)))
    return Batch(step, tuple(groups))


def _index(trajectory: Trajectory) -> int:
    return trajectory.sample_index


def main() -> None:
    """Measure a model and write the raw results."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default=str(ROOT / "models" / "quickstart"))
    arguments.add_argument("--groups", type=int, default=16)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    case = measured(given.model, given.groups, given.rounds)
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=30, check=True)
    cpu = Path("/proc/cpuinfo").read_text().split("model name", 1)[1].splitlines()[0].strip("\t :")
    facts = {"commit": git.stdout.strip(), "hardware": cpu, "torch": torch.__version__, "threads": 1}
    known = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else []
    found = [
        *(one for one in known if one["model"] != case["model"]),
        case | facts | {"python": platform.python_version()},
    ]
    RESULTS.write_text(json.dumps({"cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
