"""Honest answers pass, however they were sampled; each kind of dishonest one is found, by the test it must fail."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import numpy as np
import pytest
import torch
from verify_cases import (
    NOISE_SEED,
    PROMPTS,
    engine,
    grow,
    honest,
    lease,
    near,
    policy,
    quantised,
    rescored,
    submitted,
    tokenizer,
    verdict,
    with_tokens,
)

from baton.policy.load import end_ids
from baton.rollout.engines.embedded.rescore import Rescorer
from baton.rollout.rescoring import Claim, Rescored
from baton.swarm.verification.verify import (
    DEFAULTS,
    Calibration,
    CheckOutcome,
    Tolerance,
    WorkerClass,
    chance_of_beyond,
    judge,
    pooled,
    unseen_draws,
)
from baton.types import FinishReason, Segment, Trajectory

pytestmark = pytest.mark.numerics

BF16 = WorkerClass("a processor", "bfloat16", "embedded")
WAYS = [{}, {"temperature": 1.5}, {"temperature": 0.5}, {"temperature": 0.0}, {"top_p": 0.8}, {"top_k": 10}]
MASKED_WAYS = [{"top_p": 0.8, "top_k": 512, "reports_kept": True}, {"top_k": 10, "reports_kept": True}]


def outcomes(leases, answers, dtype="float32"):
    return {verdict(given, answer, dtype).outcome for given, answer in zip(leases, answers, strict=True)}


# ---- honest workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", [*WAYS, *MASKED_WAYS], ids=str)
def test_honest_answers_pass_however_they_are_sampled(way, dtype):
    """A bfloat16 worker is published bfloat16 weights, so those are what its hub scores with."""
    leases = [lease(i, i % 3, **way) for i in range(12)]
    weights = policy() if dtype == "float32" else _rounded(policy())
    for given, answer in zip(leases, grow(engine(policy(), dtype), leases), strict=True):
        found = judge([rescored(given, answer, model=weights)], DEFAULTS[dtype])
        assert found.outcome is CheckOutcome.HONEST, found.reason
        assert found.num_tokens == answer.num_tokens


def test_honest_answers_that_end_with_a_stop_string_pass():
    stop = tuple(tokenizer().text([i]) for i in (60, 70, 80, 90))
    leases = [lease(i, stop=stop) for i in range(12)]
    answers = grow(engine(policy()), leases)
    assert FinishReason.STOP in {answer.finish_reason for answer in answers}
    assert outcomes(leases, answers) == {CheckOutcome.HONEST}


def test_an_honest_answer_carried_on_under_the_next_version_passes_under_both():
    """15 tokens under version 0, the rest under version 1."""
    after = near(policy(), 0.05)
    begun = grow(engine(policy()), [lease(3, max_new_tokens=15)])[0]
    given = lease(3, segments=begun.segments, version=1)
    answer = grow(engine(after, version=1), [given])[0]
    scores = [rescored(given, answer, 0), rescored(given, answer, 1, after)]
    found = judge(scores, DEFAULTS["float32"])
    assert (found.outcome, found.num_tokens) == (CheckOutcome.HONEST, 40)
    assert judge([rescored(given, answer, 1, policy())], DEFAULTS["float32"]).outcome is CheckOutcome.BAD


# ---- dishonest workers -----------------------------------------------------------------------------------------------


def test_other_weights_are_found():
    leases, _ = honest()
    assert outcomes(leases, grow(engine(policy(seed=1)), leases)) == {CheckOutcome.BAD}


def test_the_next_versions_tokens_tagged_as_this_one_are_found():
    """Weights that differ by 0.1 %, each from each."""
    leases, _ = honest()
    assert outcomes(leases, grow(engine(near(policy(), 1e-3)), leases)) == {CheckOutcome.BAD}


def test_quantised_weights_are_found():
    leases, _ = honest()
    assert outcomes(leases, grow(engine(quantised(policy())), leases)) == {CheckOutcome.BAD}


def test_a_lower_precision_than_announced_is_found():
    leases, _ = honest()
    assert outcomes(leases, grow(engine(policy(), "bfloat16"), leases)) == {CheckOutcome.BAD}


def test_constant_logprobs_are_found():
    leases, answers = honest()
    forged = [with_tokens(a, a.token_ids, [-0.5] * a.num_tokens) for a in answers]
    assert {verdict(g, a).test for g, a in zip(leases, forged, strict=True)} == {"logprob"}


def test_one_logprob_taken_from_a_likelier_token_is_found():
    """A token below average, said to have been the likeliest."""
    leases, answers = honest()
    for given, answer in zip(leases, answers, strict=True):
        logprobs = answer.behavior_logprobs
        place = logprobs.index(min(logprobs))
        forged = with_tokens(answer, answer.token_ids, [*logprobs[:place], -0.1, *logprobs[place + 1 :]])
        found = verdict(given, forged)
        assert (found.outcome, found.test, found.worst_place) == (CheckOutcome.BAD, "logprob", place)


@pytest.mark.parametrize("way", MASKED_WAYS, ids=str)
@pytest.mark.parametrize("lie", ["alone", "others", "wider"])
def test_another_sampling_mask_with_its_right_logprobs_is_found(way, lie):
    """The mask is the token alone, or the token and the least likely ones, or a few more than were kept. The logprobs
    are those over the mask, and the draws those of the noise."""
    model = policy()
    given = lease(0, **way)
    (answer,) = grow(engine(model), [given])
    vocabulary = model.config.vocab_size
    ids = torch.tensor([[*answer.prompt_ids, *answer.token_ids]])
    with torch.no_grad():
        table = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].double().log_softmax(-1)
    masks, logprobs = [], []
    for token, mask, row in zip(answer.token_ids, answer.kept, table, strict=True):
        kept, order = set(np.frombuffer(mask, "<u2").tolist()), row.argsort().tolist()
        likeliest = [i for i in reversed(order) if i not in kept]
        kept = {"alone": {token}, "others": {token, *order[:5]}, "wider": {*kept, *likeliest[:9]}}[lie]
        masks.append(np.array(sorted(kept), "<u2").tobytes())
        logprobs.append(float(row[token] - row[sorted(kept)].logsumexp(-1)))
    assert max(max(np.frombuffer(mask, "<u2").tolist()) for mask in masks) < vocabulary
    segment = Segment(answer.token_ids, logprobs, 0, kept=masks)
    found = verdict(given, Trajectory(answer.group_id, 0, answer.prompt_ids, (segment,), answer.finish_reason))
    assert (found.outcome, found.test) == (CheckOutcome.BAD, "draw")
    assert "sampling mask of top-k and top-p" in found.reason


def test_a_siblings_answer_handed_in_again_is_found_by_its_draws_alone():
    """Same prompt, right logprobs; only the noise of another sample."""
    given = [lease(i, sample_index=1) for i in range(12)]
    copies = [submitted(g, a) for g, a in zip(given, honest()[1], strict=True)]
    assert {(v.outcome, v.test) for g, c in zip(given, copies, strict=True) for v in [verdict(g, c)]} == {
        (CheckOutcome.BAD, "draw")
    }


def test_the_best_of_many_is_found_by_its_draws_alone():
    """The worker samples with noise of its own, and hands in what it likes best: here the likeliest of four."""
    leases, worker = honest()[0], engine(policy())
    for given in leases:
        tries = [msgspec.structs.replace(given, lease_id=k, noise_seed=NOISE_SEED + k) for k in range(1, 5)]
        best = max(grow(worker, tries), key=lambda t: sum(t.behavior_logprobs))
        found = verdict(given, submitted(given, best))
        assert (found.outcome, found.test) == (CheckOutcome.BAD, "draw")


def test_an_answer_to_another_prompt_is_found():
    """Grown under the very lease, noise and all, but for the prompt."""
    leases, _ = honest()
    others = [lease(i, prompt=PROMPTS[(i + 1) % len(PROMPTS)]) for i in range(12)]
    answers = [submitted(g, a) for g, a in zip(leases, grow(engine(policy()), others), strict=True)]
    assert outcomes(leases, answers) == {CheckOutcome.BAD}


def test_an_earlier_submission_replayed_for_the_same_prompt_is_found():
    leases, answers = honest()
    later = [lease(i + 12) for i in range(12)]
    assert [g.trajectory.prompt_ids for g in later] == [g.trajectory.prompt_ids for g in leases]
    replayed = [submitted(g, a) for g, a in zip(later, answers, strict=True)]
    assert {verdict(g, a).test for g, a in zip(later, replayed, strict=True)} == {"draw"}


def test_an_answer_cut_short_by_an_end_id_is_found_even_at_the_best_place_for_it():
    """The worker knows weights and noise: it cuts where its lie is smallest, and reports the end id's true logprob."""
    leases, answers = honest()
    (end, *_) = end_ids(policy(), tokenizer())
    for given, answer in zip(leases, answers, strict=True):
        lies = []
        for place in range(1, answer.num_tokens - 1):  # a last token may well be an end id in earnest
            ids, logprobs = [*answer.token_ids[:place], end], [*answer.behavior_logprobs[:place], 0.0]
            (true,) = rescored(given, with_tokens(answer, ids, logprobs)).logprobs[-1:]
            lies.append(rescored(given, with_tokens(answer, ids, [*logprobs[:-1], true])))
        smallest = min(lies, key=lambda r: r.draw_gaps[-1])
        found = judge([smallest], DEFAULTS["float32"])
        assert (found.outcome, found.worst_place) == (CheckOutcome.BAD, len(smallest.places) - 1)


