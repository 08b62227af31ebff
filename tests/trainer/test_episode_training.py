"""Multi-turn episodes in a train step: every sampled token once, and numbers of the episode, however it is divided."""

import math
from collections import Counter
from itertools import accumulate

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import SMOOTH, environment, make_trainer, policy, tiny_model

from baton.trainer.advantages import Turns
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.microbatches import cut
from baton.trainer.samples import batch_metrics, training_samples, with_advantages
from baton.types import (
    Author,
    Batch,
    Episode,
    Exchange,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    RewardResult,
    ScoredTrajectory,
    Trajectory,
)

GRPO = AlgorithmSettings()


def exchange(offset, reward=0.0, path=0):
    return Exchange(offset, "action", reward, "observation", "digest", 0.0, path)


def scored(group_id, index, paths, exchanges, reward, *, discount=1.0, failure=None, finish=FinishReason.STOP):
    """An episode of `paths`, each a prompt and segments. Only the last path can end at the maximum length."""
    reasons = [*[FinishReason.STOP] * (len(paths) - 1), finish]
    trajectories = [
        Trajectory(group_id, index, tuple(prompt), tuple(segments), reason)
        for (prompt, segments), reason in zip(paths, reasons, strict=True)
    ]
    episode = Episode(tuple(exchanges), tuple(trajectories[:-1]), discount=discount)
    return ScoredTrajectory(trajectories[-1], RewardResult(reward, {}, reward > 0, failure=failure), episode)


def group_of(group_id, members):
    return Group(group_id, Prompt(f"prompt {group_id}", "case", ()), tuple(members))


def two_paths_and_one(**last):
    """Episode 0/0: 3 policy tokens in its first path, 1 in its second. Episode 0/1: 2 policy tokens in one path."""
    first = ((2, 3), [policy(5, 6), environment(20, 21, 22), policy(7)])
    second = ((2, 30, 31), [policy(8)])
    exchanges = [exchange(2, 1.0), exchange(6, 0.0), exchange(1, 2.0, path=1)]
    whole = scored(0, 0, [first, second], exchanges, 1.5, discount=0.5, **last)
    return group_of(
        0, [whole, scored(0, 1, [((2, 3), [policy(9), environment(20), policy(10)])], [exchange(1)], 0.0, discount=0.5)]
    )


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_every_path_is_a_sample_and_the_episode_has_one_advantage_and_one_length():
    (found,) = with_advantages([training_samples([two_paths_and_one()], GRPO)], AlgorithmSettings(name="dr_grpo"))
    assert [(row.name, row.path, row.token_ids, row.prompt_length) for row in found] == [
        ("0/0", 0, (2, 3, 5, 6, 20, 21, 22, 7), 2),
        ("0/0", 1, (2, 30, 31, 8), 3),
        ("0/1", 0, (2, 3, 9, 20, 10), 2),
    ]
    assert [(row.num_trained, row.episode_tokens, row.reward) for row in found] == [(3, 4, 1.5), (1, 4, 1.5), (2, 2, 0)]
    assert [row.advantages.tolist() for row in found] == [[0.75] * 3, [0.75], [-0.75] * 2]  # the mean is 1.5 / 2


def test_lengths_and_the_overlong_penalty_count_the_policys_tokens_of_all_paths():
    """Of at most 5 tokens the last 2 are the zone: 4 tokens lose half, 2 nothing; observations do not count."""
    group, algorithm = two_paths_and_one(), AlgorithmSettings(overlong_frac=0.4)
    rows = training_samples([group], algorithm, longest=5)
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0]
    metrics = batch_metrics(Batch(1, (group,)), rows, algorithm, longest=5)
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (3.0, 4.0)
    assert (metrics["reward/mean"], metrics["reward/overlong/mean"]) == (0.75, -0.25)


