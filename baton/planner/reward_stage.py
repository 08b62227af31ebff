"""Chooses the GPUs of the reward model: k GPUs of one type, by a search over types and k.

Each GPU holds the whole reward model and scores a trajectory in time t. For each choice, the other GPUs are planned
with the scoring time of this choice. The search begins at the smallest k with which scoring a batch takes no longer
than a step takes without scoring; it then tries larger and smaller k. Two rules skip choices that cannot be better.
First, a step takes at least N · t / k, the time to score a batch of N trajectories. Second, if scoring with k GPUs does
not lengthen the step, a larger k only takes GPUs from the other roles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from baton.clock import Clock, time_left
from baton.cost.generate import DeviceClass
from baton.cost.score import ScoringCost, scoring_cost
from baton.errors import UserError
from baton.planner.problem import Inputs
from baton.planner.solve import make_plan, restricted
from baton.specs.cluster import GB, Cluster
from baton.specs.model import ModelSpec
from baton.specs.plan import Bound, Plan, RewardStage
from baton.specs.workload import Workload

PlanRest = Callable[..., Plan]
"""A function that plans all roles except the reward model. Its arguments are (inputs, time_limit_s=seconds). It raises
UserError if no plan is feasible."""


def plan_with_reward(
    inputs: Inputs, plan_rest: PlanRest = make_plan, *, time_limit_s: float = 60.0
) -> tuple[Plan, Inputs]:
    """Return (plan, inputs). plan: the best plan; if the workload has a reward model, the plan has a reward stage.
    `inputs`: the planner's inputs for the other roles. Their cluster lacks the stage's GPUs, and their workload has the
    stage's scoring time. Raises UserError if no plan is feasible."""
    model = inputs.work.reward_model
    if model is None:
        return plan_rest(inputs, time_limit_s=time_limit_s), inputs
    costs = list(_costs(inputs, model))
    left_s = time_left(time_limit_s)
    plain = msgspec.structs.replace(inputs, work=msgspec.structs.replace(inputs.work, reward_model=None))
    least_s = plan_rest(plain, time_limit_s=time_limit_s / 4).breakdown.step_s
    search = _Search(plain, model, plan_rest, least_s, left_s)
    for place, cost in costs:
        search.try_type(place, cost)
    if search.best is None:
        raise search.refusals[0] if search.refusals else _too_large(inputs, model, costs)
    plan, own = search.best
    bound = Bound.of(plan.breakdown.step_s, min(search.bounds_s), plan.bound.note)
    return msgspec.structs.replace(plan, bound=bound, price_per_h=inputs.cluster.price_per_h), own


class _Search:
    """Compares candidate reward stages, and makes a plan of the other roles for each candidate."""

    def __init__(self, plain: Inputs, model: ModelSpec, plan_rest: PlanRest, least_s: float, left_s: Clock) -> None:
        """`plain`: the inputs without the reward model. `least_s`: step time of the best plan for these inputs."""
        self._cluster, self._model, self._plan_rest = plain.cluster, model, plan_rest
        self._plain, self._least_s, self._left_s = plain, least_s, left_s
        self.best: tuple[Plan, Inputs] | None = None
        self.bounds_s: list[float] = []
        """Lower bounds on the step time, one for each stage that was tried."""
        self.refusals: list[UserError] = []

    def try_type(self, place: DeviceClass, cost: ScoringCost) -> None:
        """Try reward stages on GPUs of one type, if the reward model fits into the memory of one such GPU."""
        most = min(self._cluster.count()[place.gpu.name], self._cluster.num_gpus - 1)
        if cost.memory_bytes > place.memory_limit_bytes or not most:
            return
        batch_s = self._plain.work.num_trajectories * cost.trajectory_s
        first = min(most, max(1, math.ceil(batch_s / self._least_s)))
        for count in range(first, most + 1):
            if not self._try_stage(place, cost, count):
                break
        for count in range(first - 1, 0, -1):
            if self.best is not None and batch_s / count >= self.best[0].breakdown.step_s:
                break
            self._try_stage(place, cost, count)

    def _try_stage(self, place: DeviceClass, cost: ScoringCost, count: int) -> bool:
        """Plan the other roles beside a reward stage of `count` GPUs. Return whether a larger stage may be better."""
        rest, gpu_ids = reserve(self._cluster, place.gpu.name, count)
        work = self._plain.work
        stage = _stage(self._model, work, place, cost, gpu_ids)
        own = _inputs_of_the_rest(self._plain, rest, stage)
        try:
            plan = self._plan_rest(own, time_limit_s=max(5.0, self._left_s() / 4))
        except UserError as error:
            self.refusals.append(error)
            return False
        self.bounds_s.append(plan.bound.step_s)
        parts = plan.breakdown
        if self.best is None or parts.step_s < self.best[0].breakdown.step_s * (1 - 1e-9):
            self.best = msgspec.structs.replace(plan, reward=stage), own
        is_hidden = parts.overlaps and parts.rollout_s + parts.reward_s <= parts.train_s
        is_whole_batch_scored_at_once = count * cost.concurrency >= work.num_trajectories
        latency_s = cost.latency_s or cost.trajectory_s
        return not is_hidden and not is_whole_batch_scored_at_once and parts.reward_s > latency_s


def _stage(
    model: ModelSpec, work: Workload, place: DeviceClass, cost: ScoringCost, gpu_ids: tuple[str, ...]
) -> RewardStage:
    return RewardStage(
        model=model.name,
        gpu=place.gpu.name,
        gpu_ids=gpu_ids,
        trajectory_s=cost.trajectory_s,
        memory_bytes=cost.memory_bytes,
        memory_limit_bytes=place.memory_limit_bytes,
        params=model.params,
        num_layers=model.num_layers,
        batch_tokens=work.reward_batch_tokens,
        concurrency=cost.concurrency,
        latency_s=cost.latency_s,
        context_tokens=work.reward_context_tokens if work.reward_reply_tokens else 0,
    )