def test_a_single_token_of_the_workers_own_choice_is_found():
    """The token halfway replaced by the likeliest other one, then carried on honestly: every logprob is right."""
    leases, answers = honest()
    for given, answer in zip(leases[:6], answers[:6], strict=True):
        place = answer.num_tokens // 2
        ids, logprobs = answer.token_ids[:place], answer.behavior_logprobs[:place]
        with torch.no_grad():
            logprobs_V = policy()(torch.tensor([[*answer.prompt_ids, *ids]])).logits[0, -1].log_softmax(-1)
        logprobs_V[answer.token_ids[place]] = -torch.inf
        other = int(logprobs_V.argmax())
        begun = with_tokens(answer, [*ids, other], [*logprobs, float(logprobs_V[other])])
        rest = lease(given.trajectory.group_id, segments=begun.segments)
        found = verdict(given, grow(engine(policy()), [rest])[0])
        assert (found.outcome, found.worst_place) == (CheckOutcome.BAD, place), found.reason


# ---- the decision ----------------------------------------------------------------------------------------------------

LOOSE = Tolerance(logprob=0.1, draw_gap=0.2, typical=0.01)


def made(differences, gaps=None, tails=None, temperature=1.0, first=0):
    """Scores with given differences at logprob −1."""
    n = len(differences)
    places = tuple(range(first, first + n))
    reported = tuple(-1.0 + d for d in differences)
    return Rescored(
        "4/2",
        3,
        temperature,
        places,
        (5,) * n,
        reported,
        (-1.0,) * n,
        tuple(gaps or [0.0] * n),
        tuple(tails or [1] * n),
    )


