"""The trainer scores the policy over the tokens that top-k and top-p kept in the engine, as the engine sampled it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rank_pool import RankPool
from test_head import SHAPE
from test_ranks import setup_of
from trainer_cases import SMOOTH, VOCAB, make_trainer, random_batch, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from baton.errors import EngineFault
from baton.policy.head import RequestedScores, find_head, set_max_logits
from baton.policy.logprobs import padded_scores
from baton.policy.sampling_masks import decoded
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.eval_rollout import EvalGroup, EvalRollout
from baton.rollout.settings import RolloutSettings
from baton.rollout.transport import LocalTransport
from baton.rollout.worker_client import WorkerClient
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.factory import make_trainer as trainer_of
from baton.trainer.microbatches import cut
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.samples import training_samples
from baton.types import Batch, Group, PolicyVersion, Prompt, RewardResult, ScoredTrajectory, plain

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")
WAYS = [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.6, "top_k": 9, "temperature": 1.4}]


def generated(model: Any, num_groups: int = 3, **sampling: Any) -> Batch:
    """Groups of two trajectories of an embedded engine, with unequal rewards."""
    settings = EngineSettings(slots=16, max_context_tokens=48, report_every_tokens=3)
    engine = EmbeddedEngine(model, tiny_tokenizer(), settings, PolicyVersion("first", 0), (1,))
    sweep = EvalRollout(WorkerClient(LocalTransport(engine), max_context_tokens=48))
    requests = [EvalGroup(group_id, (2, 3, 4 + group_id), 2) for group_id in range(num_groups)]
    params = RolloutSettings(max_new_tokens=10, **sampling).sampling()
    groups: dict[int, list[ScoredTrajectory]] = {}
    for trajectory in sweep.rollout(requests, params, noise_seed=0, version=0):
        reward = float(trajectory.sample_index)
        scored = ScoredTrajectory(trajectory, RewardResult(reward, {"correct": reward}, reward == 1.0))
        groups.setdefault(trajectory.group_id, []).append(scored)
    members = {i: tuple(sorted(m, key=lambda one: one.trajectory.sample_index)) for i, m in sorted(groups.items())}
    return Batch(1, tuple(Group(i, Prompt(f"{i}", "case", ()), m) for i, m in members.items()))


def without_masks(batch: Batch) -> Batch:
    def stripped(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: () if key == "kept" else stripped(value) for key, value in tree.items()}
        return [stripped(one) for one in tree] if isinstance(tree, list | tuple) else tree

    return msgspec.convert(stripped(msgspec.to_builtins(batch, enc_hook=plain)), Batch)


def masked_logprobs(model: Any, ids: list[int], first: int, masks: list[bytes], temperature: float) -> torch.Tensor:
    """The plain reference: logits of the whole row in float64, −∞ at what was not kept, log_softmax."""
    logits = model(torch.tensor([ids])).logits[0, first - 1 : -1].double() / temperature
    is_kept = torch.zeros_like(logits, dtype=torch.bool)
    for row, mask in enumerate(masks):
        is_kept[row, np.frombuffer(mask, "<u2").astype(np.int64)] = True
    return logits.masked_fill(~is_kept, -math.inf).log_softmax(-1)


@pytest.mark.parametrize("way", WAYS)
def test_the_engines_logprob_is_over_the_reported_tokens_which_are_the_likeliest(
    way: dict[str, Any],
) -> None:
    model = tiny_model()
    batch = generated(tiny_model(), **way)
    sizes = set()
    for trajectory in batch.trajectories:
        ids, temperature = [*trajectory.prompt_ids, *trajectory.token_ids], way.get("temperature", 1.0)
        with torch.no_grad():
            whole = model(torch.tensor([ids])).logits[0, len(trajectory.prompt_ids) - 1 : -1].double() / temperature
            table = masked_logprobs(model, ids, len(trajectory.prompt_ids), trajectory.kept, temperature)
        own = table.gather(-1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(trajectory.behavior_logprobs).double(), own, atol=1e-4, rtol=0)
        for probabilities, mask in zip(whole.softmax(-1), trajectory.kept, strict=True):
            kept = np.frombuffer(mask, "<u2").tolist()
            sizes.add(len(kept))
            assert kept == sorted(set(kept))
            top = probabilities.sort(descending=True).values[: way.get("top_k", 512)]
            share = probabilities[kept].sum() / top.sum()
            least = probabilities[kept].min()
            assert least >= probabilities.sort(descending=True).values[len(kept) - 1] * (1 - 1e-4), "the likeliest ones"
            if "top_p" in way:
                assert share >= way["top_p"] - 1e-5
                assert len(kept) == 1 or share - least / top.sum() <= way["top_p"] + 1e-5, "and no more than needed"
            else:
                assert len(kept) == 5
    assert max(sizes) > 1


@pytest.mark.parametrize("packing", ["never", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_before_an_update_the_ratio_is_one_and_without_the_masks_it_is_not(packing: str, way: dict[str, Any]) -> None:
    batch, temperature = generated(tiny_model(), **way), way.get("temperature", 1.0)
    settings = {"packing": packing, "max_tokens_per_microbatch": 40}
    metrics = make_trainer(temperature=temperature, **settings).step(batch)
    assert metrics["policy/logprob_diff_max"] < 1e-4
    assert metrics["policy/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    naive = make_trainer(temperature=temperature, **settings).step(without_masks(batch))
    assert naive["policy/logprob_diff_mean"] > 0.05


FAMILIES = {"llama": {}, "gemma2": {"final_logit_softcapping": 5.0}, "cohere": {"logit_scale": 0.25}}
"""A plain head, one with a cap, one with a scale."""


@pytest.mark.parametrize("wanted", [RequestedScores(), RequestedScores(0.7, True, True)])
@pytest.mark.parametrize("max_logits", [2**24, 3 * VOCAB])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_and_gradients_are_those_of_plain_torch(name: str, max_logits: int, wanted: RequestedScores) -> None:
    """Against −∞ at all other logits of the model's own forward, log_softmax and autograd, with one piece of logits and
    with several."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **FAMILIES[name], "initializer_range": 0.3})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert find_head(model) is not None
    set_max_logits(model, max_logits)
    ids_BS = torch.randint(2, VOCAB, (2, 9))
    is_kept = torch.rand(2, 6, VOCAB) < 0.2
    is_kept.scatter_(-1, ids_BS[:, 3:, None], True)
    masks = [np.flatnonzero(row).astype("<u2").tobytes() for row in is_kept.view(-1, VOCAB).numpy()]
    found = padded_scores(model, ids_BS, first=3, wanted=wanted, kept=decoded(masks, VOCAB).view(2, 6, -1))
    logits = model(ids_BS[:, :-1]).logits[:, 2:].double() / wanted.temperature
    table = logits.masked_fill(~is_kept, -math.inf).log_softmax(-1)
    logprobs = table.gather(-1, ids_BS[:, 3:, None])[..., 0]
    entropy = -(table.exp() * table.masked_fill(~is_kept, 0.0)).sum(-1)
    places = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
    expected, objective = (logprobs * places).sum(), (found.logprobs * places.float()).sum()
    torch.testing.assert_close(found.logprobs.double(), logprobs, atol=1e-4, rtol=1e-4)
    if found.entropy is not None:
        torch.testing.assert_close(found.entropy.double(), entropy, atol=1e-4, rtol=1e-4)
        expected = expected + (entropy * places**2).sum()
        objective = objective + (found.entropy * places.float() ** 2).sum()
    parameters = list(model.parameters())
    for gradient, same in zip(
        torch.autograd.grad(objective, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(gradient, same, atol=1e-3 * same.abs().max().item() + 1e-7, rtol=1e-3)


def test_a_model_whose_head_is_not_known_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_BS = torch.randint(2, VOCAB, (1, 7), generator=torch.Generator().manual_seed(1))
    kept = decoded([np.array(sorted({4, 9, 33, int(i)}), "<u2").tobytes() for i in ids_BS[0, 2:]], VOCAB)[None]
    wanted = RequestedScores(0.8, with_entropy=True)
    with torch.no_grad():
        known = padded_scores(tiny_model(), ids_BS, first=2, wanted=wanted, kept=kept)
        monkeypatch.setattr("baton.policy.logprobs.find_head", lambda _: None)
        unknown = padded_scores(tiny_model(), ids_BS, first=2, wanted=wanted, kept=kept)
    torch.testing.assert_close(unknown.logprobs, known.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unknown.entropy, known.entropy, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [{"packing": "always"}, {"share_prompts": True}, {"max_tokens_per_microbatch": 14}])
def test_every_shape_of_a_pass_has_the_gradient_of_padded_rows(shape: dict[str, Any]) -> None:
    """With entropy bonus, a reference and two epochs, so every pass of a step uses the masks."""
    batch, found = generated(tiny_model(), top_p=0.8), []
    for own in ({"packing": "never", "max_tokens_per_microbatch": 10_000}, shape):
        keys = {"entropy_coef": 0.1, "kl_coef": 0.1, "num_epochs": 2, **SMOOTH, **own}
        trainer = make_trainer(reference=tiny_model(seed=2).requires_grad_(False), **keys)
        found.append((trainer.step(batch), {n: p.detach().clone() for n, p in trainer.model.named_parameters()}))
    for name in ("policy/entropy", "kl/ref", "policy/logprob_diff_mean", "policy/loss"):
        assert found[1][0][name] == pytest.approx(found[0][0][name], rel=1e-3, abs=1e-6)
    for name, expected in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], expected, atol=1e-4, rtol=1e-3, msg=name)


