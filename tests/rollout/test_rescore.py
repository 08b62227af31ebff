"""Rescoring agrees with the engine to rounding, however a token was sampled, and says how far any other is off."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.errors import EngineFault
from baton.policy.head import find_head
from baton.rollout.engines.embedded import rescore
from baton.rollout.engines.embedded.rescore import Rescorer, token_scores
from baton.rollout.engines.sampling import row_params, sample
from baton.rollout.rescoring import Claim
from baton.types import Author, PolicyVersion, SamplingParams, Segment, Trajectory

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8, 9, 10]
WAYS = [
    {},
    {"temperature": 1.7},
    {"temperature": 0.6},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 5},
    {"top_p": 0.7, "top_k": 8, "temperature": 1.3},
]
MASKED_WAYS = [
    {"top_p": 0.8, "top_k": 512, "reports_kept": True},
    {"top_p": 0.7, "top_k": 8, "temperature": 1.3, "reports_kept": True},
    {"top_k": 5, "reports_kept": True},
]


def scores(probabilities, token, uniform, **sampling):
    """(logprob, draw gap, tail mass) of one token."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    params = row_params([SamplingParams(1, **sampling)], len(probabilities), CPU)
    found = token_scores(logits, torch.tensor([token]), torch.tensor([uniform], dtype=torch.float64), params)
    return [float(column[0]) for column in found]


def log_odds(p):
    return math.log(p / (1 - p))


def claim(driver, trajectory, **sampling):
    return Claim(trajectory, SamplingParams(64, **sampling), driver.noise_seed)


def rescorer(model, version=0):
    found = Rescorer(model)
    found.load(dict(model.named_parameters()), version)
    return found


def largest_difference(rescored):
    return max(abs(a - b) for a, b in zip(rescored.behavior_logprobs, rescored.logprobs, strict=True))


@pytest.mark.parametrize(
    ("token", "gap", "tail"),
    [
        (0, log_odds(0.55) - log_odds(0.5), 1.0),  # [0, 0.5): the draw lies above
        (1, 0.0, 0.5),  # [0.5, 0.8)
        (2, log_odds(0.8) - log_odds(0.55), 0.2),  # [0.8, 1)
    ],
)
def test_the_gap_is_the_log_odds_between_the_draw_and_the_tokens_interval(token, gap, tail):
    found = scores([0.5, 0.3, 0.2], token, 0.55)
    assert found == pytest.approx([math.log([0.5, 0.3, 0.2][token]), gap, tail], abs=1e-5)


def test_an_unlikely_token_at_the_edge_is_as_far_off_as_any():
    """Probability 1e-9 at the bottom of the vocabulary, drawn by 0.01: near in probability, far in odds."""
    _, gap, tail = scores([1e-9, 0.6, 0.4], 0, 0.01)
    assert gap == pytest.approx(log_odds(0.01) - math.log(1e-9), abs=1e-3)
    assert tail == pytest.approx(1e-9, rel=1e-3)


def test_greedy_gaps_are_distances_to_the_largest_logit():
    assert scores([0.5, 0.3, 0.2], 0, 0.9, temperature=0.0)[1] == 0
    assert scores([0.5, 0.3, 0.2], 2, 0.9, temperature=0.0)[1] == pytest.approx(math.log(0.5 / 0.2), abs=1e-6)


def test_top_p_and_top_k_leave_no_room_for_what_they_exclude():
    """Of 0.5, 0.3 and 0.2 the share 0.75 keeps two, [0, 0.625) and [0.625, 1); the third starts at 0.8."""
    for way in ({"top_p": 0.75}, {"top_k": 2}):
        assert scores([0.5, 0.3, 0.2], 1, 0.63, **way)[1] == 0
        assert scores([0.5, 0.3, 0.2], 0, 0.63, **way)[1] == pytest.approx(log_odds(0.63) - log_odds(0.625), abs=1e-5)
        assert scores([0.5, 0.3, 0.2], 2, 0.99, **way)[1] > 100
        assert scores([0.5, 0.3, 0.2], 2, 0.99, **way)[2] == 0


def test_a_token_at_the_border_may_be_in_or_out():
    """0.79 keeps two by a hair; with the third in, it lies at [0.8, 1). 0.301 and 0.299 may have changed places."""
    assert scores([0.5, 0.3, 0.2], 2, 0.9, top_p=0.79)[1] == 0
    assert scores([0.5, 0.3, 0.2], 1, 0.99, top_p=0.81)[1] == 0, "three are kept, but two may have been"
    assert scores([0.4, 0.301, 0.299], 2, 0.9, top_k=2)[1] == 0
    assert scores([0.4, 0.301, 0.299], 1, 0.9, top_k=2)[1] == 0