def test_one_token_just_beyond_the_tolerance_convicts_nobody_and_one_far_beyond_does():
    """5 × 0.1 is the limit for a single one."""
    assert judge([made([0.0] * 39 + [0.12])], LOOSE).outcome is CheckOutcome.HONEST
    assert judge([made([0.0] * 39 + [0.49])], LOOSE).outcome is CheckOutcome.HONEST
    found = judge([made([0.0] * 39 + [0.51])], LOOSE)
    assert (found.outcome, found.test, found.worst_place) == (CheckOutcome.BAD, "logprob", 39)
    assert found.reason.startswith(
        "trajectory 4/2: token 39 (id 5) under version 3 was reported with the logprob -0.49"
    )
    found = judge([made([0.0] * 3, [0.0, 1.1, 0.0])], LOOSE)
    assert (found.outcome, found.test, found.worst_place) == (CheckOutcome.BAD, "draw", 1)


def test_many_tokens_beyond_the_tolerance_are_suspect_and_more_are_bad():
    """40 tokens of which 0.2 % may be: 2 happen once in a hundred times, 3 in 3000, 6 less than once in 10^8."""
    by_count = [judge([made([0.12] * k + [0.0] * (40 - k))], LOOSE).outcome for k in range(7)]
    assert by_count == [CheckOutcome.HONEST] * 3 + [CheckOutcome.SUSPECT] * 3 + [CheckOutcome.BAD]


