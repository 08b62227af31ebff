"""`baton plan` as a user meets it: every question by its command, JSON that parses, one sentence for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from baton.cli import main as cli
from baton.errors import UserError
from baton.plan import plan as make_plan
from baton.planner.rental import OffersSettings
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.workload import read_workload
from baton.records.run_directory import without_none
from baton.specs.cluster import ClusterSettings
from baton.specs.plan import read_plan

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "planner"
MODEL = ROOT / "benchmarks" / "areal_hex" / "models" / "r1-distill-qwen-1.5b"
WORK = """
groups = 64
group_size = 8
max_staleness = 4
prompt_tokens = { mean = 200 }
output_tokens = { kind = "lognormal", mean = 1500, max = 6000 }
"""
CLUSTER = """
name = "two types"
links = { inter_node_gb_per_s = 5, cross_type_gb_per_s = 1.5 }
[[nodes]]
gpu = "H800"
gpus = 4
[[nodes]]
gpu = "H20"
gpus = 4
count = 2
"""
OFFERS = """
links = { inter_node_gb_per_s = 5 }
[[offers]]
gpu = "H20"
gpus = 2
max_nodes = 4
[[offers]]
gpu = "H100"
gpus = 2
max_nodes = 2
"""
RATES = "[rates]\nH800 = { train = 9000, rollout = 2500 }\nH20 = { train = 1000, rollout = 2400 }\n"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in (("work", WORK), ("cluster", CLUSTER), ("offers", OFFERS), ("rates", RATES)):
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def plan(files: Path, *arguments: object, cluster: bool = True) -> str:
    base: list[object] = ["plan", "--model", MODEL, "--workload", files / "work.toml", "--time-limit", 8]
    base += ["--cluster", files / "cluster.toml"] if cluster else []
    result = CliRunner().invoke(cli.app, [str(a) for a in (*base, *arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def mistake(files: Path, *arguments: object, cluster: bool = True) -> str:
    with pytest.raises(UserError) as caught:
        plan(files, *arguments, cluster=cluster)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_best_plan_in_words_and_as_json(files: Path) -> None:
    text = plan(files)
    for words in ("train ", "rollout ", "trained tokens/s", "per million trained tokens", "staleness", "limit:"):
        assert words in text
    found = json.loads(plan(files, "--json", "--out", files / "plan.json"))["plan"]
    assert read_plan(files / "plan.json").breakdown.step_s == found["breakdown"]["step_s"]
    assert found["bound"]["is_proven"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens_per_step"] / found["breakdown"]["step_s"])
    hourly = found["price_per_h"] / 3600 / found["tokens_per_s"] * 1e6
    assert found["price_per_million_tokens"] == pytest.approx(hourly)


def test_compared_with_other_ways_to_spend_the_money(files: Path) -> None:
    found = json.loads(plan(files, "--compare", "--json"))
    rows = {row["name"]: row for row in found["compare"]}
    # 4 · 3.86 + 8 · 1.35 = 26.24 an hour buys 6 H800 or 19 H20
    assert {"6 H800, same price", "19 H20, same price", "training and generation alternate on all GPUs"} <= set(rows)
    assert {more["gpu"] for more in found["one_more"]} == {"H800", "H20"}
    for name in ("the published method (equation 3)", "75 % rollout, 25 % training", "50 % rollout, 50 % training"):
        assert (
            rows[name]["tokens_per_s"] is None or rows[name]["tokens_per_s"] <= found["plan"]["tokens_per_s"] * 1.000001
        )


def test_taking_turns_uses_every_gpu_for_both(files: Path) -> None:
    found = json.loads(plan(files, "--colocated", "--json"))["plan"]
    assert found["is_colocated"]
    b = found["breakdown"]
    assert b["step_s"] == pytest.approx(b["sync_s"] + b["rollout_s"] + b["reward_s"] + b["train_s"])
    training = {gpu for stage in found["training"]["stages"] for gpu in stage["gpu_ids"]}
    engines = {gpu for replica in found["replicas"] for gpu in replica["gpu_ids"]}
    assert training & engines
    assert found["max_staleness"] == 0


def test_renting_for_a_budget_is_the_best_of_all_that_fit_it(files: Path) -> None:
    """8 an hour buys 2 H100 (5.38) and no H20 pair more (2.70), or 4 H20 pairs less (2 · 2.70): all are tried here."""
    best = json.loads(plan(files, "--offers", files / "offers.toml", "--budget", 8.2, "--json", cluster=False))
    assert best["plan"]["price_per_h"] <= 8.2
    speeds = []
    for h20, h100 in ((3, 0), (1, 1), (0, 1), (2, 0)):
        nodes = "".join(
            f'[[nodes]]\ngpu = "{gpu}"\ngpus = 2\ncount = {count}\n'
            for gpu, count in (("H20", h20), ("H100", h100))
            if count
        )
        (files / "cluster.toml").write_text(f'name = "x"\nlinks = {{ inter_node_gb_per_s = 5 }}\n{nodes}')
        speeds.append(json.loads(plan(files, "--json"))["plan"]["tokens_per_s"])
    assert best["plan"]["tokens_per_s"] == pytest.approx(max(speeds), rel=1e-6)
    assert best["rent"]["planned"] <= best["rent"]["choices"]


def test_the_cheapest_that_reaches_a_throughput(files: Path) -> None:
    rented = json.loads(plan(files, "--offers", files / "offers.toml", "--budget", 8.2, "--json", cluster=False))
    target = rented["plan"]["tokens_per_s"]
    found = json.loads(
        plan(files, "--offers", files / "offers.toml", "--target-throughput", target, "--json", cluster=False)
    )
    assert found["plan"]["tokens_per_s"] >= target * (1 - 1e-9)
    assert found["plan"]["price_per_h"] <= rented["plan"]["price_per_h"]
    refused = mistake(files, "--offers", files / "offers.toml", "--target-throughput", 1e9, cluster=False)
    assert "no combination of offers reaches this throughput" in refused


def test_a_lost_machine_moves_as_little_as_may_be(files: Path) -> None:
    plan(files, "--out", files / "plan.json")
    found = json.loads(plan(files, "--from", files / "plan.json", "--lost", "h20-1", "--json"))["replan"]
    assert found["lost"] == [f"h20-1:{k}" for k in range(4)]
    options = {option["name"]: option for option in found["options"]}
    fastest = min(option["step_s"] for option in options.values())
    near = [o for o in options.values() if o["step_s"] <= fastest * 1.02]
    assert len(found["moved"]) == min(option["moved"] for option in near)
    same = json.loads(plan(files, "--from", files / "plan.json", "--json"))["replan"]
    assert (same["moved"], same["lost"], same["added"]) == ([], [], [])


def test_an_added_machine_is_put_to_work(files: Path) -> None:
    plan(files, "--out", files / "plan.json")
    (files / "cluster.toml").write_text(CLUSTER.replace("count = 2", "count = 3"))
    found = json.loads(plan(files, "--from", files / "plan.json", "--slack", 0, "--json"))
    assert found["replan"]["added"] == [f"h20-2:{k}" for k in range(4)]
    best = json.loads(plan(files, "--json"))["plan"]
    assert found["plan"]["breakdown"]["step_s"] == pytest.approx(best["breakdown"]["step_s"], rel=1e-6)


def test_measured_rates_replace_the_cost_model(files: Path) -> None:
    """With 4 H800 and 8 H20: training 9000 each, rollout 2400 each; all H800 train at 36,000 per second, and so on."""
    found = json.loads(plan(files, "--rates", files / "rates.toml", "--json"))["plan"]
    trained = 64 * 8 * 1700
    b = found["breakdown"]
    gpus = {stage["gpu"]: len(stage["gpu_ids"]) for stage in found["training"]["stages"]}
    rate = gpus.get("H800", 0) * 9000 + gpus.get("H20", 0) * 1000
    assert b["train_s"] == pytest.approx(trained / rate, rel=1e-3)
    speed = (4 - gpus.get("H800", 0)) * 2500 + (8 - gpus.get("H20", 0)) * 2400
    assert b["rollout_s"] == pytest.approx(64 * 8 * 1500 / speed, rel=1e-3)


def test_a_plan_says_how_sure_it_is(files: Path) -> None:
    usual, robust = (json.loads(plan(files, *a, "--json"))["certainty"]["tokens_per_s"] for a in ((), ("--robust",)))
    assert usual[0] < usual[1] < usual[2]
    assert robust[0] >= usual[0] * (1 - 1e-9)
    assert "over the calibration's ranges" in plan(files)


def test_a_calibration_file_changes_efficiencies(files: Path) -> None:
    (files / "slow.toml").write_text("[default]\ntrain = 0.2\nlink = 0.35\n")
    slow, fast = (json.loads(plan(files, *a, "--json"))["plan"] for a in (("--calibration", files / "slow.toml"), ()))
    assert slow["tokens_per_s"] < fast["tokens_per_s"]


def test_the_page_is_one_file_without_scripts(files: Path) -> None:
    plan(files, "--html", files / "plan.html")
    page = (files / "plan.html").read_text()
    assert page.count("<svg") == 4
    for heading in ("Roles of the GPUs", "Limits", "One step", "Price against throughput", "One more GPU"):
        assert heading in page
    assert "<script" not in page
    assert not re.search(r"https?://", page)
    assert "h20-0:0" in page


def test_the_page_shows_every_gpu_of_a_plan_with_a_reward_model(files: Path) -> None:
    (files / "work.toml").write_text(f'{WORK}[reward]\nmodel = "{MODEL}"\n')
    (files / "cluster.toml").write_text(
        'name = "x"\nlinks = { inter_node_gb_per_s = 5 }\n'
        '[[nodes]]\ngpu = "H100"\ngpus = 4\n[[nodes]]\ngpu = "A100-80"\ngpus = 2\n'
    )
    plan(files, "--html", files / "plan.html", "--out", files / "plan.json")
    found, page = read_plan(files / "plan.json"), (files / "plan.html").read_text()
    assert found.reward is not None
    shown = set(re.findall(r"<title>([\w-]+:\d+)</title>", page))
    assert shown == {f"h100:{k}" for k in range(4)} | {f"a100-80:{k}" for k in range(2)}
    assert shown == {
        gpu for part in (*found.training.stages, *found.replicas, *found.idle, found.reward) for gpu in part.gpu_ids
    }
    assert "A100-80 · 2 GPUs in 1 machine" in page
    key = re.search(r'var\((--[\w-]+)\)"></i>reward model', page)
    assert key is not None
    for gpu in found.reward.gpu_ids:
        assert f'fill="var({key[1]})"><title>{gpu}</title>' in page


def test_the_recipes_of_the_planner_can_be_read() -> None:
    for file, kind in (("areal-hex-56.toml", ClusterSettings), ("offers.toml", OffersSettings)):
        load_recipe(kind, RECIPES / file)
    assert read_workload(RECIPES / "math-27k.toml").output.longest == 27648


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("cluster", CLUSTER.replace("H800", "H80"), "did you mean 'H800'"),
        (
            "cluster",
            CLUSTER.replace("inter_node_gb_per_s = 5", "inter_node_gb_per_s = -5"),
            "inter_node_gb_per_s: got -5",
        ),
        ("cluster", CLUSTER.replace("inter_node_gb_per_s = 5, ", ""), "links.inter_node_gb_per_s is missing"),
        ("cluster", CLUSTER + "price_per_gpu_hour = 0\n", "price_per_gpu_hour: got 0"),
        ("cluster", CLUSTER + "link_gb_per_s = inf\n", "link_gb_per_s: got inf"),
        ("cluster", CLUSTER + "[gpu.H20]\nhbm_gb = inf\n", "hbm_gb: got inf"),
        ("cluster", CLUSTER + "speed = 9\n", "unknown key nodes.1.speed"),
        ("cluster", CLUSTER.replace("count = 2", "count = 100001"), "count: got 100001"),
        ("cluster", CLUSTER.replace("[[nodes]]", "[nodes]"), "is not valid TOML"),
        ("work", WORK.replace("groups = 64", "groups = 0"), "groups: got 0"),
        ("work", WORK.replace("6000", "1000"), "above mean = 1500"),
        ("work", WORK.replace("6000", "inf"), "max: got inf"),
        ("work", WORK + "algorithm = { minibatches = 65 }\n", "minibatches: got 65"),
    ],
)
def test_a_wrong_file_is_named_with_key_and_what_is_allowed(files: Path, file: str, text: str, sentence: str) -> None:
    (files / f"{file}.toml").write_text(text)
    said = mistake(files)
    assert sentence in said
    assert f"{file}.toml" in said


def test_offers_may_have_links_to_gpus_that_are_not_rented_and_types_with_a_space_in_their_name(files: Path) -> None:
    between = '{ inter_node_gb_per_s = 5, between = [{ ends = ["H100", "my L40S"], gb_per_s = 4 }] }'
    text = OFFERS.replace('"H20"', '"my L40S"').replace("{ inter_node_gb_per_s = 5 }", between)
    own = "bf16_tflops = 300, hbm_gb_per_s = 900, hbm_gb = 48, link_gb_per_s = 30, price_per_hour = 0.8"
    (files / "offers.toml").write_text(f'{text}[gpu]\n"my L40S" = {{ {own} }}\n')
    rented = json.loads(plan(files, "--offers", files / "offers.toml", "--budget", 2.5, "--json", cluster=False))
    assert set(rented["rent"]["gpus"]) == {"my L40S"}


def test_offers_that_contradict_themselves_are_refused_with_a_sentence(files: Path) -> None:
    offers = ("--offers", files / "offers.toml", "--budget", 9)
    for old, new, sentence in (
        ('"H100"', '"H10"', "offers.toml: offers.1.gpu: unknown GPU 'H10'; did you mean 'H100'?"),
        ('"H100"', '"H20-paper"', "nodes: prices are in L20 and in USD"),
        ("inter_node_gb_per_s", "cross_type_gb_per_s", "links.inter_node_gb_per_s is missing"),
        (
            "= 5 }",
            '= 5, between = [{ ends = ["H100", "h100x8-1"], gb_per_s = 1 }] }',
            "links.between.0.ends: got H100, h100x8-1, allowed are two of the GPU types of the offers: ",
        ),
    ):
        (files / "offers.toml").write_text(OFFERS.replace(old, new))
        assert sentence in mistake(files, *offers, cluster=False)


def test_a_run_whose_recipe_gives_no_workload_is_refused(files: Path) -> None:
    (files / "run.json").write_text("{}")
    warm_start = (ROOT / "recipes" / "quickstart-warmstart.toml").read_text()
    resolved = load_recipe(Recipe, ROOT / "recipes" / "quickstart.toml").model_dump(mode="json")
    resolved["run"]["steps"] = 0
    for text, sentence in (
        (warm_start, "is a recipe for `baton sft`, but a recipe for `baton train` is needed"),
        (tomli_w.dumps(without_none(resolved)), "run.steps: got 0, input should be greater than or equal to 1"),
    ):
        (files / "recipe.toml").write_text(text)
        assert f"{files}/recipe.toml" in mistake(files, "--workload", files)
        assert sentence in mistake(files, "--workload", files)


def test_questions_that_do_not_go_together_are_refused(files: Path) -> None:
    offers = ("--offers", files / "offers.toml")
    assert "give --cluster" in mistake(files, cluster=False)
    assert "--offers needs" in mistake(files, *offers)
    assert "exclude each other" in mistake(files, *offers, "--budget", 5, "--target-throughput", 5, cluster=False)
    for other in (("--colocated",), ("--from", files / "plan.json")):
        assert "--method does not apply" in mistake(files, *other, "--method", "paper")
    assert "--mixed-stages needs Baton's trainer" in mistake(files, "--mixed-stages", "--symmetric-only")
    assert "--budget: got -5" in mistake(files, *offers, "--budget", -5, cluster=False)
    assert "--budget: got inf" in mistake(files, *offers, "--budget", "inf", cluster=False)
    assert "the cheapest machine costs 2.7" in mistake(files, *offers, "--budget", 1, cluster=False)
    assert "give --cluster (existing GPUs)" in mistake(files, *offers, "--budget", 9)
    assert "got 'nobody'" in mistake(files, "--lost", "nobody")
    assert "there is no plan" in mistake(files, "--from", files / "none.json")
    assert "there is no file" in mistake(files, "--rates", files / "none.toml")
    (files / "rates.toml").write_text("[rates]\nH800 = { train = 1, rollout = 1 }\n")
    assert "H20 is in the cluster but not in the table" in mistake(files, "--rates", files / "rates.toml")


def test_a_plan_that_cannot_be_written_is_refused_before_the_search(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.plan.Inputs", pytest.fail)
    assert "give a file in an existing directory" in mistake(files, "--out", files / "none" / "plan.json")


def test_without_the_solver_the_remedy_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.planner.integer.find_spec", lambda _: None)
    assert "pip install 'baton-rl[plan]'" in mistake(files)


def test_the_peak_of_a_rented_gpu_changes_no_achieved_rate(files: Path) -> None:
    offers = files / "offers.toml"
    offers.write_text(OFFERS + "[gpu.H100]\nbf16_tflops = 2000\n")
    found = make_plan(MODEL, files / "work.toml", offers=offers, budget=20)
    assert found.inputs.efficiencies.of("H100").train * 2000 == pytest.approx(422.6)