def test_the_overlong_filter_excludes_all_paths_of_an_episode():
    group = two_paths_and_one(finish=FinishReason.LENGTH)
    rows = training_samples([group], AlgorithmSettings(overlong_filter=True))
    assert [(row.num_trained, row.episode_tokens) for row in rows] == [(0, 0), (0, 0), (2, 2)]
    metrics = batch_metrics(Batch(1, (group,)), rows, GRPO)
    assert (metrics["tokens/filtered"], metrics["response_length/clip_ratio"]) == (4.0, 0.5)


def test_an_episode_without_a_reward_is_in_no_statistic():
    failed = scored(0, 2, [((2,), [policy(5)]), ((3,), [policy(6)])], [], 0.0, failure="the environment crashed")
    with_failure = group_of(0, [*two_paths_and_one().members, failed])
    for group in (two_paths_and_one(), with_failure):
        (found,) = with_advantages([training_samples([group], GRPO)], GRPO)
        assert [row.name for row in found] == ["0/0", "0/0", "0/1"]
        assert found[0].advantages[0] == pytest.approx(0.5**0.5, abs=1e-6)


@st.composite
def groups(draw):
    """Groups of episodes of up to 4 paths. Each token id is unique in its episode, so that it can be counted."""
    found = []
    for group_id in range(draw(st.integers(1, 3))):
        members = []
        for index in range(draw(st.integers(2, 4))):
            ids, version, paths = iter(range(10**6)), 0, []
            for _ in range(draw(st.integers(1, 4))):
                segments = []
                for _ in range(draw(st.integers(1, 5))):
                    version += draw(st.integers(0, 1))
                    kind = draw(st.sampled_from([policy, policy, environment]))
                    segments.append(kind(*(next(ids) for _ in range(draw(st.integers(1, 4)))), version=version))
                paths.append(((next(ids),), segments))
            failure = draw(st.sampled_from([None, None, None, "failed"]))
            members.append(scored(group_id, index, paths, [], draw(st.floats(-1, 1)), failure=failure))
        found.append(group_of(group_id, members))
    return found


@given(groups(), st.integers(0, 6))
def test_every_sampled_token_is_trained_exactly_once_unless_it_is_too_old(given_groups, oldest):
    rows = training_samples(given_groups, GRPO, oldest=oldest)
    trained = Counter(
        (row.name, token)
        for row in rows
        for token, is_trained in zip(row.token_ids[row.prompt_length :], row.is_trained, strict=True)
        if is_trained
    )
    judged = [[m for m in group.members if m.judgement.is_judged] for group in given_groups]
    episodes = [member for members in judged if len(members) >= 2 for member in members]
    expected = Counter(
        (path.name, token)
        for member in episodes
        for path in member.paths
        for segment in path.segments
        for token in segment.token_ids
        if segment.author is Author.POLICY and segment.policy_version >= oldest
    )
    assert trained == expected
    assert set(trained.values()) <= {1}
    by_episode = Counter(name for name, _ in trained)
    assert all(row.episode_tokens == by_episode[row.name] for row in rows)
    part = cut(rows, max_tokens_per_microbatch=50, device=torch.device("cpu"))
    assert (part.num_episodes, part.num_trained_tokens) == (len(episodes), sum(trained.values()))


# ---- gradients -------------------------------------------------------------------------------------------------------

TURNS = [
    [([5, 6, 7], [20, 21]), ([8], [22]), ([9, 10], [])],
    [([11], [20])],
    [([12, 13, 14, 15], [23, 24, 25]), ([16], [26])],
]
"""Policy tokens and observation of each turn, for the episodes of a group."""
REWARDS = [0.5, 1.0, -0.5]


