"""Evaluate a policy on held-out problems or test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from baton.records.evaluation import Evaluation, share_interval
from baton.rewards.scorer import Finished, RewardScorer, trajectory_of
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.run.tokenization import PromptEncoder, response_of
from baton.types import Group, Prompt, SamplingParams, ScoredTrajectory

EVAL_NOISE = 0x5EED_E7A1
"""Seed of the sampling noise of all evaluations. Because it is constant, results of two checkpoints differ only because
of their weights."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Generates and scores responses to a list of prompts."""

    prompts: Sequence[Prompt]
    encoder: PromptEncoder
    judge: RewardScorer
    rollout: EvalRollout
    samples: int = 1
    """Number of sampled responses per prompt."""
    samples_of: Mapping[str, int] = field(default_factory=dict)
    """Test set → number of sampled responses per prompt, if it differs from `samples`."""

    def evaluate(
        self, sampling: SamplingParams, *, version: int, samples: int | None = None
    ) -> tuple[list[Evaluation], list[Group]]:
        """Generate and score responses to each prompt. Return the results of each task, and the scored groups.
        `samples`: number of responses per prompt, used instead of `self.samples` and `self.samples_of`. Greedy decoding
        generates one response per prompt.

        With several tasks, the last result is named `all` and covers all of them. Raises Stopped if a stop is
        requested.
        """
        prompts, judge, temperature = self.prompts, self.judge, sampling.temperature
        sizes = [(samples or self.samples_of.get(p.task, self.samples)) if temperature else 1 for p in prompts]
        requests = [EvalGroup(index, self.encoder.ids(p), sizes[index], p) for index, p in enumerate(prompts)]
        members: list[list[ScoredTrajectory]] = [[] for _ in prompts]
        waiting: list[list[Finished]] = [[] for _ in prompts]
        for one in self.rollout.rollout(requests, sampling, noise_seed=EVAL_NOISE, version=version):
            group_id = trajectory_of(one).group_id
            if isinstance(one, ScoredTrajectory) and not (judge.scores_episodes and one.judgement.is_judged):
                members[group_id].append(one)  # the environment has given the whole reward, or has failed
            else:
                waiting[group_id].append(one)
            if len(waiting[group_id]) + len(members[group_id]) == sizes[group_id] or not judge.sees_groups:
                ready = sorted(waiting[group_id], key=lambda finished: trajectory_of(finished).sample_index)
                waiting[group_id] = []
                responses = [response_of(each, self.encoder.tokenizer) for each in ready]
                judge.submit(ready, prompts[group_id], responses)
        for judged in judge.drain(self.rollout.worker.stop.check):
            members[judged.trajectory.group_id].append(judged)
        groups = [
            Group(index, prompts[index], tuple(sorted(m, key=lambda j: j.trajectory.sample_index)))
            for index, m in enumerate(members)
        ]
        names = list(dict.fromkeys(p.task for p in prompts))
        results = [_summary(name, [g for g in groups if g.prompt.task == name], temperature) for name in names]
        if len(names) > 1:
            results.append(_summary("all", groups, temperature))
        return results, groups


def _summary(task: str, groups: Sequence[Group], temperature: float) -> Evaluation:
    judged = [[m.judgement for m in g.members if m.judgement.is_judged] for g in groups]
    scored = [j for row in judged for j in row]
    correct = [[j.is_correct for j in row] for row in judged if row]
    parts = dict.fromkeys(name for result in scored for name in result.parts)
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
        {name: fmean(result.parts[name] for result in scored if name in result.parts) for name in parts},
    )