def test_what_is_no_number_is_bad():
    assert judge([made([float("nan")])], LOOSE).outcome is CheckOutcome.BAD
    assert judge([made([0.0], [float("nan")])], LOOSE).outcome is CheckOutcome.BAD


def test_an_all_but_impossible_token_is_bad_unless_its_draw_selects_it():
    assert judge([made([0.0] * 3, [0.0, 0.01, 0.0], [1.0, 1e-12, 1.0])], LOOSE).test == "unlikely"
    assert judge([made([0.0] * 3, [0.0, 0.0, 0.0], [1.0, 1e-12, 1.0])], LOOSE).outcome is CheckOutcome.HONEST


def test_below_temperature_1_rounding_is_scaled_up_and_so_is_the_tolerance():
    """0.8 at temperature 0.5 is a difference of 0.4 in logits; at temperature 2 it is taken as it is."""
    for temperature, outcome in (
        (0.5, CheckOutcome.HONEST),
        (1.0, CheckOutcome.BAD),
        (2.0, CheckOutcome.BAD),
        (0.0, CheckOutcome.BAD),
    ):
        assert judge([made([0.8] + [0.0] * 9, temperature=temperature)], LOOSE).outcome is outcome


def test_only_a_workers_own_tokens_are_held_against_it():
    """Another worker forged token 2; this one has grown those from 3 on."""
    scores = [made([0.0, 0.0, 9.0, 0.0, 0.0, 0.0])]
    assert judge(scores, LOOSE).outcome is CheckOutcome.BAD
    assert judge(scores, LOOSE, first=3).outcome is CheckOutcome.HONEST
    assert judge(scores, LOOSE, first=0, end=2).num_tokens == 2
    assert judge(scores, LOOSE, first=2, end=3).outcome is CheckOutcome.BAD


def test_small_differences_add_up_over_trajectories():
    """0.03 a token is within the tolerance of each, but 40 % at most may be off by more than 0.01: here 70 % are.

    Of 10 tokens 7 prove little; of 100 they prove it: 100 · KL(0.7 ‖ 0.4) = 18.4, and e^−18.4 is below 10^−7.
    """
    each = [judge([made([0.03] * 7 + [0.0] * 3)], LOOSE) for _ in range(10)]
    assert {v.outcome for v in each} == {CheckOutcome.HONEST}
    assert pooled(each[:2], LOOSE).outcome is CheckOutcome.HONEST
    found = pooled(each, LOOSE)
    assert (found.outcome, found.test, found.num_tokens) == (CheckOutcome.BAD, "typical", 100)


