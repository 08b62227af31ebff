"""What the planner answers by default is what the launcher starts: every plan is placed, its keys are those of a recipe
that is accepted, and each rank and each reward model fits by the memory law of the run itself."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.control import event
from ray_rows import row

from baton.cluster.inventory import machines
from baton.cluster.placement import Placement, place
from baton.cluster.plan_check import check_reward_places
from baton.cost.memory import GPU_CONTEXT_BYTES, SLEEPING_VLLM_BYTES, overhead, stage_bytes
from baton.errors import UserError
from baton.planner.colocated import make_colocated_plan
from baton.planner.problem import Inputs
from baton.planner.rental import OffersSettings, rent_for_budget
from baton.planner.replan import replan_with_reward, without_nodes
from baton.planner.reward_stage import plan_with_reward
from baton.planner.solve import make_plan
from baton.recipe.load import load_recipe
from baton.recipe.recipe import Recipe
from baton.recipe.support import check_support
from baton.rewards.settings import RewardSettings
from baton.run.devices import DeviceLayout
from baton.run.memory import processes_of, stages_of
from baton.specs.cluster import ClusterSettings, catalogue
from baton.specs.model import ModelSpec, model_spec
from baton.specs.plan import Plan
from baton.specs.workload import Workload, WorkloadSettings
from tests.all_cases import ALL

pytest.importorskip("highspy")
RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
GPUS = ["H100", "A100-40", "L40S", "RTX4090", "H20"]
SHAPES = {  # layers, hidden, heads, key/value heads, columns, tied
    "0.5B": (24, 896, 14, 2, 4864, True),
    "1.5B": (28, 1536, 12, 2, 8960, True),
    "7B": (28, 3584, 28, 4, 18944, False),
    "14B": (48, 5120, 40, 8, 13824, False),
    "32B": (64, 5120, 40, 8, 27648, False),
}
KEYS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "tie_word_embeddings",
)  # fmt: skip


def model_of(name: str) -> ModelSpec:
    config = dict(zip(KEYS, SHAPES[name], strict=True))
    return model_spec({"model_type": "qwen2", "vocab_size": 151936, **config}, name)


MODELS = {name: model_of(name) for name in SHAPES}
REWARD_MODELS = ["0.5B", "7B"]
CASES: Counter[str] = Counter()
"""Number of questions by the shape of the plan, or by the reason why there is none."""


@st.composite
def questions(draw: st.DrawFn) -> tuple[Inputs, dict[str, tuple[str, int]]]:
    """One to five machines of one to three GPU types, a model, and a workload whose settings a recipe has, too, with
    or without a reward model. Large machines and small models are frequent, because others often have no plan."""
    types = draw(st.lists(st.sampled_from(GPUS), min_size=1, max_size=3, unique=True))
    sizes = st.sampled_from([1, 2, 4, 8, 8, 8])
    nodes = draw(st.lists(st.tuples(st.sampled_from(types), sizes), min_size=1, max_size=5))
    there = {f"m{index}": node for index, node in enumerate(nodes)}
    link = draw(st.sampled_from([1.25, 12.5, 50.0]))
    cluster = ClusterSettings.model_validate(
        {
            "name": "drawn",
            "links": {"inter_node_gb_per_s": link, "cross_type_gb_per_s": draw(st.sampled_from([link, link / 5]))},
            "nodes": [{"gpu": gpu, "gpus": size, "name": name} for name, (gpu, size) in there.items()],
        }
    ).build()
    longest = draw(st.sampled_from([512, 4000, 16000]))
    work = WorkloadSettings.model_validate(
        {
            "groups": draw(st.sampled_from([4, 32])),
            "group_size": 8,
            "max_staleness": draw(st.sampled_from([0, 4])),
            "prompt_tokens": {"mean": 100},
            "output_tokens": {"kind": "measured", "values": [longest // 4, longest]},
            "algorithm": {
                "recompute": draw(st.booleans()),
                "critic": draw(st.booleans()) and draw(st.booleans()),
                "reference_model": draw(st.booleans()),
                "minibatches": draw(st.sampled_from([1, 2])),
            },
        }
    ).build()
    judge = draw(st.sampled_from([None, None, *REWARD_MODELS, *REWARD_MODELS[1:]]))
    if judge is not None:
        tokens = draw(st.sampled_from([2048, 16384]))
        work = msgspec.structs.replace(work, reward_model=MODELS[judge], reward_batch_tokens=tokens)
        if draw(st.booleans()):  # a generative model
            replies = {"reward_reply_tokens": 200.0, "reward_calls": 8, "reward_context_tokens": 2048}
            work = msgspec.structs.replace(work, **replies)
    model = MODELS[draw(st.sampled_from(["0.5B", "0.5B", "1.5B", *MODELS]))]
    return Inputs(cluster, model, work, mixed_stages=draw(st.booleans())), there


def recipe_of(work: Workload, placed: Placement, judges: dict[str, str], *more: str) -> Recipe:
    """The recipe with the workload's settings, and with the keys that the placement sets."""
    given: list[str] = [
        f"rollout.batch_groups={work.groups}", f"rollout.group_size={work.group_size}",
        f"engine.max_context_tokens={math.ceil(work.longest_tokens)}",
        f"rollout.max_new_tokens={math.ceil(work.output.longest)}", "engine.processes=1", "engine.dtype='bfloat16'",
        f"trainer.activation_checkpointing={str(work.recompute).lower()}", "trainer.dtype='bfloat16'",
        f"algorithm.num_minibatches={work.minibatches}", f"trainer.max_tokens_per_microbatch={work.microbatch_tokens}",
        "engine.kind='vllm'", "engine.processes=0",
    ]  # fmt: skip
    if work.has_reference:
        given += ["algorithm.kl_coef=0.01"]
    if work.has_critic:
        given += ["algorithm.advantage='gae'", "algorithm.critic='separate'"]
    recipe = load_recipe(Recipe, RECIPE, [*given, *placed.overrides, *more])
    if work.reward_model is None:
        return recipe
    keys: dict[str, Any] = {"batch_tokens": work.reward_batch_tokens}
    if work.reward_reply_tokens:
        limits = {"concurrency": work.reward_calls, "context_tokens": work.reward_context_tokens}
        keys = {"template": "{response}", **limits}
    scorer = RewardSettings(kind="model", model=judges[work.reward_model.name], **keys)
    return recipe.model_copy(update={"reward": (scorer,)})


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a reward model → directory with its configuration."""
    found = {}
    for name in REWARD_MODELS:
        directory = tmp_path_factory.mktemp("judge") / name
        directory.mkdir()
        config = dict(zip(KEYS, SHAPES[name], strict=True))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 151936, **config}))
        found[name] = str(directory)
    return found


def check_reward_memory(plan: Plan, recipe: Recipe, model: ModelSpec) -> None:
    """By the law of the run, which counts a reward model on a GPU of this machine, each process fits into its GPU."""
    assert plan.reward is not None
    layout = DeviceLayout((0,), (), (("model", ("cuda:0",)),))
    *_, process = processes_of(recipe, model, on_cpu=False, layout=layout)
    assert process.name == "the reward model 'model'"
    assert process.num_bytes <= catalogue()[plan.reward.gpu].hbm_gb * 1e9, (plan.reward, process)
    tensors = sum(part.num_bytes for part in process.parts if not part.is_assumed)
    assert tensors <= plan.reward.memory_bytes + 2, "rounded up, once for each part"


def check_memory(plan: Plan, recipe: Recipe, model: ModelSpec) -> None:
    """By the law of `baton train --dry-run`, with what no tensor shows, each rank fits into its GPU."""
    stages = stages_of(recipe, model, on_cpu=False)
    if plan.training.is_mixed:  # the parts of a group are one stage of the recipe
        stages *= len(plan.training.stages)
    for (phases, layers), planned in zip(stages, plan.training.stages, strict=True):
        tensors = float(stage_bytes(phases, layers))
        whole = tensors + float(overhead(tensors, on_cpu=False).bytes(1))
        assert whole <= catalogue()[planned.gpu].hbm_gb * 1e9, (planned, whole)
        assert tensors <= planned.memory_bytes * (1 + 1e-9), "the planner's law is the run's, or more careful"


def test_the_default_plan_of_any_cluster_is_carried_out_and_each_rank_fits(judges: dict[str, str]) -> None:
    CASES.clear()

    @settings(max_examples=300 if ALL else 150)
    @given(questions())
    def each_fits(question: tuple[Inputs, dict[str, tuple[str, int]]]) -> None:
        check_plan(judges, *question)

    each_fits()
    print(json.dumps(dict(sorted(CASES.items())), indent=1))
    least = {"FSDP": 20, "one process": 1, "a reward stage": 10}
    if ALL:
        least = {"FSDP": 40, "one process": 3, "a reward stage": 20, "a reward stage of several GPUs": 1}
    assert all(CASES[case] >= number for case, number in least.items()), CASES


def check_plan(judges: dict[str, str], inputs: Inputs, nodes: dict[str, tuple[str, int]]) -> None:
    try:
        plan = plan_for(inputs)
    except UserError as error:
        count(f"no plan: {str(error).partition('.')[0].partition(',')[0]}")
        return
    check_placed(judges, plan, inputs, nodes)


def check_placed(judges: dict[str, str], plan: Plan, inputs: Inputs, nodes: dict[str, tuple[str, int]]) -> None:
    there = machines([row(name, CPU=8, **{f"gpu_type_{gpu}": size}) for name, (gpu, size) in nodes.items()])
    placed = place(plan, there)
    recipe = recipe_of(inputs.work, placed, judges)
    check_support(recipe.choices())
    check_reward_places(plan, recipe, RECIPE)
    assert recipe.trainer.ranks == len(placed.ranks) == len(plan.training.gpu_ids)
    check_memory(plan, recipe, inputs.model)
    everyone = (*placed.ranks, *placed.workers, *placed.rewards)
    taken = [gpu_id for spec in everyone for gpu_id in spec.gpu_ids]
    assert len(set(taken)) == len(taken), "no GPU is used twice"
    assert len(placed.rewards) == (0 if plan.reward is None else len(plan.reward.gpu_ids))
    assert all(nodes[spec.machine] == (spec.gpu, nodes[spec.machine][1]) for spec in everyone)
    if plan.reward is not None:
        check_reward_memory(plan, recipe, inputs.model)
    for worker, replica in zip(placed.workers, plan.replicas, strict=True):
        assert (worker.tp * worker.pp, worker.gpu_ids) == (len(replica.gpu_ids), replica.gpu_ids)
        assert replica.memory_bytes <= replica.memory_limit_bytes
        heads, keys = inputs.model.num_heads, inputs.model.num_kv_heads
        assert heads % worker.tp == 0
        assert keys % worker.tp == 0 or worker.tp % keys == 0
    trained = recipe.trainer
    size = trained.shard_size or 1
    copies = [placed.ranks[first : first + size] for first in range(0, len(placed.ranks), size)]
    assert all(len({rank.machine for rank in copy}) == 1 for copy in copies), "a copy of the model is on one machine"
    shape = "stages" if trained.num_stages > 1 else "TP" if trained.tensor_parallel > 1 else "FSDP"
    shape += " with copies" if trained.shard_size else ""
    if plan.training.is_mixed:
        shape += " over two types"
        planned = {part.gpu: part.speed for part in plan.training.stages}
        slow, fast = sorted(planned, key=planned.__getitem__)
        speeds = dict(zip((rank.gpu for rank in placed.ranks), trained.speeds or [1.0] * trained.ranks, strict=True))
        assert speeds[slow] / speeds[fast] == pytest.approx(planned[slow], rel=2e-3)
    count(shape if trained.ranks > 1 else "one process")
    count(f"{len({stage.gpu for stage in plan.training.stages})} types train")
    if plan.reward is not None:
        count("a reward stage")
        count(f"a reward stage of {'one GPU' if len(placed.rewards) == 1 else 'several GPUs'}")


@pytest.mark.parametrize("option", ["--colocated", "--from", "--offers"])
def test_the_reward_stage_of_other_plans_is_carried_out_too(judges: dict[str, str], option: str) -> None:
    CASES.clear()

    @settings(max_examples=30)
    @given(questions(), st.data())
    def each_fits(question: tuple[Inputs, dict[str, tuple[str, int]]], data: st.DataObject) -> None:
        inputs, _ = question
        if inputs.work.reward_model is None:
            work = msgspec.structs.replace(inputs.work, reward_model=MODELS[REWARD_MODELS[0]])
            inputs = msgspec.structs.replace(inputs, work=work)
        try:
            check_other_plan(judges, option, msgspec.structs.replace(inputs, mixed_stages=False), data)
        except UserError as error:
            count(f"no plan: {str(error).partition('.')[0].partition(',')[0]}")

    each_fits()
    print(json.dumps(dict(sorted(CASES.items())), indent=1))
    assert CASES["a reward stage"] >= 4, CASES


def check_other_plan(judges: dict[str, str], option: str, inputs: Inputs, data: st.DataObject) -> None:
    """Raises UserError if there is no plan."""
    if option == "--colocated":
        plan, rest = plan_with_reward(inputs, make_colocated_plan)
        check_colocated_stage(judges, plan, inputs, rest)
        return
    if option == "--from":
        running = plan_for(inputs)
        if len(inputs.cluster.nodes) > 1:
            lost = data.draw(st.sampled_from([node.name for node in inputs.cluster.nodes]))
            inputs = inputs.on(without_nodes(inputs.cluster, [lost]))
        plan = replan_with_reward(inputs, running, slack=data.draw(st.sampled_from([0.0, 0.5]))).chosen.plan
    else:
        nodes = [(node.gpu.name, node.num_gpus) for node in inputs.cluster.nodes]
        offers = [{"gpu": gpu, "gpus": size, "max_nodes": min(2, nodes.count((gpu, size)))} for gpu, size in set(nodes)]
        market = OffersSettings.model_validate(
            {"links": {"inter_node_gb_per_s": 12.5}, "offers": sorted(offers, key=str)}
        )
        most = sum(node.num_gpus * node.price_per_gpu_h for node in inputs.cluster.nodes)
        choice = rent_for_budget(inputs, market, most * data.draw(st.sampled_from([0.6, 1.0])))
        plan, inputs = choice.plan, choice.inputs
        assert plan.price_per_h == pytest.approx(inputs.cluster.price_per_h)
    check_placed(judges, plan, inputs, {node.name: (node.gpu.name, node.num_gpus) for node in inputs.cluster.nodes})


def check_colocated_stage(judges: dict[str, str], plan: Plan, inputs: Inputs, rest: Inputs) -> None:
    """The reward model has GPUs of its own, and fits there by the law of the run."""
    assert plan.is_colocated
    assert plan.reward is not None
    others = {*plan.training.gpu_ids, *(gpu_id for replica in plan.replicas for gpu_id in replica.gpu_ids)}
    assert others <= {gpu_id for node in rest.cluster.nodes for gpu_id in node.gpu_ids}
    assert not others & set(plan.reward.gpu_ids)
    assert plan.price_per_h == inputs.cluster.price_per_h
    times = plan.breakdown
    assert times.step_s == pytest.approx(times.sync_s + times.rollout_s + times.reward_s + times.train_s)
    check_reward_memory(plan, recipe_of(inputs.work, Placement((), (), {}), judges), inputs.model)
    count("a reward stage")


def test_a_colocated_plan_of_any_cluster_is_carried_out_and_each_rank_fits_beside_sleeping_engines() -> None:
    """Each GPU is requested from Ray once. Both states of it fit: a rank beside a sleeping vLLM, and a vLLM with its
    share of the GPU beside a sleeping rank."""
    CASES.clear()

    @settings(max_examples=120)
    @given(questions())
    def each_fits(question: tuple[Inputs, dict[str, tuple[str, int]]]) -> None:
        inputs, nodes = question
        check_colocated_plan(msgspec.structs.replace(inputs, mixed_stages=False), nodes)

    each_fits()
    print(json.dumps(dict(sorted(CASES.items())), indent=1))
    least = {"several ranks": 40, "one rank": 3, "an engine of several GPUs": 5, "a GPU without rank": 5}
    assert all(CASES[case] >= number for case, number in least.items()), CASES


def check_colocated_plan(inputs: Inputs, nodes: dict[str, tuple[str, int]]) -> None:
    there = machines([row(name, CPU=8, **{f"gpu_type_{gpu}": size}) for name, (gpu, size) in nodes.items()])
    work = msgspec.structs.replace(inputs.work, reward_model=None)
    try:
        plan = make_colocated_plan(msgspec.structs.replace(inputs, work=work))
    except UserError as error:
        count(f"no plan: {str(error).partition('.')[0].partition(',')[0]}")
        return
    placed = place(plan, there)
    recipe = recipe_of(work, placed, {}, "fleet.ray=true", "swarm.serve='127.0.0.1:0'")
    check_support(recipe.choices())
    assert (recipe.rollout.is_colocated, recipe.trainer.ranks) == (True, len(placed.ranks))
    owners = {gpu: rank for rank, spec in enumerate(placed.ranks) for gpu in spec.gpu_ids}
    assert len(owners) == len(placed.ranks), "a rank has one GPU, and no GPU has two ranks"
    engines = [gpu for spec in placed.workers for gpu in spec.gpu_ids]
    assert len(set(engines)) == len(engines), "no two engines on one GPU"
    for spec in placed.workers:
        ranks = tuple(owners.get(gpu, -1) for gpu in spec.gpu_ids)
        assert spec.ranks == (ranks if max(ranks) >= 0 else ())
    for name, (gpu, size) in nodes.items():
        own = [spec for spec in (*placed.ranks, *placed.workers) if spec.machine == name]
        requested = sum(spec.resources.get(f"gpu_type_{gpu}", 0.0) for spec in own)
        assert requested == len({each for spec in own for each in spec.gpu_ids}) <= size
    check_memory(plan, recipe, inputs.model)
    ranks_of_stages = [one for one in processes_of(recipe, inputs.model, on_cpu=False) if one.alternates]
    assert sum(one.count for one in ranks_of_stages) == len(placed.ranks)
    for process, stage in zip(ranks_of_stages, plan.training.stages, strict=True):
        assert any(part.num_bytes == SLEEPING_VLLM_BYTES for part in process.parts)
        assert process.num_bytes <= catalogue()[stage.gpu].hbm_gb * 1e9, (stage, process)
    for replica in plan.replicas:
        whole = catalogue()[replica.gpu].hbm_gb * 1e9
        share = recipe.engine.vllm.gpu_memory_utilization * whole
        assert replica.memory_bytes + GPU_CONTEXT_BYTES <= share, "weights and KV cache, and vLLM's own context"
        assert share + GPU_CONTEXT_BYTES <= whole, "vLLM's share and the context of the sleeping rank"
    count("one rank" if len(placed.ranks) == 1 else "several ranks")
    for case, is_so in (
        ("an engine of several GPUs", any(len(spec.gpu_ids) > 1 for spec in placed.workers)),
        ("a GPU without rank", any(gpu not in owners for gpu in engines)),
        ("an engine on GPUs with and without rank", any(-1 in spec.ranks for spec in placed.workers)),
    ):
        if is_so:
            count(case)


def count(case: str) -> None:
    CASES[case] += 1
    event(case)


def plan_for(inputs: Inputs) -> Plan:
    if inputs.work.reward_model is None:
        return make_plan(inputs, time_limit_s=math.inf)
    return plan_with_reward(inputs, time_limit_s=math.inf)[0]


def test_a_plan_for_the_idealised_trainer_is_refused_by_the_launcher() -> None:
    nodes = [{"gpu": gpu, "gpus": 2, "name": gpu} for gpu in GPUS[:2]]
    cluster = ClusterSettings.model_validate({"name": "two", "links": {"inter_node_gb_per_s": 50}, "nodes": nodes})
    load = {"groups": 4, "group_size": 8, "prompt_tokens": {"mean": 100}, "output_tokens": {"mean": 500}}
    work = msgspec.structs.replace(WorkloadSettings.model_validate(load).build(), trainer="idealised")
    plan = make_plan(Inputs(cluster.build(), MODELS["0.5B"], work), time_limit_s=math.inf)
    assert plan.limits[-1].startswith("the plan is for comparison")
    with pytest.raises(UserError, match="idealised trainer"):
        place(plan, machines([row(gpu, CPU=8, **{f"gpu_type_{gpu}": 2}) for gpu in GPUS[:2]]))
