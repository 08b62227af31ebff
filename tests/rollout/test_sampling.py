"""Draws follow the probabilities, never leave the support, and depend on nothing but their key and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.rollout.engines import sampling
from baton.rollout.engines.sampling import mix, noise_key, pick, row_params, sample, uniforms
from baton.types import SamplingParams

pytestmark = pytest.mark.numerics

CPU = torch.device("cpu")


def draw(logits_V, params: SamplingParams, uniform):
    """Sample one token for each of the given uniform draws from the same logits."""
    uniform = np.asarray(uniform, dtype=np.float64)
    logits_WV = torch.tensor(logits_V, dtype=torch.float32).expand(len(uniform), -1)
    rows = row_params([params] * len(uniform), logits_WV.shape[1], CPU)
    return sample(logits_WV, rows, uniform)


def support(probabilities, **sampling) -> set[int]:
    ids, *_ = draw(np.log(probabilities), SamplingParams(1, **sampling), np.linspace(0, 1 - 2**-53, 2000))
    return set(ids.tolist())


def test_the_hash_is_splitmix64():
    """The generator's published first output for seed 0 is the finaliser of its increment."""
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_noise_is_a_pure_function_of_its_four_coordinates():
    def noise(seed=1, group=2, index=3, position=4):
        return float(uniforms(np.array([noise_key(seed, group, index)], dtype=np.uint64), np.array([position]))[0])

    assert noise() == noise()
    assert len({noise(), noise(seed=2), noise(group=3), noise(index=4), noise(position=5)}) == 5
    assert noise(group=3, index=2) != noise(), "coordinates must not be interchangeable"
    keys = np.array([noise_key(1, 2, 3), noise_key(9, 9, 9)], dtype=np.uint64)
    assert uniforms(keys, np.array([4, 7]))[0] == noise(), "a row's noise must not depend on its neighbours"


def test_noise_is_uniform_over_positions_samples_and_groups():
    """Of 20000 draws in 20 bins each holds 1000 ± 31 (one σ); neighbours are uncorrelated: |r| < 4/√20000."""
    position = np.arange(20_000)
    streams = [
        uniforms(np.full(20_000, noise_key(7, 1, 0), dtype=np.uint64), position),
        uniforms(np.array([noise_key(7, 1, i) for i in range(20_000)], dtype=np.uint64), np.zeros(20_000, dtype=int)),
        uniforms(np.array([noise_key(7, g, 0) for g in range(20_000)], dtype=np.uint64), np.zeros(20_000, dtype=int)),
    ]
    for stream in streams:
        assert stream.min() >= 0
        assert stream.max() < 1
        counts = np.histogram(stream, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8, "χ² of 19 degrees exceeds its 99.9 % point"
        assert abs(np.corrcoef(stream[1:], stream[:-1])[0, 1]) < 4 / np.sqrt(20_000)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),  # p² / Σp²
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.8}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),  # of the three, 0.44 + 0.33 ≥ 0.7
    ],
)
def test_draws_follow_the_exact_probabilities(sampling, expected):
    """20000 draws against worked probabilities, χ² at its 99.9 % point for 3 degrees."""
    u = uniforms(np.full(20_000, noise_key(5, 0, 0), dtype=np.uint64), np.arange(20_000))
    ids, *_ = draw(np.log([0.4, 0.3, 0.2, 0.1]), SamplingParams(1, **sampling), u)
    counts, wanted = np.bincount(ids.numpy(), minlength=4), 20_000 * np.array(expected)
    assert not counts[wanted == 0].any()
    possible = wanted > 0
    assert ((counts - wanted)[possible] ** 2 / wanted[possible]).sum() < 16.3