def divided(form, step=1):
    """Two groups with the tokens of TURNS: in one path and one turn, one path of many turns, or a path for each turn.

    The prompt of a new path is the whole history, so that each token has the same context in all forms.
    """
    found = []
    for group_id, prompt in enumerate(([2, 3], [4])):
        members = []
        for index, turns in enumerate(TURNS):
            segments = [
                (policy(*words, version=turn % step, logprob=-3.0 - turn), environment(*seen, version=turn % step))
                if seen
                else (policy(*words, version=turn % step, logprob=-3.0 - turn),)
                for turn, (words, seen) in enumerate(turns)
            ]
            ends = list(accumulate(len(words) + len(seen) for words, seen in turns))
            if form == "paths":
                history = [token for words, seen in turns for token in (*words, *seen)]
                prompts = [[*prompt, *history[:start]] for start in (0, *ends[:-1])]
                paths = list(zip(prompts, segments, strict=True))
                given_exchanges = [exchange(len(words), 1.0 - i, path=i) for i, (words, _) in enumerate(turns)]
            else:
                paths = [(prompt, [segment for turn in segments for segment in turn])]
                offsets = [end - len(seen) for end, (_, seen) in zip(ends, turns, strict=True)]
                offsets = offsets if form == "turns" else offsets[-1:]
                given_exchanges = [exchange(offset, 1.0 - i) for i, offset in enumerate(offsets)]
            members.append(scored(group_id, index, paths, given_exchanges, REWARDS[index] * (1 + group_id)))
        found.append(group_of(group_id, members))
    return Batch(step, tuple(found))


def gradients(batch, **settings):
    """The gradient of every learner's parameters in one update, and the metrics."""
    version = PolicyVersion("first", batch.step - 1)
    trainer = make_trainer(max_grad_norm=math.inf, num_minibatches=1, version=version, **settings)
    metrics = trainer.step(batch)
    return {name: p.grad for learner in trainer.learners for name, p in learner.parameters.items()}, metrics


CASES = {
    "sequence_mean": {},
    "token_mean": {"aggregation": "token_mean"},
    "sequence_sum": {"name": "rloo"},
    "length_constant": {"name": "dr_grpo"},
    "cispo": {"name": "cispo"},
    "second moment": {"correction": "second_moment"},
    "KL and entropy": {"kl_coef": 0.1, "entropy_coef": 0.1},
    "KL in the reward": {"name": "reinforce_pp", "kl_coef": 0.1, "gamma": 0.9},
    "GAE": {"name": "ppo", "kl_coef": 0.1},
    "GAE, shared": {"name": "ppo", "critic": "shared"},
    "overlong": {"overlong_frac": 0.9, "max_new_tokens": 8},
    "sequence TIS": {"correction": "sequence_tis"},
    "OPSM": {"correction": "opsm", "opsm_delta": 2.6},
    "packed": {"packing": "always", "max_tokens_per_microbatch": 16},
    "small microbatches": {"max_tokens_per_microbatch": 16},
    "sequence TIS, small microbatches": {"correction": "sequence_tis", "max_tokens_per_microbatch": 16},
}


@pytest.mark.numerics
@pytest.mark.parametrize("name", CASES)
def test_more_turns_or_more_paths_leave_the_gradient_unchanged(name):
    settings = dict(CASES[name])
    if "kl_coef" in settings:
        settings["reference"] = tiny_model(seed=3)
    expected, metrics = gradients(divided("whole"), **settings)
    assert metrics["policy/grad_norm"] > 1e-3
    for form in ("turns", "paths"):
        found, others = gradients(divided(form), **settings)
        for part, gradient in expected.items():
            torch.testing.assert_close(found[part], gradient, atol=1e-6, rtol=1e-4, msg=f"{form}: {part}")
        for key in metrics.keys() - {"tokens/padding_frac"}:
            assert others[key] == pytest.approx(metrics[key], abs=1e-5, rel=1e-4), (form, key)


def updates(batch, **settings):
    """The weights after three updates with one batch, of which the last two have ratios other than 1, and metrics."""
    trainer = make_trainer(**SMOOTH, num_minibatches=1, num_epochs=3, **settings)
    metrics = trainer.step(batch)
    return {name: p.detach() for learner in trainer.learners for name, p in learner.parameters.items()}, metrics


