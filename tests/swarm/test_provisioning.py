"""The provisioning rule with numbers worked by hand."""

from __future__ import annotations

import pytest

from baton.swarm.provisioning import Provisioning, ThroughputTracker, TrainingProgress

pytestmark = pytest.mark.timing


def test_enough_workers_by_hand():
    """κ = 2, T = 10 s, broadcast 4 s, R = 64: 128 trajectories in 16 s."""
    rule = Provisioning(2, 10.0, 4.0, 64, 16.0)
    assert rule.needed_per_s == 8.0
    assert rule.slack_s == 20.0 - 4.0 - 8.0
    assert rule.idle_share == 0.0
    assert rule.sentence() == "workers finish 16.0 trajectories/s, which is enough: the trainer needs 8.0"


def test_too_few_workers_by_hand():
    """128 trajectories at 4 a second take 32 s, with the broadcast 36 s, and training fills 20 of them."""
    rule = Provisioning(2, 10.0, 4.0, 64, 4.0)
    assert rule.slack_s == -16.0
    assert rule.idle_share == pytest.approx(16 / 36)
    assert "too few" in rule.sentence()


def test_exactly_enough_is_enough():
    rule = Provisioning(1, 10.0, 2.0, 80, 10.0)
    assert rule.needed_per_s == 10.0
    assert rule.slack_s == 0.0
    assert rule.idle_share == 0.0
    assert "is enough:" in rule.sentence()


@pytest.mark.parametrize("broadcast_s", [10.0, 12.0])
def test_where_a_version_is_on_its_way_for_longer_than_it_is_trained_no_number_of_workers_helps(broadcast_s):
    rule = Provisioning(1, 10.0, broadcast_s, 64, 1000.0)
    assert rule.needed_per_s is None
    assert "no number of workers keeps the trainer busy" in rule.sentence()
    assert "raise swarm.publish_every" in rule.sentence()
    assert Provisioning(2, 10.0, broadcast_s, 64, 1000.0).needed_per_s is not None, "and that is the cure"


def test_nothing_is_claimed_before_anything_is_known():
    rule = Provisioning(1, 0.0, 0.0, 64, 0.0)
    assert (rule.needed_per_s, rule.slack_s, rule.idle_share) == (None, None, None)
    assert rule.sentence().startswith("no train step has finished yet")
    assert "publish_every" not in rule.sentence()
    assert Provisioning(1, 0.0, 3.0, 64, 5.0).sentence() == rule.sentence(), "the first version is sent before a step"
    assert "no trajectory has finished yet" in Provisioning(1, 2.0, 0.0, 64, 0.0).sentence()


def test_the_pace_counts_only_the_time_in_which_there_was_something_to_do():
    pace = ThroughputTracker()
    for now_s in (10.0, 10.5, 11.0):
        pace.finish(now_s, busy_since_s=9.5)
    assert pace.per_s() == pytest.approx(3 / 1.5)
    pace.finish(100.5, busy_since_s=100.0)
    assert pace.per_s() == pytest.approx(4 / 2.0), "the pause in between is nobody's slowness"


def test_a_version_has_arrived_when_the_last_connected_worker_serves_it():
    pace = ThroughputTracker()
    pace.announced.update({3: 100.0, 4: 110.0})
    pace.serve(105.0, [3, None])
    assert pace.broadcast_s == 0.0
    pace.serve(107.0, [3, 3])
    assert pace.broadcast_s == 7.0
    pace.serve(125.0, [4, 5])
    assert pace.broadcast_s == 15.0
    pace.serve(130.0, [])
    assert pace.announced == {}


def test_a_version_that_workers_fetch_while_they_get_leases_takes_no_time_of_the_rule():
    pace = ThroughputTracker(broadcast_s=4.0)
    waits = TrainingProgress(2, 64, train_s=10.0).provisioning(pace)
    hides = TrainingProgress(2, 64, is_broadcast_hidden=True, train_s=10.0).provisioning(pace)
    assert waits.needed_per_s == pytest.approx(2 * 64 / (20.0 - 4.0))
    assert hides.needed_per_s == pytest.approx(2 * 64 / 20.0)