def test_top_p_keeps_the_smallest_set_that_holds_the_share():
    """Running sums 0.5, 0.8, 0.95, 1: a share of 0.79 needs two tokens, 0.81 three, and the likeliest always stays."""
    probabilities = [0.05, 0.5, 0.15, 0.3]
    assert support(probabilities, top_p=0.79) == {1, 3}
    assert support(probabilities, top_p=0.81) == {1, 2, 3}
    assert support(probabilities, top_p=0.0) == {1}
    assert support(probabilities, top_p=1.0) == {0, 1, 2, 3}


def test_top_k_keeps_exactly_k_and_among_equals_the_lower_id():
    assert support([0.25, 0.25, 0.25, 0.25], top_k=2) == {0, 1}
    assert support([0.1, 0.2, 0.3, 0.4], top_k=1) == {3}
    assert support([0.1, 0.2, 0.3, 0.4], top_k=99) == {0, 1, 2, 3}


def test_the_extreme_draws_stay_within_the_support():
    """Ids 0, 2 and 4 are impossible: neither the draw 0 nor the largest below 1 may pick them or run off the end."""
    logits = [-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")]
    ids, logprobs, masks = draw(logits, SamplingParams(1), [0.0, 0.5 - 2**-40, 0.5, 1 - 2**-53])
    assert ids.tolist() == [1, 1, 3, 3]
    assert logprobs.tolist() == pytest.approx([np.log(0.5)] * 4)
    assert masks is None


@pytest.mark.parametrize("total", [1 << 50, (1 << 50) + 1, (1 << 51) - 1, (1 << 50) - 1, 7])
def test_the_largest_draw_stays_below_any_total(total):
    """Ids 2 and 3 have no mass; a product that rounded up to the total would pick one of them."""
    mass_WV = torch.tensor([[total - 1, 1, 0, 0]])
    assert pick(mass_WV, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 1


def test_the_logprob_is_that_of_the_whole_vocabulary_at_the_temperature_before_filters():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    _, filtered, _ = draw(logits, SamplingParams(1, top_k=1), [0.5])
    _, tempered, _ = draw(logits, SamplingParams(1, temperature=0.5, top_k=1), [0.5])
    greedy_id, greedy, _ = draw(logits, SamplingParams(1, temperature=0.0), [0.99])
    assert filtered.item() == pytest.approx(np.log(0.4), abs=1e-6)
    assert tempered.item() == pytest.approx(np.log(16 / 30), abs=1e-6)
    assert greedy_id.item() == 0
    assert greedy.item() == pytest.approx(np.log(0.4), abs=1e-6)


def ids_of(mask: bytes, dtype: str = "<u2") -> list[int]:
    return np.frombuffer(mask, dtype).tolist()


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_p": 0.79, "top_k": 4}, [1, 3]),
        ({"top_p": 0.81, "top_k": 4}, [1, 2, 3]),
        ({"top_p": 0.84, "top_k": 2}, [1, 3]),  # of the two likeliest, the first has only 0.5 / 0.8
        ({"top_p": 0.62, "top_k": 2}, [1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
    ],
)
def test_a_row_reports_what_it_kept_and_its_logprob_is_over_that(changes, kept):
    probabilities = np.array([0.05, 0.5, 0.15, 0.3])
    params = SamplingParams(1, reports_kept=True, **changes)
    ids, logprobs, masks = draw(np.log(probabilities), params, np.linspace(0, 1 - 2**-53, 200))
    assert set(ids.tolist()) == set(kept)
    assert {tuple(ids_of(mask)) for mask in masks} == {tuple(kept)}
    expected = np.log(probabilities[ids] / probabilities[kept].sum())
    assert logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_likeliest_of_a_large_vocabulary_are_those_of_a_whole_sort():
    """With ties at the bound, without, and with fewer tokens of any mass than the bound; ids above 65,535."""
    generator = torch.Generator().manual_seed(0)
    size = 70_000
    logits_WV = torch.randn(4, size, generator=generator) * 3
    logits_WV[1] = logits_WV[1].round()  # many equal ones
    logits_WV[2] = 0.0
    logits_WV[3] -= 500
    logits_WV[3, 69_990:] = 0.0
    params = [SamplingParams(1, top_p=0.9, top_k=20, reports_kept=True)] * 4
    ids, logprobs, masks = sample(logits_WV, row_params(params, size, CPU), np.linspace(0.1, 0.9, 4))
    for row in range(4):
        probabilities = logits_WV[row].double().softmax(-1).numpy()
        order = np.lexsort((np.arange(size), -logits_WV[row].numpy()))[:20]
        share = np.cumsum(probabilities[order]) / probabilities[order].sum()
        kept = sorted(order[: int(np.searchsorted(share, 0.9 - 1e-9)) + 1].tolist())
        assert ids_of(masks[row], "<u4") == kept
        assert int(ids[row]) in kept
        own = np.log(probabilities[int(ids[row])] / probabilities[kept].sum())
        assert float(logprobs[row]) == pytest.approx(own, abs=1e-5)
    assert len(masks[3]) == 4 * 9  # 10 equal ones, of which 9 have the share of 0.9


def test_rows_of_mixed_parameters_equal_the_same_rows_alone():
    logits_WV = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(1),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=0.7),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, top_k=3, temperature=1.3, reports_kept=True),
    ]
    uniform = np.linspace(0.1, 0.9, 5)
    mixed = sample(logits_WV, row_params(params, 50, CPU), uniform)
    for row, p in enumerate(params):
        alone = sample(logits_WV[row : row + 1], row_params([p], 50, CPU), uniform[row : row + 1])
        assert (mixed[0][row], mixed[1][row]) == (alone[0][0], alone[1][0])
        assert mixed[2][row] == (alone[2][0] if p.reports_kept else b"")