def test_quantised_weights_are_found_within_bfloat16_rounding_by_a_hub_that_rounds_alike():
    """int8 is about as fine as bfloat16; but most honest tokens are rounded to the very bit as the hub's are."""
    leases = [lease(i, k) for i in range(12) for k in range(4)]
    alike = Rescorer(near(policy(), 0.0).bfloat16())
    alike.load(dict(policy().named_parameters()), 0)

    def scores(weights):
        answers = grow(engine(weights, "bfloat16"), leases)
        return alike.score([Claim(a, g.sampling, g.noise_seed) for g, a in zip(leases, answers, strict=True)])

    calibration, right = Calibration(min_tokens=500), scores(policy())
    calibration.observe(BF16, right[::2])
    tolerance = calibration.tolerance(BF16)
    assert pooled([judge([s], tolerance) for s in right[1::2]], tolerance).outcome is CheckOutcome.HONEST
    assert {judge([s], tolerance).outcome for s in right[1::2]} == {CheckOutcome.HONEST}
    found = pooled([judge([s], tolerance) for s in scores(quantised(policy()))[1::2]], tolerance)
    assert found.outcome is CheckOutcome.BAD
    assert found.beyond_typical > tolerance.often * found.num_tokens


def test_nothing_to_check_is_honest():
    assert judge([], LOOSE).outcome is CheckOutcome.HONEST
    assert pooled([], LOOSE).outcome is CheckOutcome.HONEST


def test_the_chance_of_tokens_beyond_bounds_what_counting_finds():
    """Of 100 tokens with 2 % each: Chernoff's bound lies above the exact binomial tail, and is 1 up to the mean."""
    rng = random.Random(0)
    counts = [sum(rng.random() < 0.02 for _ in range(100)) for _ in range(20_000)]
    for beyond in (3, 5, 8):
        seen = sum(c >= beyond for c in counts) / len(counts)
        assert seen <= chance_of_beyond(beyond, 100, 0.02) < 20 * seen + 1e-3
    assert chance_of_beyond(2, 100, 0.02) == chance_of_beyond(0, 0, 0.02) == 1
    assert 0 < chance_of_beyond(100, 100, 0.02) < 1e-100


# ---- worker classes --------------------------------------------------------------------------------------------------


def noisy(sigma, count, seed=0):
    rng = random.Random(seed)
    return [made([rng.gauss(0, sigma) for _ in range(50)], [abs(rng.gauss(0, sigma / 2))] * 50) for _ in range(count)]


def test_a_class_has_its_dtypes_default_until_enough_is_known():
    calibration = Calibration()
    assert calibration.tolerance(BF16) == DEFAULTS["bfloat16"]
    assert calibration.mismatch_kl(BF16) is None
    calibration.observe(BF16, noisy(0.01, 10))
    assert calibration.tolerance(BF16) == DEFAULTS["bfloat16"]
    assert calibration.tolerance(WorkerClass("tpu", "int3", "x")) == DEFAULTS["bfloat16"]


def test_a_tolerance_follows_what_trusted_workers_show_with_half_as_much_headroom():
    """|N(0, σ)| exceeds 3.09 σ in 0.2 % of cases, and 1.28 σ in 20 %."""
    calibration = Calibration()
    calibration.observe(BF16, noisy(0.05, 400))
    found = calibration.tolerance(BF16)
    assert found.logprob == pytest.approx(1.5 * 3.09 * 0.05, rel=0.1)
    assert found.typical == pytest.approx(1.5 * 1.28 * 0.05, rel=0.05)
    assert found.draw_gap >= 2 * found.logprob


def test_a_tolerance_stays_within_ten_times_the_default_whatever_is_observed():
    for sigma in (1e-9, 1e3):
        calibration = Calibration()
        calibration.observe(BF16, noisy(sigma, 400))
        ratio = calibration.tolerance(BF16).logprob / DEFAULTS["bfloat16"].logprob
        assert ratio == pytest.approx(0.1 if sigma < 1 else 10)


def test_a_few_wild_tokens_of_a_trusted_worker_do_not_widen_the_tolerance():
    calm, shaken = Calibration(), Calibration()
    calm.observe(BF16, noisy(0.05, 400))
    shaken.observe(BF16, [*noisy(0.05, 400), made([30.0] * 5, [30.0] * 5)])
    assert shaken.tolerance(BF16).logprob < 1.1 * calm.tolerance(BF16).logprob


