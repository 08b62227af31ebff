"""Evaluate a policy on held-out problems or test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from baton.records.evaluation import Evaluation, share_interval
from baton.rewards.scorer import Finished, RewardScorer, trajectory_of
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.run.tokenization import PromptEncoder, response_of
from baton.types import Group, Prompt, SamplingParams, ScoredTrajectory

EVAL_NOISE = 0x5EED_E7A1
"""Noise seed of all evaluations, so that results of checkpoints differ only because of the weights."""


def evaluate(
    sweep: EvalRollout,
    judge: RewardScorer,
    encoder: PromptEncoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    version: int,
    samples_of: Mapping[str, int] | None = None,
) -> tuple[list[Evaluation], list[Group]]:
    """Generate and score `samples` responses to each prompt; return the results of each task, and the scored groups.

    samples_of: task name → number of responses, for tasks whose number differs from `samples`.

    With several tasks, the last result is named `all` and covers all of them. Raises Stopped if a stop is requested.
    """
    sizes = [(samples_of or {}).get(p.task, samples) for p in prompts]
    requests = [EvalGroup(index, encoder.ids(p), sizes[index], p) for index, p in enumerate(prompts)]
    members: list[list[ScoredTrajectory]] = [[] for _ in prompts]
    waiting: list[list[Finished]] = [[] for _ in prompts]
    for one in sweep.rollout(requests, sampling, noise_seed=EVAL_NOISE, version=version):
        group_id = trajectory_of(one).group_id
        if isinstance(one, ScoredTrajectory) and not (judge.scores_episodes and one.judgement.is_judged):
            members[group_id].append(one)  # the environment has given the whole reward, or has failed
        else:
            waiting[group_id].append(one)
        if len(waiting[group_id]) + len(members[group_id]) == sizes[group_id] or not judge.sees_groups:
            ready = sorted(waiting[group_id], key=lambda finished: trajectory_of(finished).sample_index)
            waiting[group_id] = []
            judge.submit(ready, prompts[group_id], [response_of(each, encoder.tokenizer) for each in ready])
    for judged in judge.drain(sweep.worker.stop.check):
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
    scored = [j for row in judged for j in row]
    correct = [[j.is_correct for j in row] for row in judged if row]
    parts: dict[str, list[float]] = {}
    for result in scored:
        for name, value in result.parts.items():
            parts.setdefault(name, []).append(value)
    lengths = [m.num_policy_tokens for g in groups for m in g.members]
    cut = [m.trajectory.finish_reason == "length" for g in groups for m in g.members]
    sizes = {len(g.members) for g in groups}
    return Evaluation(
        task,
        len(groups),
        min(sizes) if len(sizes) == 1 else 1,
        temperature,
        share_interval(correct) if correct else None,
        share_interval([[any(c)] for c in correct]) if correct and len(sizes) == 1 else None,
        sum(lengths) / len(lengths),
        sum(cut) / len(cut),
        len(lengths) - len(scored),
        fmean(result.reward for result in scored) if scored else None,
        {name: fmean(values) for name, values in parts.items()},
    )
