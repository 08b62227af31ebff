"""How good a policy is on prompts nobody trains on: accuracy and pass@k, with intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import msgspec
from pydantic import Field

from baton.policy.tokenizer import Tokenizer
from baton.rollout.sweep import Request, Sweep
from baton.settings import Settings
from baton.tasks.rewards import Judge
from baton.types import Group, Judged, Prompt, SamplingParams, Trajectory

EVAL_NOISE = 0x5EED_E7A1
"""Noise seed of evaluations: the same draws each time, so that two checkpoints differ by their weights alone."""
Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class EvalSettings(Settings):
    """[eval] the held-out evaluation."""

    at_start: bool = True
    """Whether the model is evaluated before the first train step."""
    every: int = Field(default=20, ge=0)
    """Train steps between evaluations; 0 evaluates none but the one at the start and the one after the last step."""
    num_prompts: int = Field(default=256, ge=1)
    """Distinct held-out prompts; all there are where a task has fewer than its share."""
    samples: int = Field(default=1, ge=1)
    """Sampled responses per prompt (k of pass@k)."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the sampled responses."""
    greedy: bool = True
    """Whether a greedy response per prompt is judged too."""
    max_new_tokens: int | None = None
    """Longest response, tokens; the default is that of [rollout]."""


class Interval(msgspec.Struct, frozen=True):
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Evaluation(msgspec.Struct, frozen=True):
    """The result of one task under one way of sampling."""

    task: str
    num_prompts: int
    samples: int
    temperature: float
    """0 is greedy."""
    accuracy: Interval | None
    """avg@k: share of correct responses; None where not one could be judged."""
    pass_at_k: Interval | None
    """Share of prompts with a correct response among k; equals accuracy for k = 1."""
    mean_length_tokens: float
    clip_ratio: float
    """Share of responses cut at the longest length."""
    unjudged: int = 0
    """Responses that no judge could judge; accuracy and pass@k leave them out."""

    @property
    def way(self) -> str:
        """How the responses were sampled, in words."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"


def evaluate(
    sweep: Sweep,
    judge: Judge,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    version: int,
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[list[Evaluation], list[Group]]:
    """Generate `samples` responses to each prompt and judge them; results by task, then over all as task `all`.

    Raises Stopped where the sweep is to stop.
    """
    requests = [Request(index, tokenizer.prompt_ids(p.messages), samples) for index, p in enumerate(prompts)]
    members: list[list[Judged]] = [[] for _ in prompts]
    finished: list[list[Trajectory]] = [[] for _ in prompts]
    for trajectory in sweep.rollout(requests, sampling, noise_seed=EVAL_NOISE, version=version, on_tokens=on_tokens):
        ready = finished[trajectory.group_id]
        ready.append(trajectory)
        if len(ready) == samples or not judge.sees_groups:
            ready.sort(key=lambda t: t.sample_index)
            texts = [tokenizer.text(t.token_ids) for t in ready]
            judge.submit(ready, prompts[trajectory.group_id], texts)
            finished[trajectory.group_id] = []
    for judged in judge.drain(sweep.stop.check):
        members[judged.trajectory.group_id].append(judged)
    groups = [
        Group(index, prompts[index], tuple(sorted(m, key=lambda j: j.trajectory.sample_index)))
        for index, m in enumerate(members)
    ]
    names = list(dict.fromkeys(p.task for p in prompts))
    results = [_summary(name, [g for g in groups if g.prompt.task == name], sampling.temperature) for name in names]
    if len(names) > 1:
        results.append(_summary("all", groups, sampling.temperature))
    return results, groups


def _summary(task: str, groups: Sequence[Group], temperature: float) -> Evaluation:
    judged = [[m.judgement for m in g.members if m.judgement.is_judged] for g in groups]
    correct = [[j.is_correct for j in row] for row in judged if row]
    lengths = [m.trajectory.num_tokens for g in groups for m in g.members]
    cut = [m.trajectory.finish_reason == "length" for g in groups for m in g.members]
    return Evaluation(
        task,
        len(groups),
        len(groups[0].members),
        temperature,
        share_interval(correct) if correct else None,
        share_interval([[any(c)] for c in correct]) if correct else None,
        sum(lengths) / len(lengths),
        sum(cut) / len(cut),
        sum(len(g.members) for g in groups) - sum(len(row) for row in judged),
    )


def shown_share(share: Interval | None) -> str:
    """For people."""
    return "not judged" if share is None else str(share)


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Metric names of one evaluation."""
    if result.temperature == 0:
        return {} if result.accuracy is None else {f"eval/{result.task}/greedy": result.accuracy.value}
    values = {f"eval/{result.task}/response_length": result.mean_length_tokens}
    if result.unjudged:
        values[f"eval/{result.task}/unjudged"] = result.unjudged
    if result.accuracy is not None:
        values[f"eval/{result.task}/avg@{result.samples}"] = result.accuracy.value
    if result.pass_at_k is not None and result.samples > 1:
        values[f"eval/{result.task}/pass@{result.samples}"] = result.pass_at_k.value
    return values


def share_interval(outcomes: Sequence[Sequence[bool]]) -> Interval:
    """95 % interval of the share of true outcomes, [prompts][samples].

    One sample per prompt: Wilson's score interval. Several: the samples of a prompt are not independent, so prompts are
    resampled (2000 seeded bootstrap draws, percentiles).
    """
    shares = [sum(row) / len(row) for row in outcomes]
    count = len(shares)
    mean = sum(shares) / count
    if all(len(row) == 1 for row in outcomes):
        centre = (mean + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        half = Z_95 / (1 + Z_95**2 / count) * math.sqrt(mean * (1 - mean) / count + Z_95**2 / (4 * count**2))
        return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))
    dice = random.Random(0)
    draws = sorted(sum(dice.choices(shares, k=count)) / count for _ in range(2000))
    return Interval(mean, draws[49], draws[1949])