def test_entropy_and_kl_are_of_the_kept_tokens() -> None:
    """Worked by hand from the plain reference: the means over all trained tokens of one update."""
    batch, model, reference = generated(tiny_model(), top_k=5), tiny_model(), tiny_model(seed=2)
    entropies, nats = [], []
    for trajectory in batch.trajectories:
        ids, first = [*trajectory.prompt_ids, *trajectory.token_ids], len(trajectory.prompt_ids)
        with torch.no_grad():
            own, other = (masked_logprobs(m, ids, first, trajectory.kept, 1.0) for m in (model, reference))
        entropies += (-(own.exp() * own.clamp(min=-1e9)).sum(-1)).tolist()
        apart = (own - other).gather(-1, torch.tensor(trajectory.token_ids)[:, None])[:, 0]
        nats += ((-apart).exp() - 1 + apart).clamp(max=10).tolist()
    trainer = make_trainer(reference=reference.requires_grad_(False), kl_coef=0.1, num_minibatches=1)
    metrics = trainer.step(batch)
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-3)
    assert metrics["kl/ref"] == pytest.approx(sum(nats) / len(nats), rel=1e-3)


def test_a_token_without_its_mask_and_an_unknown_id_are_refused() -> None:
    batch = generated(tiny_model(), top_k=5)
    (first, *others), plain = batch.groups, without_masks(batch)
    with pytest.raises(EngineFault, match=r"reported sampling masks for \d+ of \d+ tokens"):
        make_trainer(num_minibatches=1).step(Batch(1, (plain.groups[0], *others)))
    with pytest.raises(EngineFault, match="a sampling mask has the id 64; allowed are 0 to 63"):
        decoded([np.array([3, 64], "<u2").tobytes()], VOCAB)
    wide = decoded([np.array([3, 99_999], "<u4").tobytes(), b""], 100_000)
    assert wide.tolist() == [[3, 99_999], [-1, -1]]
    assert first.members