@given(
    st.lists(st.floats(-12, 12), min_size=2, max_size=12),
    st.floats(1e-6, 1 - 1e-6),
    st.sampled_from(WAYS),
)
@settings(max_examples=300, deadline=None)
def test_what_is_sampled_has_no_gap_and_without_filters_nothing_else_has_none(logits, uniform, way):
    logits_VV = torch.tensor([logits] * len(logits))
    params = row_params([SamplingParams(1, **way)] * len(logits), len(logits), CPU)
    drawn, logprobs, _ = sample(logits_VV, params, np.full(len(logits), uniform))
    every = torch.arange(len(logits))
    rescored, gaps, tails = token_scores(logits_VV, every, torch.full((len(logits),), uniform), params)
    token = int(drawn[0])
    assert gaps[token] <= 1e-6
    assert rescored[token] == pytest.approx(float(logprobs[0]), abs=1e-6)
    assert bool(((tails >= 0) & (tails <= 1 + 1e-9)).all())
    if way.keys() <= {"temperature"} and way.get("temperature") != 0:
        bounds = torch.softmax(logits_VV[0].double() / way.get("temperature", 1.0), -1).cumsum(-1)
        assume(float((bounds - uniform).abs().min()) > 1e-6)
        assert bool((gaps[every != token] > 0).all())


@pytest.mark.parametrize("way", [*WAYS, *MASKED_WAYS], ids=str)
def test_an_engines_answers_are_what_rescoring_says_they_must_be(way, embedded, load, driver, monkeypatch):
    monkeypatch.setattr(rescore, "MAX_TOKENS", 64)
    leases = [driver.lease(i, PROMPT[: 1 + i % 6], 20 + i, **way) for i in range(12)]
    grown = driver.run(embedded(), leases)
    found = rescorer(load("qwen3")).score([claim(driver, t, **way) for t in grown.values()])
    for trajectory, rescored in zip(grown.values(), found, strict=True):
        assert rescored.name == trajectory.name
        assert rescored.token_ids == tuple(trajectory.token_ids)
        assert largest_difference(rescored) < 1e-4
        assert max(rescored.draw_gaps) < 1e-4
        if way in MASKED_WAYS:
            assert len(rescored.mask_gaps) == len(rescored.places)
        assert max(rescored.mask_gaps, default=0.0) < 1e-4


def test_the_mask_gap_is_the_distance_to_the_mask_of_top_k_and_top_p():
    """Of 0.4, 0.3, 0.2 and 0.1, top-k 3 keeps three, with 0, 4/9 and 7/9 of their mass before them."""
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()

    def gap(kept, top_p, target=0):
        params = row_params([SamplingParams(1, top_p=top_p, top_k=3, reports_kept=True)], 4, CPU)
        uniform, kept_NK = torch.tensor([0.1], dtype=torch.float64), torch.tensor([[*kept, -1]])
        found = token_scores(logits_V[None], torch.tensor([target]), uniform, params, kept_NK)
        logprob, draw_gap, tail, mask_gap = (float(column[0]) for column in found)
        own = logits_V.exp()[kept] / logits_V.exp()[kept].sum()
        assert logprob == pytest.approx(math.log(own[0]), abs=1e-6)
        assert draw_gap == 0, "0.1 draws the first of every mask"
        assert tail == pytest.approx(1.0)
        return mask_gap

    assert gap([0, 1], 0.7) == 0
    assert gap([0, 1, 2], 0.8) == 0
    assert gap([0, 1, 2], 1.0) == 0
    assert gap([0, 1, 2], 0.7) == pytest.approx(log_odds(7 / 9) - log_odds(0.7), abs=1e-5), (
        "the third has too much before it"
    )
    assert gap([0], 0.7) == pytest.approx(min(log_odds(0.7) - log_odds(4 / 9), math.log(0.3 / 0.1)), abs=1e-5), (
        "one too few"
    )
    assert gap([0, 1], 1.0) == pytest.approx(math.log(0.2 / 0.1), abs=1e-5), (
        "the third is in unless the fourth is likelier"
    )
    assert gap([0, 1, 3], 1.0) == pytest.approx(math.log(0.2 / 0.1), abs=1e-5), (
        "the third and the fourth have changed places"
    )
    assert gap([1, 2], 0.8, target=1) == pytest.approx(math.log(0.4 / 0.1), abs=1e-5), "the first is out"


def test_claims_of_all_ways_are_scored_together_as_each_alone(embedded, load, driver):
    engine, found = embedded(), []
    for i, way in enumerate([*WAYS, *MASKED_WAYS]):
        found.append(claim(driver, driver.run(engine, [driver.lease(i, PROMPT, 10 + i, **way)])[i], **way))
    scorer = rescorer(load("qwen3"))
    for alone, together in zip([scorer.score([c])[0] for c in found], scorer.score(found), strict=True):
        assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert together.draw_gaps == pytest.approx(alone.draw_gaps, abs=1e-5)
        assert together.mask_gaps == pytest.approx(alone.mask_gaps or [0.0] * len(alone.places), abs=1e-5)


