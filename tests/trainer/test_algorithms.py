"""What a preset does in a train step: its terms, its divisors, its critic, against the formula computed by autograd."""

import math

import pytest
import torch
from trainer_cases import (
    VOCAB,
    are_bit_equal,
    environment,
    grpo_advantages,
    largest_difference,
    make_group,
    make_trainer,
    parameters,
    policy,
    random_batch,
    tiny_model,
)

from baton.policy.head import find_head, set_max_logits
from baton.trainer import forward
from baton.trainer.algorithm import PRESETS
from baton.types import Batch, FinishReason, PolicyVersion

pytestmark = pytest.mark.numerics


def stepped(batch, model=None, **settings):
    trainer = make_trainer(model, max_grad_norm=math.inf, **settings)
    return trainer, trainer.step(batch)


def logprobs_of(model, trajectory, temperature=1.0):
    """[L] of the response, and the entropy there, one trajectory at a time."""
    ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]])
    table = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)[len(trajectory.prompt_ids) - 1 :]
    targets = torch.tensor(trajectory.token_ids)
    return table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1)


def same_gradients(trainer, model):
    for (name, found), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)


# ---- every preset ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_steps_and_says_so_in_numbers(name):
    trainer = make_trainer(name=name, num_minibatches=2)
    for step in (1, 2):
        metrics = trainer.step(random_batch(step, num_groups=4))
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["policy/grad_norm"] > 0
    assert largest_difference(parameters(trainer), parameters(make_trainer())) > 1e-4


@pytest.mark.parametrize("name", [*PRESETS, "grpo with KL", "ppo with KL", "ppo shared", "grpo with entropy"])
def test_the_update_does_not_depend_on_the_split(name):
    """Microbatches of 24 tokens or all at once, padded or packed: the same update to 1e-5 in float32."""
    more = {
        "grpo with KL": {"kl_coef": 0.1},
        "ppo with KL": {"kl_coef": 0.1},
        "ppo shared": {"critic": "shared"},
        "grpo with entropy": {"entropy_coef": 0.1},
    }.get(name, {})
    batch = random_batch(1, num_groups=5)
    reference = tiny_model(seed=3) if "kl_coef" in more else None
    found = []
    for tokens, packing in ((100_000, "never"), (24, "never"), (100_000, "always"), (24, "always")):
        found.append(
            stepped(
                batch,
                name=name.split()[0],
                num_minibatches=1,
                reference=reference,
                max_tokens_per_microbatch=tokens,
                packing=packing,
                **more,
            )
        )
    (whole, metrics), *others = found
    for trainer, other in others:
        for one, other_one in zip(whole.learners, trainer.learners, strict=True):  # the policy's, and a critic's
            for part, parameter in one.parameters.items():
                grad = other_one.parameters[part].grad
                torch.testing.assert_close(grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=part)
        for key in ("policy/loss", "policy/entropy", "policy/grad_norm", "kl/ref", "value/loss", "policy/ess"):
            assert other.get(key, 0.0) == pytest.approx(metrics.get(key, 0.0), abs=1e-5, rel=1e-5), key


def test_the_objective_alone_moves_nothing_where_rewards_are_equal():
    equal = Batch(1, tuple(make_group(i, [0.7] * 3, [[policy(5, 6)], [policy(7)], [policy(8, 9)]]) for i in (0, 1)))
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline"):
        trainer, metrics = stepped(equal, name=name, num_minibatches=1)
        assert are_bit_equal(parameters(trainer), parameters(make_trainer())), name
        assert metrics["reward/zero_std_frac"] == 1.0


