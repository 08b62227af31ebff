"""Random schedules of arrivals, aborts, crashes, versions and filters against the laws of the scheduler.

CI draws a fixed few; `BATON_SCHEDULES=20000 pytest tests/rollout/test_scheduler_laws.py` draws as many as you like.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import World

from baton.errors import UserError
from baton.rollout.settings import RolloutSettings

SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "400"))


@st.composite
def recipes(draw: st.DrawFn) -> RolloutSettings:
    mode = draw(st.sampled_from(["sync", "partial", "async"]))
    values: dict[str, object] = {
        "mode": mode,
        "batch_groups": draw(st.integers(1, 4)),
        "group_size": draw(st.integers(1, 3)),
        "dynamic_sampling": draw(st.booleans()),
        "max_concurrency": draw(st.sampled_from([None, 1, 3, 9])),
    }
    if mode != "sync":
        values["max_staleness"] = draw(st.integers(0, 3))
        values["stale"] = draw(st.sampled_from(["mask", "drop"]))
        values["consume"] = draw(st.sampled_from(["completion", "submission", "stalest"]))
        values["max_requeues"] = draw(st.integers(0, 2))
        values["on_new_version"] = draw(st.sampled_from(["resume", "keep"]))
    if mode == "partial":
        values["overprovision"] = draw(st.sampled_from([1.0, 1.25, 2.0, 3.0, "auto", None]))
    try:
        return RolloutSettings.model_validate(values)
    except ValueError:  # refused together: let one of the two go
        return RolloutSettings.model_validate({**values, "stale": "mask"})


@settings(
    max_examples=SCHEDULES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(recipes(), st.integers(0, 2**32 - 1), st.integers(0, 150))
def test_laws_hold_at_every_event(recipe, seed, num_faulty):
    """Conservation to the token, exact batches, bounded staleness, no double training, no hang (scheduler_world.py)."""
    rng = random.Random(seed)
    rules = recipe.rules()
    world = World(
        rules,
        choose=lambda n: rng.randrange(n),
        length=lambda g, s: 1 + random.Random(f"{seed}/{g}/{s}").randrange(12),
        reward=lambda g, s: random.Random(f"r{seed}/{g}/{s}").choice([0.0, 1.0, 1.0, None]),
    )
    with suppress(*[UserError] * rules.dynamic_sampling):  # all rewards equal, for too long
        for _ in range(num_faulty):
            world.step(faults=True)
        if world.is_paused:
            while world.running:
                world.step(faults=False)
            if world.is_paused:
                world.resume()
        world.run(world.delivered + 3)
    assert all(count == 1 for count in world.finishes.values()), "no trajectory is generated twice"


def plain(mode: str = "partial", *, seed: int = 0, **values: object) -> World:
    """A world of four workers whose lengths are geometric, without faults."""
    rng = random.Random(seed)
    recipe = RolloutSettings.model_validate({"mode": mode, "batch_groups": 8, "group_size": 2, **values})
    world = World(
        recipe.rules(),
        choose=lambda n: rng.randrange(n),
        length=lambda g, s: 1 + min(60, int(random.Random(f"{seed}/{g}/{s}").expovariate(1 / 8))),
        reward=lambda g, s: float(s),
    )
    for _ in range(4):
        world.join(16)
    return world


@pytest.mark.parametrize("overprovision", [1.0, 1.5, 2.0, 3.0])
def test_little_mean_carry_age_is_overprovision_minus_one(overprovision):
    """Little's law: (overprovision − 1) × batch_groups wait, batch_groups leave each step."""
    world = plain(overprovision=overprovision, max_staleness=99)
    world.run(20)
    world.scheduler.take_step_counts()
    world.run(320)
    ages = world.scheduler.take_step_counts().ages
    assert sum(ages) / len(ages) == pytest.approx(overprovision - 1, rel=0.05, abs=0.01)


@pytest.mark.parametrize("mode", ["partial", "async"])
def test_carrying_leaves_no_lasting_length_bias(mode):
    """After the first batches, what is consumed is as long as what the source gives (±2 %)."""
    world = plain(mode, **({"overprovision": 2.0} if mode == "partial" else {}))
    world.run(420)
    consumed = [len(t) for batch in world.batch_tokens[20:] for t in batch]
    source = [world.length(g, s) for g in range(8 * 420) for s in range(2)]
    assert sum(consumed) / len(consumed) == pytest.approx(sum(source) / len(source), rel=0.02)


def test_partial_without_overprovision_is_sync():
    """α = 1 and no filter: the same batches, and nothing is ever put down."""
    partial, sync = plain(overprovision=1.0, consume="submission"), plain("sync")
    partial.run(12)
    sync.run(12)
    assert partial.batches == sync.batches == [list(range(8 * i, 8 * i + 8)) for i in range(12)]
    assert partial.scheduler.step.resumed == 0


def test_consume_in_submission_order_is_the_order_of_the_prompts():
    world = plain("async", consume="submission", max_staleness=2)
    world.run(30)
    assert [p for batch in world.batch_prompts for p in batch] == list(range(240))


def test_groups_of_the_same_tick_beyond_the_batch_are_carried_and_come_first():
    world = plain(overprovision=2.0)
    world.choose = lambda n: 0
    world.run(1)
    ready = [g.group_id for g in world.scheduler.groups() if not g.num_unscored]
    world.run(2)
    assert set(ready) <= set(world.batches[1])


def test_filtered_groups_are_replaced_one_by_one():
    """Granular refill: with a batch of 8 and every third group rejected, never more than 8 are open in sync."""
    world = plain("sync", dynamic_sampling=True)
    world.reward = lambda g, s: 1.0 if g % 3 == 0 else float(s)
    world.run(6)
    assert world.discarded["filtered"] >= 6 * 8 // 3
    assert all(g % 3 for batch in world.batches for g in batch)
    assert world.next_prompt <= 6 * 8 + world.discarded["filtered"]


def test_the_gate_admits_what_the_paper_says():
    """max_staleness 2, batch of 4: 12 groups at version 0, 32 at version 5 (AReaL's own numbers)."""
    rng = random.Random(1)
    recipe = RolloutSettings.model_validate({"mode": "async", "batch_groups": 4, "group_size": 1, "max_staleness": 2})
    world = World(recipe.rules(), lambda n: rng.randrange(n), lambda g, s: 5, lambda g, s: 0.0)
    world.join(1000)
    assert world.next_prompt == 12
    world.run(5)
    world.make_version()
    while world.served != 5:
        world.grow()
    assert world.next_prompt == 32


def test_dynamic_sampling_that_rejects_everything_stops_with_a_sentence():
    world = plain("sync", dynamic_sampling=True)
    world.reward = lambda g, s: 1.0
    with pytest.raises(UserError, match=r"rollout\.dynamic_sampling filtered 160 groups for one batch of 8"):
        world.run(1)