def _inputs_of_the_rest(inputs: Inputs, rest: Cluster, stage: RewardStage) -> Inputs:
    work = msgspec.structs.replace(inputs.work, reward_model=None, **stage.timing)
    return msgspec.structs.replace(inputs.on(rest), work=work)


def stage_choices(
    inputs: Inputs, running: RewardStage | None, *, time_limit_s: float
) -> list[tuple[RewardStage | None, Inputs]]:
    """Return the reward stages that a new plan may have, each with the planner's inputs for the other roles. There are
    at most two such stages: the stage `running` with its remaining GPUs, and the stage of a plan from scratch. If the
    workload comes from a run directory, it has no reward model, and the stage `running` keeps its scoring time. Raises
    UserError if no stage is possible."""
    model, refusals = inputs.work.reward_model, list[UserError]()
    found = dict[tuple[str, ...], tuple[RewardStage | None, Inputs]]()
    if running is not None:
        try:
            rest, stage = beside(inputs.cluster, running, {node.name for node in inputs.cluster.nodes})
            if model is not None:
                place, cost = next(each for each in _costs(inputs, model) if each[0].gpu.name == stage.gpu)
                stage = _stage(model, inputs.work, place, cost, stage.gpu_ids)
            if stage.memory_bytes <= stage.memory_limit_bytes:
                found[stage.gpu_ids] = stage, _inputs_of_the_rest(inputs, rest, stage)
        except UserError as error:
            refusals.append(error)
    if model is not None:
        try:
            plan, own = plan_with_reward(inputs, time_limit_s=time_limit_s)
            assert plan.reward is not None
            found.setdefault(plan.reward.gpu_ids, (plan.reward, own))
        except UserError as error:
            refusals.append(error)
    if not found and refusals:
        raise refusals[-1]
    return list(found.values()) or [(None, inputs)]


def _too_large(inputs: Inputs, model: ModelSpec, costs: Sequence[tuple[DeviceClass, ScoringCost]]) -> UserError:
    needed = min(cost.memory_bytes for _, cost in costs) / GB
    room = max(place.memory_limit_bytes for place, _ in costs) / GB
    return UserError(
        f"reward.model: {model.name} needs a GPU of its own with {needed:.1f} GB, but the cluster has "
        f"{inputs.cluster.num_gpus} GPUs, of which a plan may use at most {room:.1f} GB each; add GPUs, lower "
        "reward.batch_tokens (or calls and context_tokens), or use a smaller reward model"
    )


def _costs(inputs: Inputs, model: ModelSpec) -> Iterator[tuple[DeviceClass, ScoringCost]]:
    """Yield each GPU type of the cluster with the cost of the reward model on it."""
    for name, (first, *_) in inputs.cluster.places.items():
        node = inputs.cluster.nodes[first]
        link = node.link_bytes_per_s
        place = DeviceClass(node.gpu, link, link, inputs.cluster.latency_s, inputs.efficiencies.of(name))
        yield place, scoring_cost(model, inputs.work, place)


def beside(cluster: Cluster, stage: RewardStage, machines: Collection[str]) -> tuple[Cluster, RewardStage]:
    """Return the cluster without the GPUs of a reward stage, and the stage reduced to its GPUs on `machines`. Raises
    UserError if these machines have no GPU of the stage, or if no other GPU is left."""
    own = Counter(gpu_id.rpartition(":")[0] for gpu_id in stage.gpu_ids)
    nodes, gpu_ids = [], list[str]()
    for node in cluster.nodes:  # this machine may have replaced the stage's machine of the same name, with fewer GPUs
        left = node.num_gpus - min(own[node.name], node.num_gpus if node.gpu.name == stage.gpu else 0)
        gpu_ids += node.gpu_ids[left:]
        nodes.append(msgspec.structs.replace(node, num_gpus=left))
    gpu_ids += (each for each in stage.gpu_ids if each.rpartition(":")[0] in set(machines) - {n.name for n in nodes})
    if not gpu_ids:
        raise UserError("no GPU of the reward model is left; make a plan for the remaining machines, then use --resume")
    rest = msgspec.structs.replace(cluster, nodes=tuple(nodes))
    rest = restricted(rest, [place for place, node in enumerate(nodes) if node.num_gpus > 0])
    if not rest.nodes:
        raise UserError("only GPUs of the reward model are left; add GPUs, or make a plan for these GPUs")
    return rest, msgspec.structs.replace(stage, gpu_ids=tuple(gpu_ids))


def reserve(cluster: Cluster, gpu: str, count: int) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster without `count` GPUs of a type, and the ids of these GPUs. The smallest machines come first,
    so that few machines are divided between roles. On each machine, the last GPUs are used."""
    nodes, taken = list(cluster.nodes), list[str]()
    own = (place for place, node in enumerate(nodes) if node.gpu.name == gpu)
    for place in sorted(own, key=lambda place: (nodes[place].num_gpus, -place)):
        left = nodes[place].num_gpus - min(count - len(taken), nodes[place].num_gpus)
        taken += nodes[place].gpu_ids[left:]
        nodes[place] = msgspec.structs.replace(nodes[place], num_gpus=left)
    rest = msgspec.structs.replace(cluster, nodes=tuple(nodes))
    return restricted(rest, [place for place, node in enumerate(nodes) if node.num_gpus]), tuple(taken)