# ---- terms beside the objective --------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "length_constant"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_term_also_moves_trajectories_without_an_advantage(estimator, aggregation):
    """The second group's rewards are equal: the objective is flat there, the KL term is not."""
    mixed = random_batch(1, num_groups=1).groups[0]
    equal = make_group(1, [0.5, 0.5], [[policy(5, 6, 7)], [policy(8)]])
    batch = Batch(1, (mixed, equal))
    model, frozen, coefficient = tiny_model(), tiny_model(seed=3), 0.3
    advantages = {**grpo_advantages([mixed]), 1: (0.0, 0.0)}
    num_tokens = sum(t.num_tokens for t in batch.trajectories)
    objective, divergence, total, num_clamped = torch.zeros(()), torch.zeros(()), 0.0, 0
    for trajectory in batch.trajectories:
        logprobs, _ = logprobs_of(model, trajectory)
        with torch.no_grad():
            x = logprobs_of(frozen, trajectory)[0]
        apart = logprobs - x
        kl = apart.square() / 2 if estimator == "k2" else ((-apart).exp() - 1 + apart).clamp(max=10.0)
        num_clamped += int((kl == 10.0).sum())
        weight = (logprobs.detach() - torch.tensor(trajectory.behavior_logprobs)).exp().clamp(max=2.0)
        terms = weight * logprobs * advantages[trajectory.group_id][trajectory.sample_index]
        share = {
            "sequence_mean": 1 / (5 * trajectory.num_tokens),
            "token_mean": 1 / num_tokens,
            "length_constant": 1 / (5 * 64),
        }[aggregation]
        objective = objective + share * terms.sum()
        divergence = divergence + share * kl.sum()
        total += kl.sum().item()
    (-objective + coefficient * divergence).backward()
    trainer, metrics = stepped(
        batch, reference=frozen, kl_coef=coefficient, kl_estimator=estimator, aggregation=aggregation
    )
    same_gradients(trainer, model)
    assert metrics["kl/ref"] == pytest.approx(total / num_tokens, rel=1e-4)
    assert metrics["kl/clamped_frac"] == num_clamped / num_tokens
    assert (num_clamped > 0) == (estimator == "k3")


@pytest.mark.parametrize(
    "settings", [{"kl_in": "loss"}, {"kl_in": "reward"}, {"kl_in": "reward", "name": "reinforce_pp"}]
)
def test_a_token_far_below_the_reference_cannot_end_the_run(settings):
    """The policy is so sure of other tokens that some of the batch are over 100 nats below the reference."""
    model, frozen, batch = tiny_model(initializer_range=10.0), tiny_model(), random_batch(1)
    assert min(logprobs_of(model, t)[0].min().item() for t in batch.trajectories) < -100.0
    _, metrics = stepped(
        batch, model, reference=frozen, kl_coef=0.1, kl_estimator="k3", num_minibatches=1, correction="none", **settings
    )
    assert 0.5 < metrics["kl/clamped_frac"] < 1.0
    assert metrics["kl/ref"] <= 10.0
    assert metrics["policy/grad_norm"] < 1e4
    assert all(math.isfinite(value) for value in metrics.values())


def test_an_entropy_bonus_has_the_gradient_of_the_entropy():
    batch = Batch(1, (make_group(0, [0.5, 0.5], [[policy(5, 6, 7)], [policy(8)]]),))
    model, temperature = tiny_model(), 0.7
    entropies = [logprobs_of(model, trajectory, temperature)[1] for trajectory in batch.trajectories]
    (-0.2 * sum(entropy.mean() for entropy in entropies) / 2).backward()
    trainer, metrics = stepped(batch, entropy_coef=0.2, temperature=temperature)
    same_gradients(trainer, model)
    assert metrics["policy/entropy"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-5)
    assert metrics["policy/grad_norm"] > 0