def test_rows_that_are_sampled_in_parts_equal_the_same_rows_alone(monkeypatch):
    """Parts of two rows: without a filter, with one filtered row, with two, and the last part of one row."""
    logits_WV = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    changes = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.5},
        {"top_k": 3},
        {"top_k": 2},
        {"top_k": 4, "top_p": 0.6, "reports_kept": True},
    ]
    params = [SamplingParams(1, **change) for change in changes]
    uniform = np.linspace(0.1, 0.9, 7)
    whole = sample(logits_WV, row_params(params, 48, CPU), uniform)
    monkeypatch.setattr(sampling, "CHUNK_VALUES", 96)
    parts = sample(logits_WV, row_params(params, 48, CPU), uniform)
    assert torch.equal(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])
    assert parts[2] == whole[2]
    assert [len(mask) // 2 for mask in parts[2][:6]] == [0] * 6
    assert 1 <= len(parts[2][6]) // 2 <= 4


def test_a_last_bit_of_the_logits_hardly_ever_changes_a_draw():
    """A perturbation of 1e-6 moves boundaries by about 1e-6, so of 2000 draws over 50 ids at most a few move."""
    generator = torch.Generator().manual_seed(1)
    logits_WV = torch.randn(2000, 50, generator=generator)
    noise_WV = 1e-6 * torch.randn(2000, 50, generator=generator)
    uniform = uniforms(np.full(2000, noise_key(0, 0, 0), dtype=np.uint64), np.arange(2000))
    rows = row_params([SamplingParams(1)] * 2000, 50, CPU)
    changed = sample(logits_WV, rows, uniform)[0] != sample(logits_WV + noise_WV, rows, uniform)[0]
    assert changed.sum() <= 3


@pytest.mark.parametrize("params", [SamplingParams(1), SamplingParams(1, top_p=0.9, top_k=3, reports_kept=True)])
def test_a_row_that_is_not_finite_says_so_and_spares_the_others(params):
    logits_WV = torch.zeros(3, 4)
    logits_WV[1, 2] = float("nan")
    ids, logprobs, _ = sample(logits_WV, row_params([params] * 3, 4, CPU), np.array([0.1, 0.5, 0.9]))
    assert logprobs.isfinite().tolist() == [True, False, True]
    assert 0 <= ids[1] < 4
