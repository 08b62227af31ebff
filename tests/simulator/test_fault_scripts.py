"""Fault files: what they may say, and one sentence for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator_cases import swarm

from baton.errors import UserError
from baton.recipe.load import load_recipe
from baton.simulator.faults import FaultSettings, FaultsSettings
from baton.simulator.run import build, simulate
from baton.simulator.simulation import RunOptions
from tests.simulator.violations import simulate_checked


def read(tmp_path: Path, text: str) -> FaultsSettings:
    path = tmp_path / "faults.toml"
    path.write_text(text)
    return load_recipe(FaultsSettings, path)


def test_a_file_says_what_happens_and_the_seed_draws_the_rest(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("at_s,worker,for_s\n30,w1,60\n45,w2,0\n")
    found = read(
        tmp_path,
        f"""
        [[fault]]
        kind = "slow"
        at_s = 50
        worker = "w0"
        factor = 3
        [random]
        faults = 4
        until_s = 20
        kinds = ["hang"]
        [spot]
        trace = "{tmp_path / "spot.csv"}"
        """,
    )
    schedule = found.schedule(7)
    assert schedule == found.schedule(7)
    assert schedule != found.schedule(8)
    assert [fault.at_s for fault in schedule] == sorted(fault.at_s for fault in schedule)
    assert [fault.kind for fault in schedule] == ["hang"] * 4 + ["crash", "crash", "slow"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[fault]]\nkind = "earthquake"\nat_s = 1', "fault.0.kind"),
        ('[[fault]]\nkind = "crash"', "at_s"),
        ('[[fault]]\nkind = "crash"\nat_s = -1', "greater than or equal to 0"),
        ('[[fault]]\nkind = "crash"\nat_s = inf', "finite"),
        ('[[fault]]\nkind = "slow"\nat_s = 1', "needs a factor above 1"),
        ('[[fault]]\nkind = "storm"\nat_s = 1\nfor_s = 2', "at least one of loss"),
        ('[[fault]]\nkind = "hang"\nat_s = 1', "needs a duration"),
        ('[[fault]]\nkind = "crash"\nat_s = 1\nwhen = 2', "when"),
        ("[random]\nfaults = 1\nuntil_s = 9\nkinds = []", "random.kinds"),
        ("[random]\nfaults = 1\nuntil_s = inf", "finite"),
        ("[[fault]\nkind", "is not valid TOML"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "got columns none; a trace needs at_s"),
        ("time,worker\n1,w1", "got columns time, worker; a trace needs at_s"),
        ("at_s,worker\nsoon,w1", "line 2"),
        ("worker,at_s\nw1", "line 2"),
        ("at_s,worker\nnan,w1", "line 2"),
        ("at_s,worker\n1,é", "not a CSV file in UTF-8"),
        pytest.param("at_s,worker\n1," + "w" * 200_000, "not a CSV file in UTF-8", id="a field beyond csv's limit"),
    ],
)
def test_a_trace_that_is_none_is_named(tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "spot.csv").write_text(rows, encoding="latin-1")
    found = read(tmp_path, f'[spot]\ntrace = "{tmp_path / "spot.csv"}"')
    with pytest.raises(UserError, match=said):
        found.schedule(0)


def test_with_notice_a_replacement_still_starts_for_s_after_the_preemption(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text("at_s,worker,for_s\n100,w1,60\n10,w1,5\n50,w2,0\n")
    schedule = read(tmp_path, f'[spot]\ntrace = "{tmp_path / "spot.csv"}"\nnotice_s = 30').schedule(0)
    starts = [(fault.kind, fault.at_s, fault.at_s + fault.for_s) for fault in schedule if fault.for_s]
    assert starts == [("leave", 0, 15), ("leave", 70, 160)]
    assert [fault.at_s for fault in schedule if not fault.for_s] == [20]
    (tmp_path / "spot.csv").write_text("at_s,worker,for_s\n100,w1,-5\n")
    with pytest.raises(UserError, match="line 2: at_s and for_s are seconds"):
        read(tmp_path, f'[spot]\ntrace = "{tmp_path / "spot.csv"}"\nnotice_s = 30').schedule(0)


def test_an_unknown_worker_is_named() -> None:
    with pytest.raises(UserError, match="'w9', allowed are w0, w1, w2"):
        build(swarm(), RunOptions(faults=[FaultSettings(kind="crash", at_s=1.0, worker="w9")]))


def test_engine_processes_die_with_their_run() -> None:
    with pytest.raises(UserError, match=r"swarm\.workers"):
        build(swarm(swarm=None), RunOptions(faults=[FaultSettings(kind="crash", at_s=1.0)]))


def test_a_dead_worker_costs_what_it_had_not_reported() -> None:
    """It reports every second: of a slot that makes a token in 20 ms and a bit, at most 50 tokens are unreported."""
    quiet = simulate(swarm("async"), RunOptions(0))
    record = simulate(swarm("async"), RunOptions(0, [FaultSettings(kind="crash", at_s=5.3, worker="w1", for_s=3.0)]))
    assert 0 < record.unreported <= 4 * 50
    assert record.outcomes["fault: crash"] == 1
    assert len(record.steps) == len(quiet.steps)
    assert record.trained + record.masked == quiet.trained + quiet.masked


def test_a_controller_that_dies_goes_back_to_its_checkpoint_and_trains_nothing_twice() -> None:
    quiet = simulate(swarm("partial"), RunOptions(0))
    record = simulate_checked(swarm("partial"), RunOptions(0, [FaultSettings(kind="restart", at_s=20.0, for_s=5.0)]))
    assert record.outcomes["controller restarted"] == 1
    assert record.seconds > quiet.seconds + 5.0
    assert len(record.steps) == 7, "without the interrupted one, whose batch is trained again"
