"""Classes of rows with similar lengths: which are chosen, which rows move for them, and that no result changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from baton.cost.generate import scanned_tokens
from baton.rollout.engines.embedded import length_classes
from baton.rollout.engines.embedded.cache import Prefix, SlotCache
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.embedded.length_classes import LengthClasses

KV_LENGTHS = (16, 64, 128, 256)
VALUES = length_classes.CLASS_VALUES // 32
"""Values per position of a model for which one more class costs as much as 32 positions."""


def test_the_cheapest_classes_are_chosen_and_only_misplaced_rows_move() -> None:
    """Of 8 rows up to 256, 4 fit into 16: 1 × 8 × 256 = 2,048 positions, or 4 × 16 + 4 × 256 + 32 = 1,120."""
    classes = LengthClasses(KV_LENGTHS, VALUES)
    length_W = np.array([10, 200, 12, 9, 250, 240, 230, 16])
    assert classes.ranges(length_W) == []
    order = classes.order(length_W)
    assert order is not None
    assert order.tolist() == [0, 7, 2, 3, 4, 5, 6, 1]
    assert classes.ranges(length_W[order]) == [(0, 4, 16), (4, 8, 256)]
    assert classes.order(length_W[order]) is None, "they stay"


def test_three_classes_at_most() -> None:
    classes = LengthClasses(KV_LENGTHS, VALUES)
    length_W = np.repeat([5, 50, 100, 250], 16)
    assert classes.order(length_W) is None, "the rows are in order already"
    assert classes.ranges(length_W) == [(0, 32, 64), (32, 48, 128), (48, 64, 256)]


@pytest.mark.parametrize("length", [1, 64, 256])
def test_rows_of_equal_length_are_one_class(length: int) -> None:
    classes = LengthClasses(KV_LENGTHS, VALUES)
    assert classes.order(np.full(64, length)) is None
    assert classes.ends == ()


def test_rows_do_not_move_if_copying_costs_more_than_it_saves() -> None:
    """Two rows of 128 would trade places to save 128 - 64 positions per step: less in 16 steps than 2 × 130 + 2,048."""
    expensive = LengthClasses((64, 128), length_classes.CLASS_VALUES // 2048)
    assert expensive.order(np.array([100, 30])) is None
    assert LengthClasses((64, 128), VALUES).order(np.array([100, 30])) is not None


def test_classes_are_given_up_when_rows_have_grown_to_one_length() -> None:
    classes = LengthClasses(KV_LENGTHS, VALUES)
    classes.order(np.repeat([5, 250], 8))
    assert len(classes.ranges(np.repeat([5, 250], 8))) == 2
    assert classes.ranges(np.repeat([250, 250], 8)) == []
    assert classes.ranges(np.repeat([5, 250], 4)) == [], "a narrower step has the first class only"


def test_random_batches_get_a_cost_within_reach_of_the_best() -> None:
    """After `order`, a step costs at most what sorting would, plus what is not worth a copy."""
    rng = random.Random(0)
    for _ in range(50):
        classes = LengthClasses(KV_LENGTHS, VALUES)
        length_W = np.array([rng.choice((3, 20, 60, 90, 128, 129, 256)) for _ in range(32)])
        order = classes.order(length_W)
        placed = length_W if order is None else length_W[order]
        assert sorted(placed) == sorted(length_W)
        ranges = classes.ranges(placed)
        assert [r.begin for r in ranges[1:]] == [r.end for r in ranges[:-1]]
        assert all(placed[r.begin : r.end].max() <= r.kv_length for r in ranges)
        assert len(ranges) > 1
        fresh = LengthClasses(KV_LENGTHS, VALUES)
        assert fresh.order(np.sort(length_W)) is None
        best = sum((r.end - r.begin) * r.kv_length for r in fresh.ranges(np.sort(length_W)))
        assert sum((r.end - r.begin) * r.kv_length for r in ranges) == best
        padded = np.array(KV_LENGTHS)[np.searchsorted(KV_LENGTHS, np.sort(length_W))].astype(float)
        predicted = scanned_tokens(padded, np.arange(1.0, 33.0), 32.0)
        assert best + 32 * (len(ranges) - 1) == round(32 * predicted), "the cost model chooses the same classes"


def test_slots_are_reordered_by_any_permutation() -> None:
    rng = random.Random(0)
    for _ in range(20):
        cache = SlotCache(Prefix([torch.zeros(1, 2, 4)] * 2, 1), 9, 64)
        for tensor in cache.tensors:
            tensor.copy_(torch.randn(tensor.shape))
        before = [tensor.clone() for tensor in cache.tensors]
        lengths = [rng.choice((0, 1, 30, 64)) for _ in range(8)]
        order = rng.sample(range(8), 8)
        cache.reorder(order, lengths)
        for tensor, old in zip(cache.tensors, before, strict=True):
            assert torch.equal(tensor[8], old[8]), "a slot above the permutation"
            for slot, source in enumerate(order):
                assert torch.equal(tensor[slot, : lengths[source]], old[source, : lengths[source]])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.numerics
@pytest.mark.usefixtures("one_thread")
def test_classes_are_chosen_every_16_decode_steps(embedded: Callable[..., EmbeddedEngine], driver, monkeypatch) -> None:
    """Steps 0, 16 and 32 of 40, also if rows end or begin in other steps."""
    order, steps = LengthClasses.order, []

    def noted(self, length_W):
        steps.append(engine.stats.decode_steps)
        return order(self, length_W)

    monkeypatch.setattr(LengthClasses, "order", noted)
    engine = embedded()
    if engine.network.classes is None:
        pytest.skip("this CPU computes other bits in classes, so the engine does not use them")
    driver.run(engine, [driver.lease(i, [1 + i] * 5, (40, 3, 21)[i % 3]) for i in range(9)])
    assert engine.stats.decode_steps == 40
    assert steps == [0, 16, 32]


@pytest.mark.numerics
@pytest.mark.usefixtures("one_thread")
def test_a_trajectory_is_bit_equal_alone_and_among_rows_of_other_lengths_that_change_slots(
    embedded: Callable[..., EmbeddedEngine], driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long prompts alternate, and rows end at different times, so rows move between the classes."""
    monkeypatch.setattr(length_classes, "CLASS_VALUES", 64)
    ranges, used = LengthClasses.ranges, []

    def noted(self, length_W):
        found = ranges(self, length_W)
        used.append(len(found))
        return found

    monkeypatch.setattr(LengthClasses, "ranges", noted)
    rng = random.Random(3)
    leases = []
    for i in range(40):
        prompt = [rng.randrange(80) for _ in range((5, 150, 9, 420)[i % 4])]
        leases.append(driver.lease(i, prompt, 4 + i, temperature=float(i % 3 > 0), top_k=i % 2 * 5))
    settings = {"slots": 16, "max_context_tokens": 512}
    engine = embedded(**settings)
    if engine.network.classes is None:
        pytest.skip("this CPU computes other bits in classes, so the engine does not use them")
    crowd = driver.run(engine, leases)
    assert {0, 2, 3} <= set(used)
    plain = embedded(**settings)
    plain.network.classes = None
    reference = driver.run(plain, leases[::-1])
    for i, lease in enumerate(leases):
        alone = driver.run(embedded(**settings), [lease])[i] if i % 8 == 3 else crowd[i]
        assert crowd[i].token_ids == reference[i].token_ids == alone.token_ids
        assert crowd[i].behavior_logprobs == reference[i].behavior_logprobs == alone.behavior_logprobs