@pytest.mark.parametrize(("sigma", "is_admitted"), [(0.02, True), (0.05, True), (0.3, False), (1.0, False)])
def test_a_class_that_samples_from_another_policy_is_refused(sigma, is_admitted):
    """Logprobs off by N(0, σ): the mismatch KL is σ²/2 to first order; allowed is 0.01, which is σ = 0.14."""
    calibration = Calibration()
    calibration.observe(BF16, noisy(sigma, 400))
    assert calibration.mismatch_kl(BF16) == pytest.approx(sigma**2 / 2, rel=0.35)
    assert (calibration.refusal(BF16) is None) is is_admitted
    if not is_admitted:
        assert "embedded in bfloat16 on a processor are not admitted" in calibration.refusal(BF16)


def test_no_class_is_refused_on_a_handful_of_tokens():
    calibration = Calibration()
    calibration.observe(BF16, noisy(1.0, 10))
    assert calibration.refusal(BF16) is None


def _rounded(model):
    found = near(model, 0.0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return found


# ---- engines with noise of their own ---------------------------------------------------------------------------------


VLLM = WorkerClass("a processor", "float32", "vllm")


def test_of_an_engine_with_its_own_noise_logprobs_alone_are_judged():
    """An honest one: the right weights, drawn with noise that only it knows. A dishonest one: other weights."""
    given = [lease(i, sample_index=1) for i in range(12)]
    copies = [submitted(g, a) for g, a in zip(given, honest()[1], strict=True)]
    scores = [rescored(g, c) for g, c in zip(given, copies, strict=True)]
    tolerance = Calibration().tolerance(VLLM)
    assert {judge([one], tolerance).outcome for one in scores} == {CheckOutcome.HONEST}
    embedded = Calibration().tolerance(WorkerClass("a processor", "float32", "embedded"))
    assert {judge([one], embedded).test for one in scores} == {"draw"}
    others = grow(engine(near(policy(), 0.02)), given)
    assert {judge([rescored(g, a)], tolerance).test for g, a in zip(given, others, strict=True)} == {"logprob"}


def test_a_wrong_mask_of_an_engine_with_its_own_noise_is_named_however_far_its_draws_are():
    forged = dataclasses.replace(made([0.0] * 3, [9.0] * 3), mask_gaps=(0.0, 3.0, 0.0))
    found = judge([forged], Calibration().tolerance(VLLM))
    assert "is 3 nats away from the sampling mask of top-k and top-p" in found.reason


def test_greedy_tokens_must_be_the_likeliest_whatever_the_noise():
    tolerance = Calibration().tolerance(VLLM)
    forged = made([0.0] * 3, [0.0, 3.0, 0.0], temperature=0.0)
    assert judge([forged], tolerance).test == "draw"
    assert judge([made([0.0] * 3, [0.0, 3.0, 0.0])], tolerance).outcome is CheckOutcome.HONEST


def test_a_token_that_hardly_ever_comes_convicts_whoever_drew_it():
    forged = made([0.0] * 3, [3.0, 3.0, 3.0], [1.0, 1e-12, 1.0])
    assert judge([forged], Calibration().tolerance(VLLM)).test == "unlikely"


def test_the_draws_of_trusted_workers_with_their_own_noise_widen_nothing():
    """Their gaps are as large as chance makes them; another class's would be widened by them, theirs is not kept."""
    calibration = Calibration()
    calibration.observe(VLLM, [made([1e-5] * 40, [9.0] * 40) for _ in range(200)])
    assert calibration.tolerance(VLLM).draw_gap < 1e-3


def test_strangers_with_draws_that_cannot_be_checked_are_taken_where_the_recipe_names_their_kind():
    assert unseen_draws(WorkerClass("c", "float32", "embedded"), "embedded") is None
    assert unseen_draws(WorkerClass("c", "float32", "embedded"), "vllm") is None
    assert unseen_draws(VLLM, "vllm") is None
    assert "the draws of the engine vllm cannot be checked" in unseen_draws(VLLM, "embedded")
