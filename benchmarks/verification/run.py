"""How many honest workers are accused, and after how many checks dishonest ones are found, on the quickstart's model.

    python benchmarks/verification/run.py      # about three minutes of two cores

Ten train steps of the quickstart make version 10, which all workers are asked for, and version 9, which some serve in
its stead. The hub scores on one thread. Raw results: results/.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from baton.policy.load import end_ids, load_model, torch_dtype
from baton.policy.tokenizer import load_tokenizer
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.rescore import Rescorer
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm.verification.verify import (
    DEFAULTS,
    Calibration,
    CheckOutcome,
    Tolerance,
    VerificationResult,
    WorkerClass,
    judge,
    pooled,
)
from baton.tasks.stream import PromptStream, TaskMixture
from baton.types import Lease, PolicyVersion, Report, SamplingParams, Segment, Trajectory

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
GROUPS, GROUP_SIZE, CALIBRATING = 1024, 8, 64
"""Prompts; 64 × 8 trajectories of others calibrate each class."""
ATTACKED = 64
"""Groups of each attack: 64 × 8 trajectories."""
WINDOW, ORDERS = 64, 100
"""Checked trajectories that are judged together, and random orders of them that workers are made of."""
STEPS, SEED = 10, 3
CLASSES = {
    "float32": ("float32", "float32", 1, GROUPS),
    "float32, 2 threads": ("float32", "float32", 2, GROUPS // 4),
    "bfloat16": ("bfloat16", "bfloat16", 1, GROUPS),
    "bfloat16, scored in float32": ("bfloat16", "float32", 1, GROUPS // 4),
}
"""The engine's dtype, the hub's, the engine's threads, and groups of honest trajectories."""
CHECKS = (1, 2, 4, 8, 16, 32, 64)

Tensors = dict[str, torch.Tensor]


@dataclass
class World:
    """What all workers of one class have in common."""

    recipe: Recipe
    prompts: list[tuple[int, ...]]
    dtype: str
    weights: Tensors
    """Of the version that is asked for, in the class's dtype: the dtype it is published in."""
    scorer: Rescorer

    def leases(self, groups: range, **changes: Any) -> list[Lease]:
        """All trajectories of some groups."""
        sampling = SamplingParams(self.recipe.rollout.max_new_tokens)
        return [
            Lease(g * GROUP_SIZE + i, Trajectory(g, i, self.prompts[g]), sampling, changes.get("noise", SEED), STEPS)
            for g in groups
            for i in range(GROUP_SIZE)
        ]

    def engine(self, weights: Tensors, dtype: str | None = None) -> EmbeddedEngine:
        """A worker with some weights."""
        dtype, path = dtype or self.dtype, self.recipe.model.path
        model = load_model(path, dtype=torch_dtype(dtype), device=torch.device("cpu"))
        ends = end_ids(model, load_tokenizer(path))
        room = self.recipe.engine.max_context_tokens
        settings = EngineSettings(slots=64, max_context_tokens=room, dtype=dtype)
        engine = EmbeddedEngine(model, load_tokenizer(path), settings, PolicyVersion("run", STEPS), ends)
        engine.load_weights(weights, PolicyVersion("run", STEPS))
        return engine

    def scores(self, leases: Sequence[Lease], answers: Sequence[Trajectory]) -> list[Rescored]:
        """What the hub finds."""
        return self.scorer.score([Claim(a, g.sampling, g.noise_seed) for g, a in zip(leases, answers, strict=True)])


def grow(engine: EmbeddedEngine, leases: Sequence[Lease]) -> list[Trajectory]:
    """Let an engine finish leases."""
    grown = {lease.lease_id: lease.trajectory for lease in leases}
    for lease in leases:
        engine.submit(lease)
    waiting = len(leases)
    while waiting:
        for report in engine.step():
            assert isinstance(report, Report)
            grown[report.lease_id] = grown[report.lease_id].extended(report.segments, report.finish_reason)
            waiting -= report.finish_reason is not None
    return [grown[lease.lease_id] for lease in leases]


def submitted(lease: Lease, answer: Trajectory) -> Trajectory:
    """An answer sent in for a lease that it was not grown for."""
    return msgspec.structs.replace(lease.trajectory, segments=answer.segments, finish_reason=answer.finish_reason)


def of(answer: Trajectory, ids: Sequence[int], logprobs: Sequence[float]) -> Trajectory:
    """An answer with other content."""
    return msgspec.structs.replace(answer, segments=(Segment(tuple(ids), tuple(logprobs), STEPS),))