def test_a_reference_equal_to_the_policy_changes_nothing_at_the_first_update():
    batch = random_batch(1)
    plain, _ = stepped(batch)
    anchored, metrics = stepped(batch, kl_coef=0.5, reference=tiny_model())
    assert metrics["kl/ref"] == pytest.approx(0.0, abs=1e-9)
    for a, b in zip(plain.model.parameters(), anchored.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


def test_reinforce_pp_takes_the_kl_off_the_reward_token_by_token():
    batch, beta = random_batch(1, num_groups=3), 0.2
    model, frozen = tiny_model(), tiny_model(seed=3)
    scored = []
    for group in batch.groups:
        for member in group.members:
            logprobs, _ = logprobs_of(model, member.trajectory)
            with torch.no_grad():
                penalty = beta * (logprobs - logprobs_of(frozen, member.trajectory)[0])
            to_go = member.judgement.reward - penalty.flip(0).cumsum(0).flip(0)
            scored.append((logprobs, to_go, torch.tensor(member.trajectory.behavior_logprobs)))
    everything = torch.cat([to_go for _, to_go, _ in scored])
    mean, std = everything.mean(), everything.std(correction=0)
    objective = torch.zeros(())
    for logprobs, to_go, behavior in scored:
        weight = (logprobs.detach() - behavior).exp().clamp(max=2.0)
        objective = objective + (weight * logprobs * (to_go - mean) / (std + 1e-6)).sum() / len(everything)
    (-objective).backward()
    trainer, _ = stepped(batch, name="reinforce_pp", num_minibatches=1, kl_coef=beta, reference=frozen)
    same_gradients(trainer, model)


def test_a_response_without_a_policy_token_is_part_of_its_group_also_where_a_model_is_asked_first():
    """Rewards 1 and 0: the environment's trajectory has no gradient, but makes the other one better than the mean."""
    batch = Batch(1, (make_group(0, [1.0, 0.0], [[policy(5, 6)], [environment(7, 8)]]),))
    plain, _ = stepped(batch)
    asked, _ = stepped(batch, kl_coef=0.5, kl_in="reward", reference=tiny_model())  # the KL is 0
    for a, b in zip(plain.model.parameters(), asked.model.parameters(), strict=True):
        assert a.grad.abs().max() > 1e-4 or a.ndim == 1
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)


def test_dr_grpo_divides_by_the_longest_length_there_could_have_been():
    batch, model = random_batch(1, num_groups=2), tiny_model()
    objective = torch.zeros(())
    for group in batch.groups:
        mean = sum(m.judgement.reward for m in group.members) / 3
        for member in group.members:
            logprobs, _ = logprobs_of(model, member.trajectory)
            objective = objective + (logprobs * (member.judgement.reward - mean)).sum() / (6 * 50)
    (-objective).backward()
    trainer, _ = stepped(batch, name="dr_grpo", correction="none", max_new_tokens=50)
    same_gradients(trainer, model)


def test_a_trajectory_that_dapo_leaves_out_still_shapes_its_group():
    responses = [[policy(5, 6)], [policy(7)], [policy(8)]]
    stopped = make_group(0, [1.0, 0.0, 0.0], responses)
    cut_off = make_group(0, [1.0, 0.0, 0.0], responses, finish_reason=FinishReason.LENGTH)
    trainer, metrics = stepped(Batch(1, (cut_off,)), name="dapo", num_minibatches=1)
    assert are_bit_equal(parameters(trainer), parameters(make_trainer()))
    assert (metrics["tokens/trained"], metrics["tokens/filtered"]) == (0, 4)
    assert stepped(Batch(1, (stopped,)), name="dapo", num_minibatches=1)[1]["tokens/trained"] == 4


# ---- several updates -------------------------------------------------------------------------------------------------


def ratios(monkeypatch):
    seen, original = [], forward.Passes.output
    monkeypatch.setattr(
        forward.Passes, "output", lambda self, *a, **k: seen.append(k["is_update"]) or original(self, *a, **k)
    )
    return seen


