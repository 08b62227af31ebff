"""Pipeline stages make the update that one process makes. See rank_pool.py for how they run."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from test_ranks import (
    CASES,
    TIMEOUT_S,
    alone,
    assert_close,
    distance,
    gradients,
    ranked,
    setup_of,
    tensors,
    two_version_batch,
)
from trainer_cases import make_group, policy, random_batch, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from baton.errors import RankLost, TrainingDiverged, UserError
from baton.policy.head import find_head
from baton.policy.logprobs import hidden_states, padded_scores
from baton.policy.settings import LoraSettings
from baton.policy.stages import StageModel
from baton.recipe.support import support_table
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import FromRank, ToRank, TrainStep
from baton.trainer.parallel.ranked_trainer import RankedTrainer
from baton.trainer.parallel.schedule import stage_layers
from baton.trainer.settings import TrainerSettings
from baton.trainer.trainer import Trainer
from baton.types import Batch, PolicyVersion
from tests.all_cases import ALL, chosen
from tests.model_families import tiny_config

pytestmark = [pytest.mark.numerics, pytest.mark.timing]


@pytest.fixture(scope="session")
def deep_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of five layers, whose embedding is tied to the head or not, and one of experts."""
    found = {}
    shape = {"num_hidden_layers": 5, "num_key_value_heads": 2}
    experts = tiny_config("qwen3_moe")
    # the first stage of three has only dense layers, as in DeepSeek-V3
    experts.update({**shape, "vocab_size": 64, "initializer_range": 0.3, "mlp_only_layers": [0, 1]})
    torch.manual_seed(0)
    for name, model in (
        ("tied", tiny_model(**shape)),
        ("untied", tiny_model(**shape, tie_word_embeddings=False)),
        ("experts", AutoModelForCausalLM.from_config(experts)),
    ):
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        tiny_tokenizer().hf.save_pretrained(path)
        found[name] = str(path)
    return found


def staged(pool: RankPool, path: str, size: int, **settings: Any) -> RankedTrainer:
    return ranked(pool, size, setup_of(path, ranks=size, **settings))


SHAPES: dict[str, tuple[int, dict[str, Any]]] = {
    "two stages": (2, {"stages": 2}),
    "uneven stages": (3, {"stages": (1, 3, 1)}),
    "four stages": (4, {"stages": 4}),
    "two stages of two": (4, {"stages": 2}),
    "two stages of two that reduce each": (4, {"stages": 2, "shard_gradients": True}),
    "two stages of two copies": (4, {"stages": 2, "shard_size": 1}),
    "recomputed": (3, {"stages": 3, "activation_checkpointing": True}),
    "packed": (3, {"stages": 3, "packing": "always"}),
    "fewer microbatches than stages": (3, {"stages": 3, "max_tokens_per_microbatch": 150}),
    "one microbatch": (3, {"stages": 3, "max_tokens_per_microbatch": 10000}),
    "a microbatch for each row": (3, {"stages": 3, "max_tokens_per_microbatch": 1}),
}


