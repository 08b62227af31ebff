"""`baton simulate`: plans and recipes, sweeps, and one sentence for each mistake."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.errors import UserError
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan
from baton.rollout.settings import RolloutSettings
from baton.simulate import progress
from baton.simulate import simulate as run_simulation
from baton.simulator.input_sources import PlanSource, RecipeSource, SimulationOptions, rollout_settings
from baton.simulator.parameter_sweep import SweepPoint, read_axes, recommend
from baton.simulator.result import summarise
from baton.simulator.run import simulate
from baton.simulator.scripted_trajectories import ScriptedGroup
from baton.simulator.simulation import RunOptions
from baton.specs.cluster import ClusterSettings
from baton.specs.model import model_spec
from baton.specs.plan import write_plan
from baton.specs.workload import Workload, WorkloadSettings
from tests.simulator.simulator_cases import setting

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.toml"
CALIBRATION = ROOT / "benchmarks" / "prediction" / "results" / "calibration.toml"
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}


def small_work(**changes: object) -> Workload:
    base = {
        "groups": 32,
        "group_size": 8,
        "max_staleness": 4,
        "prompt_tokens": {"mean": 128},
        "output_tokens": {"kind": "lognormal", "mean": 600, "cv": 0.8, "max": 3000},
        "engine": {"max_batch": 64},
    }
    return WorkloadSettings.model_validate({**base, **changes}).build()


@pytest.fixture(scope="module")
def planned() -> PlanSource:
    of = ClusterSettings.model_validate(
        {
            "name": "small",
            "links": {"inter_node_gb_per_s": 400},
            "nodes": [{"gpu": "H100", "gpus": 4}, {"gpu": "L40S", "gpus": 8}],
        }
    ).build()
    spec, work = model_spec(MODEL, "1b"), small_work(max_staleness=8)
    return PlanSource(make_plan(Inputs(of, spec, work), "exact", time_limit_s=20.0), spec, work, cluster=of)


def call(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_plan_comes_true_when_it_is_simulated(planned: PlanSource) -> None:
    """The same costs, by another way: within a tenth of what the planner says, without its exposed publication."""
    of = planned.setting(SimulationOptions(steps=40))
    result = summarise(of, simulate(of, RunOptions(0)))
    plan = planned.plan
    assert plan.breakdown.overlaps
    expected_s = plan.breakdown.step_s - plan.breakdown.sync_s
    assert result.step_s == pytest.approx(expected_s, rel=0.1)
    beyond = sum(share for lag, share in result.staleness.items() if lag > plan.max_staleness)
    assert beyond == pytest.approx(result.masked_share), "what is too old is masked, and nothing else"
    assert sum(engine.num for engine in result.engines) == len(plan.replicas)
    assert result.price == pytest.approx(plan.price_per_h / 3600 * result.seconds)


def test_the_overhead_of_a_cycle_is_simulated_as_it_is_planned(planned: PlanSource) -> None:
    """The trainer waits for it in every step; publication, in contrast, is hidden."""
    times = planned.plan.breakdown
    longer = msgspec.structs.replace(
        times, step_s=times.step_s + 20, sync_s=times.sync_s + 20, cycle_overhead_s=times.cycle_overhead_s + 20
    )
    of = replace(planned, plan=msgspec.structs.replace(planned.plan, breakdown=longer))
    setting = of.setting(SimulationOptions(steps=20))
    expected_s = longer.step_s - (longer.sync_s - longer.cycle_overhead_s)
    assert summarise(setting, simulate(setting)).step_s == pytest.approx(expected_s, rel=0.1)


def test_responses_end_at_the_limit_of_the_simulated_recipe_or_plan(planned: PlanSource) -> None:
    """Otherwise, all values of `--sweep max_new_tokens=…` would have the same result."""
    recorded = (ScriptedGroup(3, (5, 40), teaches=True),)
    options = SimulationOptions(["max_new_tokens=20"], recorded=recorded)
    for source in (planned, RecipeSource(RECIPE, work=planned.work)):
        work = source.setting(options).work
        assert work.output.longest == 20
        assert work.recorded == (ScriptedGroup(3, [5, 20], teaches=True),)


def test_a_plan_is_read_with_its_model_and_workload(planned: PlanSource, tmp_path: Path) -> None:
    write_plan(planned.plan, tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "work.toml").write_text(
        "groups = 32\ngroup_size = 8\nmax_staleness = 4\n[prompt_tokens]\nmean = 128\n"
        '[output_tokens]\nkind = "lognormal"\n'
        "mean = 600\ncv = 0.8\nmax = 3000\n[engine]\nmax_batch = 64\n"
    )
    given = ["--plan", tmp_path / "plan.json", "--model", tmp_path, "--workload", tmp_path / "work.toml"]
    found = json.loads(call(*given, "--steps", 6, "--json", "rollout.max_staleness=2"))
    assert found["steps"] == 6
    beyond = sum(share for lag, share in found["staleness"].items() if int(lag) > 2)
    assert beyond == pytest.approx(found["masked_share"])
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 8}))
    with pytest.raises(UserError, match="was made for another run: --model: got"):
        call(*given)
    with pytest.raises(UserError, match="needs --model and --workload"):
        call("--plan", tmp_path / "plan.json")


def test_a_recipe_is_simulated_as_it_would_run(tmp_path: Path) -> None:
    said = call("--recipe", RECIPE, "--calibration", CALIBRATION, "--steps", 5, "--log", tmp_path / "log")
    assert "5 train steps" in said
    assert "2 × engine process" in said
    assert "lengths are assumed" in said
    again = call("--recipe", RECIPE, "--calibration", CALIBRATION, "--steps", 5, "--log", tmp_path / "again")
    assert said.replace("/log", "/again") == again
    assert (tmp_path / "log").read_bytes() == (tmp_path / "again").read_bytes()


def test_a_run_too_short_for_a_steady_state_says_so() -> None:
    def said(steps: int) -> str:
        return " ".join(call("--recipe", RECIPE, "--steps", steps, "rollout.mode=partial").split())

    assert "6 train steps are too few for steady-state figures, because the first 2 fill the pipeline" in said(6)
    assert "use --steps 7 or more" in said(6)
    assert "too few" not in said(7)


def test_a_trace_and_a_page_show_who_generated_what(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "report.html"
    call("--recipe", RECIPE, "--steps", 3, "--trace", trace, "--html", page, "rollout.mode=partial")
    names = {event["name"] for event in json.loads(trace.read_bytes())["traceEvents"]}
    assert names >= {"generate", "prefill", "train", "publish", "wait_for_batch"}
    assert page.read_text().count("<svg") >= 3
    assert "every generated token was trained" in page.read_text(), "an empty chart says nothing"
    assert "<script" not in page.read_text()


def test_faults_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "crash"\nat_s = 3\nworker = "worker 1"\nfor_s = 5\n')
    found = json.loads(
        call(
            "--recipe",
            RECIPE,
            "--steps",
            5,
            "--faults",
            tmp_path / "faults.toml",
            "--json",
            "swarm.workers=2",
        )
    )
    assert found["outcomes"]["fault: crash"] == 1
    assert found["steps"] == 5


def test_a_long_simulation_reports_its_steps() -> None:
    left, said = iter([5.0, 0.0, -1.0]), list[str]()
    on_step = progress(said.append, lambda seconds: lambda: next(left))
    chosen = setting("sync")
    simulate(replace(chosen, num_steps=3), RunOptions(on_step=on_step))
    assert said == ["simulated 2 of 3 train steps", "simulated 3 of 3 train steps"]


def test_a_sweep_gives_a_table_a_page_and_what_to_take(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    axes = ["--sweep", "overprovision=1,2", "--sweep", "max_staleness=0,4"]
    found = json.loads(call("--recipe", RECIPE, "--steps", 8, *axes, "--html", page, "--json"))
    assert len(found["points"]) == 4
    assert found["points"][found["recommended"]]["result"]["masked_share"] <= 0.1
    assert {point["result"]["mode"] for point in found["points"]} == {"partial"}
    assert page.read_text().count("<svg") == 4
    assert "recommended" in page.read_text()
    assert "<script" not in page.read_text()


def test_settings_that_do_not_go_together_are_said_in_the_table() -> None:
    said = call("--recipe", RECIPE, "--steps", 3, "--sweep", "max_staleness=0,4")
    assert 'max_staleness: got 4, but mode = "sync" allows only 0' in said
    assert "recommended: rollout.max_staleness=0" in said


def test_a_sweep_without_a_result_fails() -> None:
    done = CliRunner().invoke(app, ["simulate", "--recipe", str(RECIPE), "--sweep", "max_staleness=3,4"])
    assert done.exit_code == 1
    assert "max_staleness: got 3" in done.output
    with pytest.raises(UserError, match="no combination of values can be simulated: there is no recipe"):
        call("--recipe", "nowhere.toml", "--sweep", "max_staleness=0,4")


@pytest.mark.parametrize("changes", [{"swarm.workers": 2, "swarm.max_lag": None}, {"swarm": {"workers": 2}}])
def test_keys_of_a_simulated_recipe_are_changed_as_for_a_run(changes: dict[str, object]) -> None:
    assert run_simulation(RECIPE, changes, steps=2) == run_simulation(RECIPE, ["swarm.workers=2"], steps=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": 0}, "--steps: got 0"),
        ({"steps": -3}, "--steps: got -3"),
        ({"seed": -1}, "--seed: got -1"),
        ({"correlation": 2.0}, "--correlation: got 2.0"),
        ({"correlation": math.nan}, "--correlation: got nan"),
        ({"drift": math.nan}, "--drift: got nan"),
        ({"drift": math.inf}, "--drift: got inf"),
        ({"judge_cv": math.inf}, "--judge-cv: got inf"),
    ],
)
def test_a_wrong_number_is_one_sentence(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_simulation(RECIPE, **given)


def test_the_freshest_of_the_fastest_is_recommended() -> None:
    of = setting(steps=4)
    run_ = summarise(of, simulate(of))

    def point(tokens_per_s: float, staleness: float, masked: float = 0.0) -> SweepPoint:
        changed = {"trained_tokens_per_s": tokens_per_s, "mean_staleness": staleness, "masked_share": masked}
        return SweepPoint({}, msgspec.structs.replace(run_, **changed))

    points = [point(100, 0), point(199, 1), point(200, 4), point(300, 9, masked=0.3), SweepPoint({}, None, "no")]
    assert recommend(points)[0] == 1
    assert recommend([points[3], points[4]])[0] == 0
    assert recommend([points[4]]) == (None, "no combination of values can be simulated")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (["max_stalenes=1"], "unknown key"),
        (["max_staleness"], "allowed is key=value"),
        (["max_staleness="], "allowed is key=value"),
        (["max_staleness=0,1", "rollout.max_staleness=2"], "got max_staleness twice"),
        (["max_staleness=" + ",".join(map(str, range(401)))], "at most 400"),
    ],
)
def test_a_bad_sweep_is_one_sentence(axes: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_axes(axes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give exactly one of --plan"),
        (["--plan", "a", "--recipe", "b"], "give exactly one of --plan"),
        (["--plan", "nowhere.json"], "there is no plan"),
        (["--recipe", "nowhere.toml"], "there is no recipe"),
        (["--recipe", RECIPE, "--calibration", "nowhere.toml"], "nowhere.toml"),
        (["--recipe", RECIPE, "rollout.mod=1"], "rollout.mod"),
        (["--recipe", RECIPE, "--drift", "nan"], "--drift: got nan"),
        (["--recipe", RECIPE, "--faults", "nowhere.toml"], "there is no file nowhere.toml"),
        (["--recipe", RECIPE, "--model", "nowhere"], "--model and --cluster apply to --plan"),
        (["--recipe", RECIPE, "--cluster", "nowhere.toml"], "--model and --cluster apply to --plan"),
        (["--recipe", RECIPE, "--html", "/no/such/place.html"], "cannot write /no/such/place.html"),
        (["--recipe", RECIPE, "--trace", "/no/such/trace.json"], "cannot write /no/such/trace.json"),
        (["--recipe", RECIPE, "--log", "/no/such/log"], "cannot write /no/such/log"),
        (["--recipe", RECIPE, "--sweep", "max_staleness=0,4", "--log", "log"], "--sweep writes neither --log nor"),
        (["--recipe", RECIPE, "--sweep", "max_staleness=0,4", "--trace", "t"], "--sweep writes neither --log nor"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[object], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_overrides_of_a_plan_are_those_of_rollout() -> None:
    base = {"mode": "async", "batch_groups": 4, "group_size": 2, "max_staleness": 8, "on_new_version": "keep"}
    assert rollout_settings(base, ["rollout.max_staleness=2"]).max_staleness == 2
    partial = rollout_settings(base, ["mode=partial", "rollout.overprovision=1.5"])
    assert partial == RolloutSettings(mode="partial", batch_groups=4, group_size=2, overprovision=1.5)
    with pytest.raises(UserError, match=r"rollout\.max_stalenes; did you mean .max_staleness"):
        rollout_settings(base, ["rollout.max_stalenes=2"])
    with pytest.raises(UserError, match="partial"):
        rollout_settings(base, ["rollout.overprovision=2"])