def test_forwards_are_made_only_where_something_must_be_known_beforehand(monkeypatch):
    seen = ratios(monkeypatch)
    batch, all_at_once = random_batch(1), {"max_tokens_per_microbatch": 100_000}
    for settings, expected in (
        ({}, [True]),
        ({"num_epochs": 2}, [False, True, True]),
        ({"correction": "second_moment"}, [False, True]),
        ({"kl_coef": 0.1, "reference": tiny_model()}, [False, True]),  # the reference's
        ({"kl_coef": 0.1, "kl_in": "reward", "reference": tiny_model()}, [False, False, True]),  # and the proximal
    ):
        seen.clear()
        stepped(batch, **all_at_once, **settings)
        assert seen == expected


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo"])
def test_one_update_from_recomputed_logprobs_has_ratio_1_everywhere(name):
    _, metrics = stepped(random_batch(1), name=name, num_minibatches=1)
    assert metrics["policy/clip_frac"] == 0.0


def test_a_masked_prefix_has_no_part_in_gspos_ratio():
    """Two updates move the policy; what the stale prefix's behavior was makes no difference to any bit."""
    found = []
    for logprob in (-4.0, -0.1):
        responses = [
            [policy(5, 6, version=0, logprob=logprob), policy(7, 8, version=2)],
            [policy(9, 10, version=2)],
        ]
        trainer = make_trainer(
            name="gspo", num_minibatches=1, num_epochs=3, max_staleness=0, lr=1e-2, version=PolicyVersion("first", 2)
        )
        trainer.step(Batch(3, (make_group(0, [1.0, 0.0], responses),)))
        found.append(parameters(trainer))
    assert are_bit_equal(*found)


# ---- the critic ------------------------------------------------------------------------------------------------------


def test_ppo_at_a_critic_of_zero_by_autograd():
    """Values 0: with γ = λ = 1 the advantages are the rewards, normalised over the batch's policy tokens."""
    responses = [[policy(5, 6), environment(20, 21), policy(7)], [policy(8, 9)]]
    batch, model = Batch(1, (make_group(0, [1.0, 0.0], responses),)), tiny_model()
    # rewards to go 1, 1, 1 and 0, 0: mean 0.6, variance 0.24
    objective = torch.zeros(())
    for trajectory, reward in zip(batch.trajectories, (1.0, 0.0), strict=True):
        logprobs, _ = logprobs_of(model, trajectory)
        kept = torch.tensor(trajectory.is_policy)
        objective = objective + (logprobs[kept] * (reward - 0.6) / (0.24**0.5 + 1e-6)).sum() / 5
    (-objective).backward()
    trainer, metrics = stepped(batch, name="ppo", num_minibatches=1, gae_lambda=1.0, correction="none")
    same_gradients(trainer, model)
    assert metrics["value/loss"] == pytest.approx(3 * 0.5 / 5)  # ½ (0 − 1)² at three of five tokens
    assert metrics["value/explained_var"] == pytest.approx(1 - 3 / (3 - 9 / 5))


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_learns_what_to_expect(critic):
    trainer = make_trainer(
        name="ppo",
        num_minibatches=1,
        critic=critic,
        critic_lr=3e-2,
        lr=1e-5 if critic == "separate" else 3e-3,
        value_clip=math.inf,
    )
    groups = tuple(
        make_group(i, [1.0, 0.0], [[policy(5, 6, 7)], [policy(8, 9, 10)]], prompt_ids=(2, 3)) for i in range(3)
    )
    first = trainer.step(Batch(1, groups))
    for step in range(2, 30):
        last = trainer.step(Batch(step, groups))
    assert first["value/explained_var"] < 0.0
    assert last["value/explained_var"] > 0.45  # the first token tells the two apart, the prompt does not: ⅔ at most
    assert last["value/loss"] < 0.5 * first["value/loss"]