OF_EACH_KIND = ("uneven stages", "two stages of two that reduce each", "two stages of two copies", "packed")
"""Shapes in which the kind of the model matters. The others divide the same work into other microbatches or stages."""
SLOW = pytest.mark.slow
FAMILIES = [
    pytest.param(name, marks=() if name in ("llama", "gemma3_text", "gpt2") else SLOW)
    for entry in support_table().support
    if entry.test
    for name in entry.when.get("architecture", ())
]
EXACT = {"name": "grpo", "correction": "none", "max_grad_norm": math.inf, "betas": (0.0, 0.999)}
"""No bound cuts a token, and no gradient is clipped: rounding cannot become a different update."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "lora"])
def test_the_gradients_of_stages_are_those_of_one_process(
    kind: str, pool: RankPool, deep_path: dict[str, str], tmp_path: Path
) -> None:
    path = deep_path.get(kind, deep_path["tied"])
    own = {**EXACT, "lora": LoraSettings(rank=2) if kind == "lora" else None}
    exact = gradients(alone(setup_of(path, **own)), tmp_path / "exact")
    for name in SHAPES if ALL or kind == "tied" else OF_EACH_KIND:
        size, shape = SHAPES[name]
        found = gradients(staged(pool, path, size, **own, **shape), tmp_path / name)
        assert distance(found, exact) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "lora"])
def test_stages_in_bfloat16_round_as_one_rank_does(
    kind: str, pool: RankPool, deep_path: dict[str, str], tmp_path: Path
) -> None:
    path = deep_path.get(kind, deep_path["tied"])
    own = {**EXACT, "lora": LoraSettings(rank=2) if kind == "lora" else None, "dtype": "bfloat16"}
    one = gradients(staged(pool, path, 1, **own), tmp_path / "one")
    many = gradients(staged(pool, path, 3, **own, stages=3), tmp_path / "many")
    assert distance(many, one) < 1e-3


@pytest.mark.parametrize(
    "name",
    [
        "grpo",
        "gspo",
        "kl in reward",
        *(pytest.param(name, marks=SLOW) for name in ("dapo", "kl in loss", "second moment", "lora", "experts")),
    ],
)
def test_stages_make_the_update_of_one_process(name: str, pool: RankPool, deep_path: dict[str, str]) -> None:
    """The gradient is clipped, so the weights show that its norm is that over all stages."""
    path = deep_path.get(name, deep_path["tied"])
    settings = CASES.get(name, {"name": "grpo", "num_minibatches": 2, "moe_replay": "proximal"})
    one = alone(setup_of(path, **settings))
    expected = [one.step(two_version_batch(step)) for step in (1, 2)]
    for size, stages in (3, 3), (4, 2):
        many = staged(pool, path, size, stages=stages, **settings)
        found = [many.step(two_version_batch(step)) for step in (1, 2)]
        assert many.version == PolicyVersion("first", 2)
        assert_close(tensors(many), tensors(one))
        for ours, theirs in zip(found, expected, strict=True):
            ours.pop("tokens/imbalance", None)
            assert ours.pop("perf/trainer_peak_bytes") > 0  # in one process, the loop adds it
            assert ours.pop("perf/trainer_peak_tokens") > 0
            assert ours.keys() == theirs.keys()
            for key in ours.keys() - {"tokens/padding_frac"}:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key


def test_stages_without_a_gradient_stay_in_step(pool: RankPool, deep_path: dict[str, str]) -> None:
    one = alone(setup_of(deep_path["tied"], name="grpo"))
    many = staged(pool, deep_path["tied"], 4, name="grpo", stages=2)
    for batch in Batch(1, (make_group(0, (1.0, 0.0)),)), Batch(2, (make_group(1, (1.0, 1.0)),)):
        assert many.step(batch)["policy/loss"] == pytest.approx(one.step(batch)["policy/loss"], abs=1e-6)
        assert_close(tensors(many), tensors(one))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "apart"), [("tied", 1), ("untied", 2), ("experts", 3)])
def test_a_checkpoint_is_resumed_by_other_stages_by_ranks_and_by_one_process(
    kind: str, apart: int, pool: RankPool, deep_path: dict[str, str], tmp_path: Path
) -> None:
    """Each shape writes a checkpoint, which it reads itself and one other shape, in CI: all are read by all with
    BATON_ALL_STAGES=1."""
    shapes: dict[str, dict[str, Any]] = {
        "one process": {},
        "two ranks": {"ranks": 2},
        "two stages": {"ranks": 2, "stages": 2},
        "uneven stages": {"ranks": 3, "stages": (1, 1, 3)},
        "two stages of two": {"ranks": 4, "stages": 2},
    }

    def make(name: str) -> Trainer:
        setup = setup_of(deep_path[kind], name="grpo", num_minibatches=2, **shapes[name])
        return ranked(pool, shapes[name]["ranks"], setup) if shapes[name] else alone(setup)

    names = list(shapes)
    for position, before in enumerate(names):
        trainer = make(before)
        trainer.step(two_version_batch(1))
        trainer.save(tmp_path / before)
        saved, version = tensors(trainer), trainer.version
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / before, dtype=torch.float32).state_dict()
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
        trainer.step(two_version_batch(2))
        weights = tensors(trainer)
        for after in names if ALL else (before, names[(position + apart) % len(names)]):
            other = make(after)
            other.restore(tmp_path / before)
            assert other.version == version
            assert all(torch.equal(tensor, saved[name]) for name, tensor in tensors(other).items())
            other.step(two_version_batch(2))  # with the moments, or it would differ
            if before == after:
                assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors(other).items())
            assert_close(tensors(other), weights)


def test_a_number_that_is_not_finite_is_named_by_the_stage_with_the_loss(
    pool: RankPool, tmp_path: Path, deep_path: dict[str, str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(deep_path["untied"])
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = float("nan")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    many = staged(pool, str(tmp_path), 3, name="grpo", stages=3)
    good, bad = make_group(0, (1.0, 0.0)), make_group(7, (1.0, 0.0), [[policy(63, 5)], [policy(6, 7)]])
    before = tensors(many)
    with pytest.raises(TrainingDiverged, match=r"train step 1: the loss is nan over groups (0, )?7.*are still"):
        many.step(Batch(1, (good, bad)))
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in tensors(many).items())
    many.step(Batch(1, (good, make_group(8, (1.0, 0.0)))))  # and they can go on


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_trajectory_that_the_last_stage_cannot_confirm_is_named_by_all(
    pool: RankPool, deep_path: dict[str, str], num_minibatches: int
) -> None:
    limits = {"max_logprob_diff": (5.0, 15.0), "max_mismatch_kl": (0.01, math.inf)}
    many = staged(pool, deep_path["untied"], 3, name="grpo", stages=3, num_minibatches=num_minibatches, **limits)
    good = [make_group(index, (1.0, 0.0)) for index in range(2)]
    bad = make_group(9, (1.0, 0.0), [[policy(5)], [policy(6, 7, logprob=-40.0)]])
    with pytest.raises(TrainingDiverged, match="weights are still those of version 0") as caught:
        many.step(Batch(1, (good[0], bad)))
    assert [suspect.name for suspect in caught.value.suspects] == ["9/1"]
    many.step(Batch(1, tuple(good)))


def test_layers_are_divided_equally_or_as_asked() -> None:
    assert stage_layers(1, 7) == (7,)
    assert stage_layers(3, 7) == (3, 2, 2)
    assert stage_layers([2, 4, 1], 7) == (2, 4, 1)
    for wrong, shown in ((8, "8"), ((3, 3), r"\[3, 3\]"), ((7, 0), r"\[7, 0\]")):
        with pytest.raises(UserError, match=f"trainer.stages: got {shown}, but the model has 7 layers; allowed are"):
            stage_layers(wrong, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stages": 3}, "stages: got 3 with ranks = 4; allowed are a divisor of ranks"),
        ({"stages": 0}, "stages: got 0 with ranks = 4"),
        ({"stages": (3, 4, 5)}, r"stages: got \[3, 4, 5\] with ranks = 4"),
        ({"stages": (3, -1)}, r"stages: got \[3, -1\] with ranks = 4"),
        ({"stages": 2, "tensor_parallel": 2}, "stages: got 2 with tensor_parallel = 2, which were not tested"),
        ({"stages": 2, "moe_replay": "engine"}, "stages: got 2 with moe_replay = 'engine'"),
        ({"stages": 2, "shard_size": 4}, "shard_size: got 4 with ranks = 4"),
    ],
)
def test_settings_that_do_not_fit_stages_are_refused_in_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerSettings(ranks=4, **settings)


def test_a_model_that_cannot_be_cut_is_refused_in_a_sentence(pool: RankPool, model_path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.stages: got 3, but the model has 2 layers"):
        staged(pool, model_path, 3, stages=3)
    AutoModelForCausalLM.from_config(tiny_config("gpt2")).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="GPT2LMHeadModel has no pipeline plan in transformers; allowed is 1"):
        staged(pool, str(tmp_path), 2, stages=2)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_of_every_family_score_as_the_whole_model(family: str) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    if not getattr(whole.config, "base_model_pp_plan", None):
        with pytest.raises(UserError, match=r"has no pipeline plan in transformers; allowed is 1"):
            StageModel(whole, (1, 1), 0)
        return
    for parameter in whole.parameters():
        parameter.normal_(0.0, 0.2)
    ids = torch.randint(0, 300, (2, 9))
    arrived, found = None, None
    for stage in range(2):
        model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
        model.load_state_dict(whole.state_dict())
        cut = StageModel(model, (1, 1), stage)
        assert {cut.owner_of(name) for name in model.state_dict() if name not in cut.shared} == {stage}
        if stage:
            assert find_head(model) is not None
        cut.arrived = arrived
        if stage:
            found = padded_scores(model, ids, first=3).logprobs
        else:
            arrived = hidden_states(model, ids[:, :-1])
    expected = padded_scores(whole, ids, first=3).logprobs
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", chosen([2], [0, 1]))
def test_a_stage_that_is_killed_is_named_at_once(stage: int, deep_path: dict[str, str]) -> None:
    """It is stopped first, so that its neighbours wait for it when it dies."""
    ranks = LocalRanks(3)
    trainer = RankedTrainer(ranks, setup_of(deep_path["tied"], name="grpo", ranks=3, stages=3), 10 * TIMEOUT_S)
    os.kill(ranks.pids[stage], signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (ranks.pids[stage], signal.SIGKILL)).start()
    with pytest.raises(RankLost, match=rf"trainer rank {stage} \(pid \d+\) ended by SIGKILL; continue from"):
        trainer.step(random_batch(1))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)


@pytest.mark.slow
def test_a_stage_that_hangs_is_named_when_its_time_is_up(deep_path: dict[str, str]) -> None:
    """Its neighbours give up in their exchange before the request's time is up, so it is known which one hangs. The
    time of the train step does not limit the start of the ranks, which takes longer on a busy machine."""

    class PatientRanks(LocalRanks):
        def ask(self, message: ToRank, timeout_s: float) -> list[FromRank]:
            return super().ask(message, timeout_s if isinstance(message, TrainStep) else TIMEOUT_S)

    ranks = PatientRanks(3)
    trainer = RankedTrainer(ranks, setup_of(deep_path["tied"], name="grpo", ranks=3, stages=3), 30.0)
    os.kill(ranks.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(RankLost, match="trainer rank 1 did not answer TrainStep in 30 s"):
        trainer.step(random_batch(1))
    assert time.monotonic() - begin < 60.0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
