"""A train step: what moves the weights, what must not, and what it says of itself."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_cases import (
    SMOOTH,
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

from baton.errors import EngineFault, TrainingDiverged, UserError
from baton.policy.tensors import weights_digest
from baton.trainer import forward, local_trainer, update
from baton.types import Batch, PolicyVersion

pytestmark = pytest.mark.numerics


def stepped(batch, model=None, **settings):
    trainer = make_trainer(model, **settings)
    metrics = trainer.step(batch)
    return trainer, metrics


# ---- what the update is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", ["none", "token_tis"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_the_gradient_is_that_of_the_formula_trajectory_by_trajectory(aggregation, correction):
    batch, temperature = random_batch(1), 0.8
    model, advantages = tiny_model(), grpo_advantages(batch.groups)
    # At ratio 1 the gradient of the objective is Σ_i c_i Σ_t w_t A_i ∇ log π, unclipped: nothing is cut or padded here.
    lengths = [t.num_tokens for t in batch.trajectories]
    objective = torch.zeros(())
    for trajectory in batch.trajectories:
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]])
        logprobs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        logprobs = logprobs[len(trajectory.prompt_ids) - 1 :]
        terms = logprobs * advantages[trajectory.group_id][trajectory.sample_index]
        if correction == "token_tis":
            terms = terms * (logprobs.detach() - torch.tensor(trajectory.behavior_logprobs)).exp().clamp(max=2.0)
        objective = objective + (
            terms.mean() / len(lengths) if aggregation == "sequence_mean" else terms.sum() / sum(lengths)
        )
    (-objective).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
    settings = {"aggregation": aggregation, "temperature": temperature, "max_tokens_per_microbatch": 40}
    settings["correction"] = correction
    trainer, metrics = stepped(batch, max_grad_norm=math.inf, **settings)
    assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_the_update_does_not_depend_on_how_it_is_cut_into_microbatches(aggregation, num_minibatches):
    batch = random_batch(1, num_groups=5)
    settings = {"aggregation": aggregation, "num_minibatches": num_minibatches, **SMOOTH}
    whole, one = stepped(batch, max_tokens_per_microbatch=100_000, **settings)
    cut, other = stepped(batch, max_tokens_per_microbatch=24, **settings)
    assert largest_difference(parameters(whole), parameters(tiny_trainer())) > 1e-4  # something happened
    assert largest_difference(parameters(whole), parameters(cut)) < 1e-5
    for (name, a), b in zip(whole.model.named_parameters(), cut.model.parameters(), strict=True):
        unit = 1 / SMOOTH["max_grad_norm"]  # makes a gradient of norm 1 again
        torch.testing.assert_close(unit * a.grad, unit * b.grad, atol=1e-5, rtol=1e-4, msg=name)
    for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "policy/mismatch_kl", "policy/logprob_diff_max"):
        assert one[name] == pytest.approx(other[name], abs=1e-5), name


def tiny_trainer():
    return make_trainer()


def batch_with_equal_rewards():
    """Three groups with advantages, and two groups of three with equal rewards."""
    equal = random_batch(1, seed=5, num_groups=2, first_id=3).groups
    equal = (
        make_group(g.group_id, [0.5] * 3, [m.trajectory.segments for m in g.members], prompt_ids=(4, 5)) for g in equal
    )
    return Batch(1, (*random_batch(1, num_groups=3).groups, *equal))


def has_gradients(monkeypatch, change=lambda part: part):
    """Return a list that gets `has_gradient` of each microbatch that a step computes. `change`: applied to its cut."""
    cut, found = local_trainer.cut, []

    def watched(*arguments, **named):
        part = cut(*arguments, **named)
        found.extend(micro.has_gradient for micro in part.microbatches)
        return change(part)

    monkeypatch.setattr(local_trainer, "cut", watched)
    return found


def test_rows_without_an_advantage_change_neither_update_nor_metrics_by_having_no_gradient(monkeypatch):
    """Run with gradient all the same, they give the same."""
    batch = batch_with_equal_rewards()
    apart, metrics = stepped(batch, metrics_of_all_tokens=True)
    forced = has_gradients(
        monkeypatch,
        lambda part: replace(part, microbatches=tuple(replace(m, has_gradient=True) for m in part.microbatches)),
    )
    together, others = stepped(batch, metrics_of_all_tokens=True)
    assert set(forced) == {True, False}
    assert are_bit_equal(parameters(apart), parameters(together))
    assert metrics == others


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
@pytest.mark.parametrize("several", [{}, {"num_minibatches": 2, "num_epochs": 2}])
def test_rows_without_an_advantage_are_skipped_and_the_update_keeps_its_bits(several, aggregation, monkeypatch):
    batch = batch_with_equal_rewards()
    found = has_gradients(monkeypatch)
    skipped, metrics = stepped(batch, aggregation=aggregation, **several)
    assert set(found) == {True}
    whole, others = stepped(batch, aggregation=aggregation, metrics_of_all_tokens=True, **several)
    assert set(found) == {True, False}
    assert are_bit_equal(parameters(skipped), parameters(whole))
    assert metrics["policy/entropy"] != others["policy/entropy"], "of fewer tokens"
    for name in ("policy/loss", "policy/grad_norm", "tokens/trained", "staleness/mean", "reward/mean"):
        assert metrics[name] == pytest.approx(others[name], abs=1e-7), name


@pytest.mark.parametrize(
    "needs",
    [
        {"entropy_coef": 0.1},
        {"correction": "second_moment"},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_in": "reward"},
        {"advantage": "gae", "critic": "shared", "normalize_advantages": True},
    ],
)
def test_rows_without_an_advantage_are_computed_if_the_update_depends_on_them(needs, monkeypatch):
    batch = batch_with_equal_rewards()
    found, sizes = has_gradients(monkeypatch), []
    for wants in (False, True):
        reference = tiny_model(seed=3) if "kl_coef" in needs else None
        stepped(batch, reference=reference, metrics_of_all_tokens=wants, **needs)
        sizes.append(len(found))
    assert sizes[1] == 2 * sizes[0] > 0


def test_a_step_without_any_advantage_has_no_token_metrics(monkeypatch):
    equal = tuple(make_group(9 + i, [0.5] * 3, [[policy(5, version=0)]] * 3) for i in range(2))
    computed = has_gradients(monkeypatch)
    _, metrics = stepped(Batch(1, equal))
    assert computed == []
    assert (metrics["policy/loss"], metrics["policy/grad_norm"], metrics["tokens/trained"]) == (0.0, 0.0, 6.0)
    assert not {"policy/entropy", "policy/approx_kl", "policy/mismatch_kl", "policy/ess"} & set(metrics)
    _, metrics = stepped(Batch(1, equal), metrics_of_all_tokens=True)
    assert metrics["policy/entropy"] > 0


def test_an_update_without_any_advantage_still_lets_the_moments_decay():
    """After a step that moved the weights, one of equal rewards moves them on by what the moments hold."""
    equal = tuple(make_group(9 + i, [0.5] * 3, [[policy(5, version=1)]] * 3) for i in range(2))
    trainer, _ = stepped(random_batch(1))
    before = parameters(trainer)
    metrics = trainer.step(Batch(2, equal))
    assert metrics["policy/grad_norm"] == 0.0
    # AdamW at step 2 with gradients g, 0: m = 0.09 g / 0.19, v = 0.000999 g² / 0.001999: a move of 0.67 lr.
    assert largest_difference(parameters(trainer), before) == pytest.approx(0.67e-3, rel=0.01)


def test_few_shapes_in_bfloat16_change_the_update_by_no_more_than_its_rounding(monkeypatch):
    batch = random_batch(1, num_groups=5)
    few, _ = stepped(batch, dtype="bfloat16")
    monkeypatch.setattr(local_trainer, "FEW_SHAPES", (1, 1))
    plain, _ = stepped(batch, dtype="bfloat16")
    for (name, a), b in zip(few.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() < 0.02 * b.grad.norm(), name


def test_a_group_of_equal_rewards_moves_nothing():
    batch = Batch(1, tuple(make_group(i, [0.7] * 3, [[policy(5, 6)], [policy(7)], [policy(8, 9, 10)]]) for i in (0, 1)))
    trainer, metrics = stepped(batch)
    assert are_bit_equal(parameters(trainer), parameters(tiny_trainer()))
    assert (metrics["policy/grad_norm"], metrics["reward/zero_std_frac"]) == (0.0, 1.0)


def test_what_the_environment_wrote_is_context_and_never_a_target():
    def batch(*last):
        responses = [[policy(5, 6), environment(*last)], [policy(7), environment(30, 31), policy(8)]]
        return Batch(1, (make_group(0, [1.0, 0.0], responses),))

    # Nothing follows the first trajectory's environment tokens, so as context they are of no consequence either.
    a, metrics = stepped(batch(40, 41))
    b, _ = stepped(batch(50, 51))
    assert are_bit_equal(parameters(a), parameters(b))
    assert metrics["tokens/trained"] == 4
    # The second trajectory's stand before a policy token: there they matter.
    moved = Batch(1, (make_group(0, [1.0, 0.0], [[policy(5, 6)], [policy(7), environment(33, 31), policy(8)]]),))
    still = Batch(1, (make_group(0, [1.0, 0.0], [[policy(5, 6)], [policy(7), environment(30, 31), policy(8)]]),))
    assert not are_bit_equal(parameters(stepped(moved)[0]), parameters(stepped(still)[0]))


def test_a_rewarded_token_becomes_likely():
    trainer = make_trainer(tiny_model(initializer_range=0.02), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def probs():
        with torch.no_grad():
            return trainer.model(torch.tensor([[2, 3]])).logits[0, -1].softmax(-1)

    before = probs()[7].item()
    for step in range(1, 11):
        tokens = [torch.multinomial(probs(), 1, generator=generator).item() for _ in range(63)] + [7]
        responses = [[policy(token, version=step - 1, logprob=probs()[token].log().item())] for token in tokens]
        trainer.step(Batch(step, (make_group(step, [float(token == 7) for token in tokens], responses),)))
    assert before < 0.03
    assert probs()[7].item() > 0.5


# ---- several updates in one step -------------------------------------------------------------------------------------


def watched(monkeypatch):
    """Record what the objective sees."""
    seen, original = [], update.OBJECTIVES["clipped"]

    def spy(inputs, anchor, shape):
        result = original(inputs, anchor, shape)
        seen.append((inputs, result, shape))
        return result

    monkeypatch.setitem(update.OBJECTIVES, "clipped", spy)
    return seen


def test_proximal_logprobs_are_fixed_over_minibatches_and_epochs(monkeypatch):
    seen = watched(monkeypatch)
    batch = random_batch(1)
    stepped(batch, num_minibatches=2, num_epochs=2, lr=1e-2)
    assert len(seen) == 4
    (first, second, again, last) = seen
    assert torch.equal(first[1].ratio, torch.ones_like(first[1].ratio))  # nothing has moved yet
    assert not torch.equal(second[1].ratio, torch.ones_like(second[1].ratio))  # the first update has
    for early, late in ((first, again), (second, last)):
        assert torch.equal(early[0].proximal_logprobs, late[0].proximal_logprobs)
        assert not torch.equal(early[0].logprobs, late[0].logprobs)
    assert [shape.divisor for _, _, shape in seen] == [6.0] * 4  # two groups of three in each minibatch


def test_the_clip_bites_once_the_policy_has_moved(monkeypatch):
    _, metrics = stepped(random_batch(1), num_epochs=4, lr=3e-2)
    assert metrics["policy/clip_frac"] > 0.05
    assert metrics["policy/approx_kl"] > 0.01
    _, metrics = stepped(random_batch(1), lr=3e-2)
    assert (metrics["policy/clip_frac"], metrics["policy/approx_kl"]) == (0.0, 0.0)


def test_a_single_update_needs_no_forward_beyond_its_own(monkeypatch):
    calls, original = [], forward.padded_scores
    monkeypatch.setattr(forward, "padded_scores", lambda *a, **k: calls.append(1) or original(*a, **k))
    stepped(random_batch(1), max_tokens_per_microbatch=100_000)
    assert len(calls) == 1
    stepped(random_batch(1), max_tokens_per_microbatch=100_000, num_epochs=2)
    assert len(calls) == 1 + 3


# ---- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        # log r = proximal − behavior = 1: k3 = e − 1 − 1 = 0.718
        ({"max_mismatch_kl": (0.01, 0.7)}, "mismatch kl of engine and trainer is 0.718 nats per token, above the "),
        ({"max_logprob_diff": (0.5, 0.9)}, "logprob diff of engine and trainer is 1 nats, above the limit trainer."),
    ],
)
def test_an_excessive_mismatch_ends_the_step_before_an_update(limits, sentence):
    with torch.no_grad():
        exact = tiny_model()(torch.tensor([[2, 3, 5]])).logits[0, 1].log_softmax(-1)[5].item()
    responses = [[policy(5, version=1, logprob=exact - 1.0)], [policy(5, version=0, logprob=-40.0)]]
    batch = Batch(2, (make_group(0, [1.0, 0.0], responses),))
    trainer, allowed = (make_trainer(version=PolicyVersion("first", 1), **each) for each in (limits, {}))
    with pytest.raises(TrainingDiverged, match=sentence):
        trainer.step(batch)
    assert are_bit_equal(parameters(trainer), parameters(make_trainer()))
    allowed.step(batch)
    assert not are_bit_equal(parameters(allowed), parameters(make_trainer()))


def test_engine_and_trainer_are_compared_on_tokens_of_the_current_version_only():
    model = tiny_model()
    with torch.no_grad():
        own = model(torch.tensor([[2, 3, 5]])).logits[0].log_softmax(-1)
    exact = own[1, 5].item()
    first = [policy(5, version=1, logprob=exact - 0.1)]
    stale = [policy(5, version=0, logprob=-40.0)]
    trainer = make_trainer(model, version=PolicyVersion("first", 1))
    metrics = trainer.step(Batch(2, (make_group(0, [1.0, 0.0], [first, stale]),)))
    assert metrics["policy/logprob_diff_mean"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["policy/logprob_diff_max"] == pytest.approx(0.1, abs=1e-5)
    # log r = proximal − behavior = 0.1: k3 = e^0.1 − 1 − 0.1 = 0.0051709
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.0051709, abs=1e-5)
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (0.5, 1.0)
    # both tokens follow the same two: the entropy of that one distribution
    assert metrics["policy/entropy"] == pytest.approx(-(own[1].exp() * own[1]).sum().item(), abs=1e-4)


def test_without_tokens_of_the_current_version_the_comparison_is_absent():
    trainer = make_trainer(version=PolicyVersion("first", 1))
    metrics = trainer.step(Batch(2, (make_group(0, [1.0, 0.0]),)))
    assert not any(name.startswith(("policy/mismatch", "policy/logprob_diff")) for name in metrics)
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_step_reports_the_learning_rate_it_used():
    trainer = make_trainer(lr=1e-3, warmup_steps=4)
    assert [trainer.step(random_batch(step))["policy/lr"] for step in (1, 2)] == pytest.approx([2.5e-4, 5e-4])


# ---- divergence ------------------------------------------------------------------------------------------------------


def poisoned(step, group_id):
    """A batch whose last group has an infinite reward, so that its advantages are not numbers."""
    good = random_batch(step, num_groups=3)
    bad = make_group(group_id, [math.inf, 0.0], [[policy(5, 6)], [policy(7)]])
    return Batch(step, (*good.groups, bad))


def test_a_diverged_step_leaves_weights_optimizer_and_version_alone():
    trainer, untouched = make_trainer(lr=1e-2), make_trainer(lr=1e-2)
    for t in (trainer, untouched):
        t.step(random_batch(1))
    before = parameters(trainer)
    with pytest.raises(TrainingDiverged, match=r"train step 2: the loss is nan .*\b77\b.*are still those of version 1"):
        trainer.step(poisoned(2, 77))
    assert are_bit_equal(parameters(trainer), before)
    assert trainer.version.number == 1
    # The optimiser, too: the next good step gives the same bits as if nothing had happened.
    for t in (trainer, untouched):
        t.step(random_batch(2))
    assert are_bit_equal(parameters(trainer), parameters(untouched))


def test_after_a_divergence_between_updates_only_a_checkpoint_can_follow(tmp_path):
    """No step copies weights or moments to keep the way back open."""
    trainer, untouched = (make_trainer(lr=1e-2, num_minibatches=4) for _ in range(2))
    for t in (trainer, untouched):
        t.step(random_batch(1))
    trainer.save(tmp_path / "a")
    copied, sizes = [], {p.numel() for p in trainer.model.parameters() if p.ndim > 1}

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.name() in ("aten::clone", "aten::_to_copy") and args[0].numel() in sizes:
                copied.append(func.name())
            return func(*args, **(kwargs or {}))

    with Copies(), pytest.raises(TrainingDiverged, match=r"train step 2: .*; 3 of 4 updates are applied: no version"):
        trainer.step(poisoned(2, 77))
    assert copied == []
    for refused in (lambda: trainer.step(random_batch(2)), trainer.publish, lambda: trainer.save(tmp_path / "b")):
        with pytest.raises(AssertionError, match="restore a checkpoint first"):
            refused()
    trainer.restore(tmp_path / "a")
    for t in (trainer, untouched):
        t.step(random_batch(2))
    assert are_bit_equal(parameters(trainer), parameters(untouched))


def test_the_effective_sample_size_is_that_of_the_start_of_the_step_also_with_several_updates():
    """`bypass` has no proximal logprobs, so only the first update knows the weights of the start."""
    batch = random_batch(1)
    one, four = (make_trainer(correction="bypass", num_epochs=num, lr=0.05).step(batch) for num in (1, 4))
    assert one["policy/ess"] < 0.99
    assert four["policy/ess"] == pytest.approx(one["policy/ess"], rel=1e-5)


@pytest.mark.parametrize("correction", ["bypass", "none", "token_tis"])
def test_one_update_needs_one_forward_pass_and_no_correction_adds_a_proximal_one(correction, monkeypatch):
    """`bypass` takes the behavior policy as anchor, also with several updates."""
    calls, original = [], forward.padded_scores
    monkeypatch.setattr(forward, "padded_scores", lambda *a, **k: calls.append(1) or original(*a, **k))
    stepped(random_batch(1), max_tokens_per_microbatch=100_000, correction=correction)
    assert len(calls) == 1
    calls.clear()
    stepped(random_batch(1), max_tokens_per_microbatch=100_000, correction=correction, num_epochs=3)
    assert len(calls) == 3 + (correction != "bypass")


def test_an_infinite_gradient_is_noticed_before_the_weights_change():
    trainer = make_trainer()
    before = parameters(trainer)
    trainer.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(
        TrainingDiverged, match=r"train step 1: the gradient's norm is (nan|inf) over groups 0, 1, 2, 3;"
    ):
        trainer.step(random_batch(1))
    assert are_bit_equal(parameters(trainer), before)


def test_a_trajectory_whose_logprobs_are_no_numbers_is_named():
    """Token 50 has a broken embedding; only 1/1 holds it."""
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = math.nan
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))  # else every logit is broken
    good = make_group(0, [1.0, 0.0], [[policy(5, 6)], [policy(7, 8)]])
    bad = make_group(1, [1.0, 0.0], [[policy(9, 10)], [policy(50, 11)]])
    with pytest.raises(
        TrainingDiverged, match=r"log-probabilities of trajectory 1/1 are not finite; the weights are still"
    ):
        make_trainer(model).step(Batch(1, (good, bad)))


def test_a_logprob_that_the_engine_reported_wrong_changes_nothing():
    trainer = make_trainer()
    bad = make_group(3, [1.0, 0.0], [[policy(5)], [policy(6, logprob=math.nan)]])
    with pytest.raises(EngineFault, match="trajectory 3/1"):
        trainer.step(Batch(1, (bad,)))
    assert are_bit_equal(parameters(trainer), parameters(make_trainer()))
    with pytest.raises(UserError, match="group 4 has 0 members"):
        trainer.step(Batch(1, (make_group(4, []),)))


def test_the_microbatch_at_fault_is_named_and_no_other():
    # The shortest rows come last, and under this budget the poisoned pair is alone.
    long = make_group(3, [1.0, 0.0], [[policy(*range(5, 15))], [policy(*range(15, 25))]])
    bad = make_group(77, [math.inf, 0.0], [[policy(5)], [policy(7)]])
    trainer = make_trainer(max_tokens_per_microbatch=24)
    with pytest.raises(TrainingDiverged, match="over groups 77;"):
        trainer.step(Batch(1, (long, bad)))


# ---- versions and publishing -----------------------------------------------------------------------------------------


def test_each_step_makes_the_next_version_of_the_same_lineage():
    trainer, _ = stepped(random_batch(1))
    assert trainer.version == PolicyVersion("first", 1)
    with pytest.raises(AssertionError, match="got the batch of train step 1 at version 1"):
        trainer.step(random_batch(1))


def test_published_weights_are_a_copy_under_the_names_of_the_file(tmp_path):
    trainer, _ = stepped(random_batch(1))
    published = trainer.publish()
    trainer.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert published.tensors.keys() == names  # tied weights once
    assert "lm_head.weight" not in names
    assert published.version == trainer.version == PolicyVersion("first", 1, weights_digest(published.tensors))
    copies = {name: tensor.clone() for name, tensor in published.tensors.items()}
    trainer.step(random_batch(2))
    assert are_bit_equal(dict(published.tensors), copies)
    assert trainer.publish().version.digest != published.version.digest
    # what engines do with it
    other = tiny_model(seed=5)
    assert not other.load_state_dict(dict(published.tensors), strict=False).unexpected_keys
    ids = torch.tensor([[2, 3, 4]])
    assert torch.equal(other.lm_head.weight, copies["model.embed_tokens.weight"])
    assert other(ids).logits.shape == (1, 3, VOCAB)


def test_the_digest_sees_names_shapes_types_and_every_byte():
    base = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    same = {"b": torch.ones(2), "a": torch.arange(6.0).view(2, 3)}
    others = [
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"].view(3, 2), "b": base["b"]},
        {"a": base["a"], "b": base["b"].to(torch.int32)},
        {"a": base["a"].index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(5.0000005)), "b": base["b"]},
        {"a": base["a"], "b": base["b"].bfloat16()},
    ]
    assert weights_digest(base) == weights_digest(same)
    assert len({weights_digest(tensors) for tensors in [base, *others]}) == 6


def test_greedy_rollouts_cannot_be_trained_on():
    with pytest.raises(UserError, match="got temperature 0"):
        make_trainer(temperature=0.0)


def test_bfloat16_training_keeps_float32_master_weights_and_follows_float32():
    batch = random_batch(1)
    exact, _ = stepped(batch, max_grad_norm=math.inf)
    half, metrics = stepped(batch, dtype="bfloat16", max_grad_norm=math.inf)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    a = torch.cat([p.grad.flatten() for p in exact.model.parameters()])
    b = torch.cat([p.grad.flatten() for p in half.model.parameters()])
    assert torch.cosine_similarity(a, b, dim=0) > 0.99
    assert metrics["policy/clip_frac"] == 0.0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "shape", [{}, {"packing": "always", "activation_checkpointing": True}], ids=["padded", "packed and recomputed"]
)
def test_a_compiled_step_is_the_step(shape):
    batch = random_batch(1)
    plain, metrics = stepped(batch, **SMOOTH, **shape)
    counters.clear()
    compiled, other = stepped(batch, compile=True, **SMOOTH, **shape)
    assert counters["stats"]["calls_captured"] > 100, "the blocks' operations are in compiled graphs"
    assert largest_difference(parameters(plain), parameters(tiny_trainer())) > 1e-4
    assert largest_difference(parameters(plain), parameters(compiled)) < 1e-5
    assert other["policy/loss"] == pytest.approx(metrics["policy/loss"], abs=1e-6)
    assert parameters(compiled).keys() == parameters(plain).keys()  # nothing is renamed in what is published


def test_compiling_without_a_compiler_is_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"trainer\.compile needs a C\+\+ compiler"):
        make_trainer(compile=True)