def test_a_value_that_is_clipped_gets_no_gradient():
    from baton.trainer.critic import value_loss

    # old ½, clip 0.2: the first has gone past 0.7 towards its return 1, the second past it away from its return 0,
    # the third is within, the fourth is masked
    old = torch.full((1, 4), 0.5)
    values = torch.tensor([[0.8, 0.8, 0.6, 9.0]], requires_grad=True)
    returns = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    mask = torch.tensor([[True, True, True, False]])
    loss, is_clipped = value_loss(values, old, returns, mask, 0.2)
    # ½ (0.7 − 1)² = 0.045;  ½ · 0.8² = 0.32;  ½ · 0.4² = 0.08
    assert loss.item() == pytest.approx(0.445)
    assert is_clipped.tolist() == [[True, False, False, False]]
    loss.backward()
    assert values.grad[0].tolist() == pytest.approx([0.0, 0.8, -0.4, 0.0])


def test_a_separate_critic_leaves_the_policys_gradient_alone_and_a_shared_one_does_not():
    batch = random_batch(1)
    settings = {"name": "ppo", "num_minibatches": 1}
    small, _ = stepped(batch, critic="separate", critic_lr=1e-9, **settings)
    large, _ = stepped(batch, critic="separate", critic_lr=1.0, **settings)
    assert are_bit_equal(parameters(small), parameters(large))
    # with a head of zeros no gradient reaches the trunk at the first update, but at the second it does
    trainer = make_trainer(critic="shared", lr=1e-3, **settings)
    apart = make_trainer(critic="separate", lr=1e-3, **settings)
    for step in (1, 2):
        for each in (trainer, apart):
            each.step(random_batch(step))
    assert largest_difference(parameters(trainer), parameters(apart)) > 1e-5


def test_the_critic_gets_no_gradient_from_a_token_too_old():
    responses = [[policy(5, version=0), policy(6, version=1)], [policy(7, version=0)]]
    batch = Batch(2, (make_group(0, [1.0, 0.0], responses),))
    trainer = make_trainer(name="ppo", num_minibatches=1, max_staleness=0, version=PolicyVersion("first", 1))
    metrics = trainer.step(batch)
    # GAE sees all three tokens, the loss the one fresh one: return 1, value 0
    assert metrics["value/loss"] == pytest.approx(0.5)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_head_computed_piece_by_piece_gives_the_same_update(monkeypatch):
    from baton.policy import head

    batch = random_batch(1)
    whole, metrics = stepped(batch, temperature=0.8, entropy_coef=0.05)
    sizes, original = [], head.score
    monkeypatch.setattr(head, "score", lambda logits, *a: sizes.append(logits.numel()) or original(logits, *a))
    model = tiny_model()
    find_head(model)
    set_max_logits(model, 5 * VOCAB)
    pieces, other = stepped(batch, model, temperature=0.8, entropy_coef=0.05)
    assert max(sizes) <= 5 * VOCAB
    assert len(sizes) > 20  # forwards, and again backwards
    for a, b in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
    assert other["policy/entropy"] == pytest.approx(metrics["policy/entropy"], abs=1e-5)


def test_activations_computed_again_give_the_same_update():
    batch, calls = random_batch(1), []
    plain, metrics = stepped(batch)
    model = tiny_model()
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    find_head(model)
    calls.clear()
    again, others = stepped(batch, model, activation_checkpointing=True, max_tokens_per_microbatch=100_000)
    assert len(calls) == 2  # forwards, and once more backwards
    for a, b in zip(plain.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4)
    assert others["policy/loss"] == pytest.approx(metrics["policy/loss"], abs=1e-6)
    assert not again.model.model.layers[0].mlp.training  # dropout stays off


def test_a_separate_critic_learns_ten_times_as_fast_unless_told_otherwise():
    assert [learner.lr for learner in make_trainer(name="ppo", lr=2e-4).learners] == pytest.approx([2e-4, 2e-3])
    assert [learner.lr for learner in make_trainer(name="ppo", critic_lr=1e-5).learners] == [1e-3, 1e-5]
    assert [learner.lr for learner in make_trainer(name="ppo", critic="shared").learners] == [1e-3]
