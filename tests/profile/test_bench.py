"""The bench of modes: scripted lengths are as asked for, ratios are right where they can be worked out by hand."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.errors import UserError
from baton.profile.bench import (
    CONTROL,
    FlatTransport,
    ModeBench,
    NumberedPrompts,
    ScriptedLengths,
    bench_flat,
    measure,
    sides_of,
)
from baton.profile.engine_alone import EngineAlone
from baton.rollout.engine import EngineSettings
from baton.rollout.engines.fake import FakeEngine
from baton.rollout.settings import RolloutSettings
from baton.types import PolicyVersion

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.parametrize(("between", "within"), [(0.6, 0.6), (0.0, 1.0), (1.0, 0.0)])
def test_lengths_have_the_mean_and_the_spreads_that_were_asked_for(between, within):
    lengths = ScriptedLengths(100, 1600, between, within)
    drawn = [[lengths.length(g, s) for s in range(8)] for g in range(400)]
    assert statistics.fmean(n for group in drawn for n in group) == pytest.approx(100, rel=0.1)
    assert max(n for group in drawn for n in group) <= 1600
    groups = [statistics.fmean(group) for group in drawn]
    if not between:
        assert statistics.stdev(groups) < 0.7 * statistics.fmean(groups)
    if not within:
        assert all(len(set(group)) == 1 for group in drawn)


def test_with_equal_lengths_no_mode_gains_over_concurrency():
    """All lengths 10, every trajectory with a slot: sync takes 10 steps a batch, whatever the mode carries."""
    sides = sides_of(RolloutSettings(batch_groups=4, group_size=2), ["sync", "partial"])
    result = bench_flat(sides, ScriptedLengths(10, 10, 0.0, 0.0), steps=8)
    by_name = {mode.mode: mode for mode in result.modes}
    assert by_name["sync"].tokens_per_s == 8.0
    assert by_name["partial"].tokens_per_s == pytest.approx(16.0, rel=0.1)
    assert by_name[CONTROL].tokens_per_s == 16.0
    assert by_name["partial"].over_control == pytest.approx(1.0, rel=0.1)


def test_where_step_time_is_flat_a_long_tail_gives_partial_and_async_twice_of_sync():
    sides = sides_of(RolloutSettings(batch_groups=16, group_size=4), ["sync", "partial", "async"])
    result = bench_flat(sides, ScriptedLengths(20, 120, 0.6, 0.6), steps=16)
    by_name = {mode.mode: mode for mode in result.modes}
    assert by_name["partial"].over_sync >= 2.0
    assert by_name["partial"].over_control > 1.0
    assert by_name["async"].of_bound >= 0.9
    assert by_name["sync"].of_bound == pytest.approx(1 / result.bound_over_sync)


def test_the_bound_prices_each_token_by_its_position():
    """All lengths 9 after a prompt of one token: a token attends to 1 to 9 positions, 5 on average, so its step takes
    1 + 0.2 × 5 = 2 of the clock's units, where every step of the mode takes 1."""
    sides = sides_of(RolloutSettings(batch_groups=4, group_size=2), ["sync"])
    engine = EngineSettings(slots=8, max_context_tokens=18)
    lengths = ScriptedLengths(9.5, 10, 0.0, 0.0)
    assert lengths.length(0, 0) == 9
    port = FlatTransport(FakeEngine(engine, PolicyVersion("flat", 0), lambda g, s: 10**9), lengths)
    side = ModeBench("sync", sides["sync"], port, NumberedPrompts(), {})
    result = measure([side], lengths, "steps", 4, full_steps=lambda: [(0, 1.0), (5, 2.0), (10, 3.0)])
    assert result.full_step_ms == pytest.approx(2000)
    assert result.full_step_ms_per_1k == pytest.approx(200_000)
    assert result.modes[0].of_bound == pytest.approx(2.0)