def test_after_a_missing_mask_between_updates_only_a_checkpoint_can_follow() -> None:
    """With `bypass` no forward pass precedes the first update, so the second minibatch is read after it."""
    batch = generated(tiny_model(), num_groups=4, top_k=5)
    trainer = make_trainer(num_minibatches=2, correction="bypass")
    with pytest.raises(EngineFault, match="reported sampling masks"):
        trainer.step(Batch(1, (*batch.groups[:3], without_masks(batch).groups[3])))
    with pytest.raises(AssertionError, match="restore a checkpoint first"):
        trainer.publish()


def test_microbatches_lay_each_mask_at_its_token() -> None:
    batch = generated(tiny_model(), top_p=0.8)
    rows = training_samples(batch.groups, AlgorithmSettings())
    for is_packed in (False, True):
        (micro,) = cut(rows, max_tokens_per_microbatch=10_000, device=CPU, is_packed=is_packed).microbatches
        laid = micro.inputs.sampling_masks(VOCAB)
        assert laid is not None
        own = laid if is_packed else laid[micro.inputs.policy_mask]
        expected = [np.frombuffer(mask, "<u2").tolist() for row in micro.rows for mask in row.kept]
        assert [[i for i in ids if i >= 0] for ids in own.tolist()] == expected
        if not is_packed:
            assert (laid[~micro.inputs.policy_mask] == -1).all()


def test_a_batch_without_masks_lays_none() -> None:
    rows = training_samples(random_batch(1).groups, AlgorithmSettings())
    (micro,) = cut(rows, max_tokens_per_microbatch=10_000, device=CPU).microbatches
    assert micro.inputs.sampling_masks(VOCAB) is None


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"stages": 2}, {"tensor_parallel": 2}])
def test_ranks_and_stages_compute_the_update_of_one_process(
    shape: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    tiny_model(num_key_value_heads=2).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    batch = generated(tiny_model(num_key_value_heads=2), top_p=0.8)
    one, two = (setup_of(str(tmp_path), ranks=size, **(shape if size > 1 else {})) for size in (1, 2))
    alone, ranked = trainer_of(one, tiny_tokenizer()), RankedTrainer(pool.lend(2), two, 300.0)
    metrics = [alone.step(batch), ranked.step(batch)]
    assert metrics[1]["policy/logprob_diff_max"] < 1e-4
    assert metrics[1]["policy/entropy"] == pytest.approx(metrics[0]["policy/entropy"], rel=1e-4)
    published = ranked.publish().tensors
    for name, expected in alone.publish().tensors.items():
        torch.testing.assert_close(published[name], expected, atol=1e-5, rtol=1e-4, msg=name)