# ---- what dishonest workers do: leases and honest answers in, what they send in out ----------------------------------

Attack = Callable[[World, list[Lease], list[Trajectory]], list[Trajectory]]


def other_weights(make: Callable[[Tensors], Tensors], dtype: str | None = None) -> Attack:
    """Serve something else than was asked for."""
    return lambda world, leases, honest: grow(world.engine(make(world.weights), dtype), leases)


def int8(weights: Tensors) -> Tensors:
    """Linear layers to int8 and back, one scale for each output."""
    found = {}
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            found[name] = (tensor.float() / scale).round() * scale
        else:
            found[name] = tensor
    return found


def constant_logprobs(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """Each token said to have had the logprob −0.1."""
    return [of(a, a.token_ids, [-0.1] * a.num_tokens) for a in honest]


def flattered(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """The least likely token of each answer said to have been as likely as the likeliest one can be."""
    found = []
    for answer in honest:
        logprobs = answer.behavior_logprobs
        logprobs[logprobs.index(min(logprobs))] = -0.01
        found.append(of(answer, answer.token_ids, logprobs))
    return found


def copied(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """A sibling's answer in each one's place; also what an earlier answer to the same prompt, sent again, is."""
    return [submitted(g, honest[i - i % GROUP_SIZE + (i + 1) % GROUP_SIZE]) for i, g in enumerate(leases)]


def best_of_4(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """The likeliest of four answers with noise of the worker's own."""
    engine, found = world.engine(world.weights), list[list[Trajectory]]()
    for noise in range(100, 104):
        tries = [msgspec.structs.replace(lease, noise_seed=noise) for lease in leases]
        found.append(grow(engine, tries))
    best = [max(tries, key=lambda t: sum(t.behavior_logprobs)) for tries in zip(*found, strict=True)]
    return [submitted(g, a) for g, a in zip(leases, best, strict=True)]


def cut_short(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """Half of each answer and an end id, with the logprob that the end id truly has there."""
    end = end_ids(world.scorer.model, load_tokenizer(world.recipe.model.path))[0]
    halves = [a.num_tokens // 2 for a in honest]
    lies = [
        of(a, [*a.token_ids[:h], end], [*a.behavior_logprobs[:h], 0.0]) for a, h in zip(honest, halves, strict=True)
    ]
    scores = world.scores(leases, lies)
    return [of(a, a.token_ids, [*a.behavior_logprobs[:-1], s.logprobs[-1]]) for a, s in zip(lies, scores, strict=True)]


def other_prompt(world: World, leases: list[Lease], honest: list[Trajectory]) -> list[Trajectory]:
    """The next group's prompt answered, under the lease's own noise."""
    moved = []
    for lease in leases:
        prompt = world.prompts[lease.trajectory.group_id + 1]
        trajectory = msgspec.structs.replace(lease.trajectory, prompt_ids=prompt)
        moved.append(msgspec.structs.replace(lease, trajectory=trajectory))
    answers = grow(world.engine(world.weights), moved)
    return [submitted(g, a) for g, a in zip(leases, answers, strict=True)]


def attacks(versions: dict[int, Tensors], dtype: str) -> dict[str, Attack]:
    """All that a class is tried with."""
    found: dict[str, Attack] = {
        "weights of the version before": other_weights(lambda _: versions[STEPS - 1]),
        "weights of ten versions before": other_weights(lambda _: versions[0]),
        "int8 weights": other_weights(int8),
        "constant logprobs": constant_logprobs,
        "one logprob flattered": flattered,
        "a sibling's answer, or an earlier one": copied,
        "best of four": best_of_4,
        "cut short by an end id": cut_short,
        "answer to another prompt": other_prompt,
    }
    if dtype == "float32":
        found["bfloat16 in place of float32"] = other_weights(lambda w: w, "bfloat16")
    return found


# ---- measuring -------------------------------------------------------------------------------------------------------


def honest_class(world: World, threads: int, groups: int) -> tuple[dict[str, Any], Tolerance, list[Trajectory]]:
    """Calibrate a class and judge its honest workers; return the row, the tolerance and the answers."""
    torch.set_num_threads(threads)
    engine = world.engine(world.weights)  # its speed is taken in seconds of one processor: others may be at work
    learning, judged = world.leases(range(GROUPS, GROUPS + CALIBRATING)), world.leases(range(groups))
    teaching = grow(engine, learning)
    begin_s = time.process_time()
    answers = grow(engine, judged)
    generate_s = time.process_time() - begin_s
    torch.set_num_threads(1)
    calibration, worker_class = Calibration(), WorkerClass(processor(), world.dtype, "embedded")
    calibration.observe(worker_class, world.scores(learning, teaching))
    begin_s = time.process_time()
    scores = world.scores(judged, answers)
    rescore_s = time.process_time() - begin_s
    tolerance, default = calibration.tolerance(worker_class), DEFAULTS[world.dtype]
    verdicts = [judge([s], tolerance) for s in scores]
    tokens = sum(a.num_tokens for a in answers)
    differences = np.abs(np.concatenate([np.subtract(s.behavior_logprobs, s.logprobs) for s in scores]))
    gaps = np.concatenate([s.draw_gaps for s in scores])
    row = {
        "trajectories": len(answers),
        "tokens": tokens,
        "tolerance": {k: getattr(tolerance, k) for k in ("logprob", "draw_gap", "typical")},
        "mismatch_kl": calibration.mismatch_kl(worker_class),
        "largest_logprob_difference": float(differences.max()),
        "largest_draw_gap": float(gaps.max()),
        "tokens_with_a_gap": int((gaps > 0).sum()),
        "equal_to_the_bit": float((differences == 0).mean()),
        "suspect": sum(v.outcome is CheckOutcome.SUSPECT for v in verdicts),
        "bad": sum(v.outcome is CheckOutcome.BAD for v in verdicts),
        "bad_under_default": sum(judge([s], default).outcome is CheckOutcome.BAD for s in scores),
        "suspect_under_default": sum(judge([s], default).outcome is CheckOutcome.SUSPECT for s in scores),
        "workers_of_64_checks": len(verdicts) // WINDOW,
        "workers_convicted": sum(
            checks_until_conviction(verdicts[begin : begin + WINDOW], tolerance) is not None
            for begin in range(0, len(verdicts) - WINDOW + 1, WINDOW)
        ),
        "generate_tokens_per_s": tokens / generate_s,
        "rescore_tokens_per_s": tokens / rescore_s,
        "rescoring_over_generating": generate_s / rescore_s,
    }
    return row, tolerance, answers


def checks_until_conviction(verdicts: Sequence[VerificationResult], tolerance: Tolerance) -> int | None:
    """How many checks it takes, in this order; None where it takes more than there are."""
    for i, verdict in enumerate(verdicts):
        if verdict.outcome is CheckOutcome.BAD or pooled(verdicts[: i + 1], tolerance).outcome is CheckOutcome.BAD:
            return i + 1
    return None


def attacked(world: World, attack: Attack, honest: list[Trajectory], tolerance: Tolerance) -> dict[str, Any]:
    """How often an attack is found, one trajectory at a time and by workers that do nothing else."""
    leases = world.leases(range(ATTACKED))
    sent = attack(world, leases, honest[: len(leases)])
    scores = world.scores(leases, sent)
    verdicts = [judge([s], tolerance) for s in scores]
    differs = [a.token_ids != h.token_ids for a, h in zip(sent, honest, strict=False)]
    bad = [v.outcome is CheckOutcome.BAD for v in verdicts]
    rng = random.Random(0)
    orders = [rng.sample(verdicts, WINDOW) for _ in range(ORDERS)]
    found = [checks_until_conviction(order, tolerance) or WINDOW + 1 for order in orders]
    tests = [v.test for v in verdicts if v.outcome is CheckOutcome.BAD]
    return {
        "trajectories": len(sent),
        "with_other_tokens": sum(differs),
        "bad": sum(bad),
        "bad_of_those_with_other_tokens": sum(b for b, d in zip(bad, differs, strict=True) if d),
        "by_test": {str(test): tests.count(test) for test in sorted(set(tests), key=str)},
        "found_within_checks": {str(n): float(np.mean([f <= n for f in found])) for n in CHECKS},
        "example": next((v.reason for v in verdicts if v.outcome is CheckOutcome.BAD), None),
    }


def trained_versions(scratch: Path) -> dict[int, Tensors]:
    """Train a little; return the weights of versions 0, 9 and 10."""
    command = [sys.executable, "-m", "baton", "train", "recipes/quickstart.toml", f"run.steps={STEPS}"]
    command += [f"run.directory={scratch}", f"eval.every={STEPS}", "eval.num_prompts=16", "checkpoint.every=1"]
    subprocess.run([*command, "checkpoint.keep=3"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=300)
    files = {int(f.parent.name.rpartition("_")[2]): f for f in scratch.rglob("step_*/model.safetensors")}
    assert {STEPS - 1, STEPS} <= files.keys(), f"checkpoints of steps {sorted(files)}"
    found = {number: load_file(files[number]) for number in (STEPS - 1, STEPS)}
    return {0: load_file(ROOT / "models/quickstart/model.safetensors"), **found}


def main() -> None:
    """Measure everything and write the tables."""
    os.chdir(ROOT)
    begin_s, load = time.perf_counter(), os.getloadavg()
    torch.set_num_threads(1)
    recipe = load_recipe(Recipe, Path("recipes/quickstart.toml"))
    tokenizer = load_tokenizer(recipe.model.path)
    stream = PromptStream(TaskMixture(recipe.task, recipe.answer), SEED)
    prompts = [tokenizer.prompt_ids(p.messages) for p in stream.take(GROUPS + CALIBRATING)]
    with tempfile.TemporaryDirectory() as scratch:
        versions = trained_versions(Path(scratch))
    honest_rows, attack_rows = {}, {}
    for name, (dtype, hub_dtype, threads, groups) in CLASSES.items():
        published = {
            number: {key: tensor.to(torch_dtype(dtype)) for key, tensor in tensors.items()}
            for number, tensors in versions.items()
        }
        model = load_model(recipe.model.path, dtype=torch_dtype(hub_dtype), device=torch.device("cpu"))
        scorer = Rescorer(model)
        scorer.load(published[STEPS], STEPS)
        world = World(recipe, prompts, dtype, published[STEPS], scorer)
        row, tolerance, answers = honest_class(world, threads, groups)
        honest_rows[name] = row
        print(name, json.dumps(row), flush=True)
        if threads > 1:
            continue
        for attack_name, attack in attacks(published, dtype).items():
            attack_rows[f"{attack_name} | {name}"] = found = attacked(world, attack, answers, tolerance)
            print(attack_name, json.dumps(found), flush=True)
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    raw = {
        "commit": git.stdout.strip(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": load,
        "torch": torch.__version__,
        "seconds": time.perf_counter() - begin_s,
        "honest": honest_rows,
        "attacks": attack_rows,
    }
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    (results / "table.md").write_text(tables(honest_rows, attack_rows))
    print(tables(honest_rows, attack_rows))


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())


def tables(honest: dict[str, dict[str, Any]], attack: dict[str, dict[str, Any]]) -> str:
    """One row per class, and one per attack and class."""
    head = ["honest class", "trajectories", "bad", "suspect", "workers of 64 checks convicted", "equal to the bit"]
    head += ["largest logprob difference / gap, nats", "tolerance / typical", "mismatch KL"]
    lines = header([*head, "rescoring ÷ generating, tokens per processor second"])
    for name, r in honest.items():
        tolerance = r["tolerance"]
        cells = [
            name,
            f"{r['trajectories']:,}",
            f"{r['bad']}",
            f"{r['suspect']}",
            f"{r['workers_convicted']} of {r['workers_of_64_checks']}",
            f"{r['equal_to_the_bit']:.0%}",
            f"{r['largest_logprob_difference']:.2g} / {r['largest_draw_gap']:.2g}",
            f"{tolerance['logprob']:.2g} / {tolerance['typical']:.1g}",
            f"{r['mismatch_kl']:.1e}",
            "not measured"
            if name.endswith("threads")
            else f"{r['rescore_tokens_per_s']:,.0f} ÷ {r['generate_tokens_per_s']:,.0f} = "
            f"{r['rescoring_over_generating']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    head = ["attack", "class", "other tokens", "found in one trajectory", "by"]
    lines += ["", *header([*head, *(f"worker found within {n}" for n in CHECKS)])]
    for key, r in attack.items():
        name, _, class_name = key.partition(" | ")
        cells = [
            name,
            class_name,
            f"{r['with_other_tokens'] / r['trajectories']:.0%}",
            f"{r['bad'] / r['trajectories']:.1%}",
            ", ".join(f"{test} {count}" for test, count in r["by_test"].items()),
            *(f"{r['found_within_checks'][str(n)]:.0%}" for n in CHECKS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def header(names: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


if __name__ == "__main__":
    main()