@pytest.mark.numerics
@pytest.mark.parametrize("correction", ["none", "opsm", "icepop", "sequence_tis"])
def test_gspos_ratio_is_that_of_the_episode_however_many_paths_and_microbatches_it_has(correction):
    settings = {"name": "gspo", "correction": correction, "opsm_delta": 2.6, "clip_low": 3e-3, "clip_high": 3e-3}
    expected, metrics = updates(divided("whole"), **settings)
    assert 0 < metrics["policy/clip_frac"] < 1
    assert (metrics["policy/weight_cut_frac"] > 0) == (correction in ("opsm", "icepop"))
    for max_tokens in (8192, 16):
        found, others = updates(divided("paths"), **settings, max_tokens_per_microbatch=max_tokens)
        for name, weights in expected.items():
            torch.testing.assert_close(found[name], weights, atol=1e-5, rtol=1e-4, msg=f"{max_tokens}: {name}")
        for key in ("policy/clip_frac", "policy/weight_mean", "policy/weight_cut_frac"):
            assert others[key] == pytest.approx(metrics[key], abs=1e-5, rel=1e-4), (max_tokens, key)


@pytest.mark.numerics
def test_tokens_that_are_too_old_leave_the_denominator_of_all_paths():
    """Turns are of versions 0 and 1 by turns, and only tokens of version 1 are trained."""
    expected, metrics = gradients(divided("whole", step=2), max_staleness=0)
    found, others = gradients(divided("paths", step=2), max_staleness=0)
    assert metrics["tokens/masked"] == others["tokens/masked"] > 0
    for part, gradient in expected.items():
        torch.testing.assert_close(found[part], gradient, atol=1e-6, rtol=1e-4)


# ---- rewards by turn -------------------------------------------------------------------------------------------------


def test_turns_are_the_policys_tokens_between_exchanges_with_their_rewards():
    rows = training_samples([two_paths_and_one()], AlgorithmSettings(turn_rewards=True, overlong_frac=0.4), longest=5)
    # The turns of 0/0 have given 1 + 0.5 · 0 + 0.25 · 2 = 1.5, its whole reward: what is left is the penalty.
    assert [(row.turns, row.reward) for row in rows] == [
        (Turns((2, 1, 1), (1.0, 0.0, 2.0), 0.5), -0.5),
        (Turns((2, 1, 1), (1.0, 0.0, 2.0), 0.5), -0.5),
        (Turns((1, 1), (0.0, 0.0), 0.5), 0.0),  # the last turn ended without an exchange
    ]


def test_each_token_gets_the_rewards_from_its_own_turn_on():
    algorithm = AlgorithmSettings(name="dr_grpo", turn_rewards=True)
    (found,) = with_advantages([training_samples([two_paths_and_one()], algorithm)], algorithm)
    # returns by turn: 1 + 0 + 0.25 · 2, 0 + 0.5 · 2, 2 and 0, 0; their mean is 4.5 / 5
    assert [row.advantages.tolist() for row in found] == [
        pytest.approx([0.6, 0.6, 0.1]),
        pytest.approx([1.1]),
        pytest.approx([-0.9, -0.9]),
    ]
    with pytest.raises(ValueError, match="with turn_rewards = true the advantage differs from token to token"):
        AlgorithmSettings(name="gspo", turn_rewards=True)


def test_a_task_of_one_turn_has_the_same_advantages_with_rewards_by_turn():
    plain = group_of(0, [msgspec.structs.replace(m, episode=None) for m in divided("whole").groups[0].members])
    for name in ("grpo", "rloo", "reinforce_pp"):
        found = [
            with_advantages([training_samples([plain], algorithm)], algorithm)[0]
            for algorithm in (AlgorithmSettings(name=name), AlgorithmSettings(name=name, turn_rewards=True))
        ]
        assert all(np.array_equal(a.advantages, b.advantages) for a, b in zip(*found, strict=True))


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "ppo"])
def test_rewards_by_turn_do_not_depend_on_the_paths(name):
    expected, _ = gradients(divided("turns"), name=name, turn_rewards=True)
    found, _ = gradients(divided("paths"), name=name, turn_rewards=True)
    whole, _ = gradients(divided("turns"), name=name)
    for part, gradient in expected.items():
        torch.testing.assert_close(found[part], gradient, atol=1e-6, rtol=1e-4)
    assert any(not torch.allclose(whole[part], gradient, rtol=1e-2) for part, gradient in expected.items())