def test_each_segment_is_scored_under_its_own_version(embedded, load, driver):
    """Put down after 7 tokens and resumed under other weights: two versions, two passes, all tokens once."""
    first = driver.run(embedded("qwen3"), [driver.lease(0, PROMPT, 7)])[0]
    engine = embedded("qwen3_next")
    engine.load_weights(dict(load("qwen3_next").named_parameters()), PolicyVersion("run", 3))
    whole = driver.run(engine, [driver.lease(1, PROMPT, 20, group_id=0, segments=first.segments, version=3)])[1]
    scorer = rescorer(load("qwen3"), version=0)
    (old,) = scorer.score([claim(driver, whole)])
    scorer.load(dict(load("qwen3_next").named_parameters()), 3)
    (new,) = scorer.score([claim(driver, whole)])
    assert (old.version, old.places) == (0, tuple(range(7)))
    assert (new.version, new.places) == (3, tuple(range(7, 20)))
    for rescored in (old, new):
        assert largest_difference(rescored) < 1e-4
        assert max(rescored.draw_gaps) < 1e-4
    scorer.load(dict(load("qwen3_next").named_parameters()), 0)
    assert largest_difference(scorer.score([claim(driver, whole)])[0]) > 0.1, "the wrong weights must be seen"


def test_what_the_environment_said_is_read_but_not_scored(embedded, load, driver):
    said = (Segment((1, 2), (-1.0, -1.0), 0), Segment((33, 44), (0.0, 0.0), 0, Author.ENVIRONMENT))
    whole = driver.run(embedded(), [driver.lease(0, PROMPT, 9, segments=said)])[0]
    (rescored,) = rescorer(load("qwen3")).score([claim(driver, whole)])
    assert rescored.places == (0, 1, 4, 5, 6, 7, 8)
    assert max(rescored.draw_gaps[2:]) < 1e-4
    assert rescored.draw_gaps[0] > 0


def test_a_claim_without_tokens_of_the_version_has_no_scores(load, driver):
    scorer = rescorer(load("llama"), version=5)
    empty = claim(driver, Trajectory(0, 0, (1, 2)))
    other = claim(driver, Trajectory(1, 0, (1, 2), (Segment((3,), (-1.0,), 4),)))
    own = claim(driver, Trajectory(2, 0, (1, 2), (Segment((3,), (-1.0,), 5),)))
    assert [len(r.places) for r in scorer.score([empty, own, other])] == [0, 1, 0]
    assert scorer.score([]) == []


def test_a_model_whose_head_is_not_known_scores_the_same(embedded, load, driver, monkeypatch):
    grown = driver.run(embedded("llama"), [driver.lease(i, PROMPT, 9) for i in range(3)])
    claims = [claim(driver, t) for t in grown.values()]
    plain, other = load("llama"), load("llama")
    monkeypatch.setattr(rescore, "find_head", lambda model: None if model is other else find_head(model))
    for a, b in zip(rescorer(plain).score(claims), rescorer(other).score(claims), strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_adapters_are_merged_into_the_last_whole_weights(embedded, load, driver):
    generator = torch.Generator().manual_seed(0)
    name = "model.layers.1.mlp.up_proj"
    adapter = {
        f"{name}.lora_A.weight": torch.randn(2, 192, generator=generator),
        f"{name}.lora_B.weight": torch.randn(256, 2, generator=generator) * 0.1,
    }
    engine, scorer = embedded(), rescorer(load("qwen3"))
    for version in (1, 2):  # the second must not be merged into the first
        engine.load_weights(adapter, PolicyVersion("run", version))
        scorer.load(adapter, version)
        grown = driver.run(engine, [driver.lease(version, PROMPT, 12, version=version)])[version]
        (rescored,) = scorer.score([claim(driver, grown)])
        assert largest_difference(rescored) < 1e-4


def test_weights_are_rounded_to_the_dtype_of_the_model_as_in_engines(load):
    model = load("llama")
    given_weights = {n: p.clone() for n, p in model.named_parameters()}
    scorer = Rescorer(model.bfloat16())
    scorer.load(given_weights, 1)
    assert all(torch.equal(p, given_weights[n].bfloat16()) for n, p in scorer.model.named_parameters())


@pytest.mark.parametrize("fault", ["missing", "unexpected", "wrong shape"])
def test_tensors_that_do_not_fit_change_nothing(fault, load):
    scorer = rescorer(load("llama"), version=1)
    given_weights = {n: torch.zeros_like(p) for n, p in scorer.model.named_parameters()}
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del given_weights[name]
    elif fault == "unexpected":
        given_weights["other"] = torch.zeros(2)
    else:
        given_weights[name] = torch.zeros(3, 3)
    with pytest.raises(EngineFault, match=f"version 2 .*{fault}"):
        scorer.load(given_weights, 2)
    assert scorer.version == 1
    assert all(bool(p.abs().sum() > 0) for p in scorer.model.parameters())