def test_the_bound_is_the_time_of_an_engine_whose_queue_is_never_empty():
    """All lengths 9, 8 slots: the engine alone generates 8 tokens per step. Sync has 4 trajectories a batch, so half of
    its slots are free, and every step of both takes one unit of the clock."""
    sides = sides_of(RolloutSettings(batch_groups=2, group_size=2), ["sync"])
    settings, lengths = EngineSettings(slots=8, max_context_tokens=18), ScriptedLengths(9.5, 10, 0.0, 0.0)

    def engine() -> FakeEngine:
        return FakeEngine(settings, PolicyVersion("flat", 0), lambda g, s: 10**9)

    side = ModeBench("sync", sides["sync"], FlatTransport(engine(), lengths), NumberedPrompts(), {})
    own = engine()
    alone = EngineAlone(own, lengths.length, NumberedPrompts(), 2, lambda: float(own.stats.decode_steps))
    result = measure([side], lengths, "steps", 4, alone=alone)
    assert alone.work.tokens >= 4 * 36
    assert alone.seconds == pytest.approx(alone.work.tokens / 8, abs=9)
    assert result.modes[0].of_bound == pytest.approx(0.5, abs=0.05)
    assert result.bound_over_sync == pytest.approx(2.0, abs=0.2)


def test_the_recipe_s_own_settings_are_used_for_its_mode_and_defaults_for_the_others():
    sides = sides_of(RolloutSettings(mode="partial", overprovision=3.0, batch_groups=4), ["sync", "partial"])
    assert sides["partial"].overprovision == 3.0
    assert sides[CONTROL].batch_groups == 12
    assert sides["sync"].mode == "sync"
    with pytest.raises(UserError, match="--modes: got fast, allowed are sync, partial, async"):
        sides_of(RolloutSettings(), ["fast"])


def test_on_the_real_engine_every_mode_gives_its_numbers_as_json(monkeypatch):
    monkeypatch.chdir(RECIPE.parents[1])
    small = ["rollout.batch_groups=2", "rollout.group_size=4", "rollout.max_new_tokens=48", "engine.slots=16"]
    words = ["bench", "rollout", str(RECIPE), "--steps", "2", "--tail", "3", "--json", *small]
    done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    found = json.loads(done.stdout)
    assert [mode["mode"] for mode in found["modes"]] == ["sync", "partial", "async", CONTROL]
    assert found["clock"] == "processor"
    assert found["full_step_ms"] > 0
    for mode in found["modes"]:
        assert mode["tokens"] > 0
        assert 0 < mode["of_bound"] < 1.5
        assert 0 < mode["of_step_bound"] < 1.5
        assert len(mode["rounds_tokens_per_s"]) == 2
    plain = CliRunner().invoke(cli.app, [w for w in words if w != "--json"], env={"COLUMNS": "80"}).stdout
    assert "full step" in plain
    assert "ms of prefill per token" in plain
    assert "simulated" not in plain


def test_the_table_keeps_its_columns_at_80_characters_and_says_what_is_simulated(monkeypatch):
    monkeypatch.chdir(RECIPE.parents[1])
    words = ["bench", "rollout", str(RECIPE), "--flat", "--steps", "2", "rollout.batch_groups=2"]
    lines = CliRunner().invoke(cli.app, words, env={"COLUMNS": "80"}, catch_exceptions=False).stdout.splitlines()
    assert lines[0].startswith("simulated, without a model")
    rows = {line.split()[0]: line.split() for line in lines[1:] if line.strip()}
    assert all(len(rows[mode]) == 6 for mode in ("sync", "partial", "async", CONTROL))
    assert all(len(line) <= 80 for line in lines if line.split()[:1] in ([mode] for mode in rows) and "%" in line)
    rate, of_ideal = float(rows["sync"][1]), float(rows["sync"][4].rstrip("%")) / 100
    assert float(rows["ideal"][1]) == pytest.approx(rate / of_ideal, rel=0.1)  # the printed numbers are rounded
