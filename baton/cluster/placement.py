"""Assigns the trainer ranks and workers of a plan to the machines of a cluster. Does no I/O.

A machine of the plan is matched with the cluster's machine of the same name if the latter has the same GPU type and
enough GPUs. Otherwise, the plan's machine is matched with any free machine of the cluster that has this GPU type and
enough GPUs. Each process gets one bundle of resources:

    trainer    one rank per GPU, stage by stage (the parts of a mixed stage are one stage); tensor-parallel ranks are
               adjacent; on machines of type CPU, one rank per stage and machine with one thread per core
    workers    one worker per replica with all GPUs of the replica; on machines of type CPU, with one thread per core;
               a replica on several machines has one more process on each further machine
    rewards    one process of the reward model per GPU of the reward stage; on machines of type CPU, one per machine

In a colocated plan, a worker requests from Ray only the GPUs that no rank uses. Workers and ranks use shared GPUs
alternately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from baton.cluster.inventory import CPU, Machine
from baton.cost.memory import SLOT_MULTIPLE
from baton.errors import UserError
from baton.recipe.support import check_support
from baton.rollout.engine import EngineSettings
from baton.specs.plan import Plan, Replica, RewardStage, Stage
from baton.specs.trainer_shapes import can_train
from baton.swarm.listen import is_loopback

if TYPE_CHECKING:  # only for types, because `sglang.wire` imports aiohttp
    from baton.rollout.engines.sglang.wire import ServerInfo

Role = Literal["rank", "worker", "reward"]


class ProcessPart(msgspec.Struct, frozen=True):
    """One of the additional processes of a worker on several machines. The fields are those of `ProcessSpec`."""

    machine: str
    gpu_ids: tuple[str, ...]
    resources: dict[str, float]
    threads: int


class ProcessSpec(msgspec.Struct, frozen=True):
    """The specification of a process, with its role, machine and resources."""

    name: str
    role: Role
    machine: str
    """Name of the machine in the plan."""
    gpu: str
    gpu_ids: tuple[str, ...]
    """Ids of the process's GPUs in the plan."""
    resources: dict[str, float]
    """Ray resource → amount to request."""
    threads: int
    slots: int = 0
    """Number of trajectories that a worker generates concurrently."""
    share: float = 0.0
    """Share of each batch's trajectories that the plan assigns to the worker."""
    weight: float = 1.0
    """Relative speed of the worker: the ratio of its expected throughput per slot to the mean of this throughput over
    all workers."""
    tp: int = 1
    pp: int = 1
    ranks: tuple[int, ...] = ()
    """For each GPU of a colocated worker, the rank that uses the same GPU, or -1 if no rank uses this GPU. Only the
    rank requests a shared GPU from Ray; the worker's `resources` exclude it. Empty if the worker shares no GPU."""
    further: tuple[ProcessPart, ...] = ()
    """The worker's processes on machines other than the first, in the order of the GPUs. `gpu_ids` lists the GPUs on
    all machines, but `resources` and `threads` apply only to the first machine."""

    @property
    def machines(self) -> tuple[str, ...]:
        return (self.machine, *(each.machine for each in self.further))

    @property
    def requested(self) -> str:
        """The resources as text, such as `1 GPU, 1 CPU`."""
        return ", ".join(f"{amount:g} {unit}" for unit, amount in self.resources.items())

    @property
    def words(self) -> str:
        what = f"{len(self.gpu_ids)} {'core' if self.gpu == CPU else self.gpu}{'s' if len(self.gpu_ids) > 1 else ''}"
        share = f", {self.slots} slots, {100 * self.share:.0f} % of the work" if self.role == "worker" else ""
        ranks = sorted({rank for rank in self.ranks if rank >= 0})
        turns = f", alternating with rank {', '.join(map(str, ranks))}" if ranks else ""
        return f"{self.name} on {' and '.join(self.machines)}: {what}{share}{turns}"


class Placement(msgspec.Struct, frozen=True):
    """All processes of a plan, with the machines on which they run."""

    ranks: tuple[ProcessSpec, ...]
    workers: tuple[ProcessSpec, ...]
    names: dict[str, str]
    """Machine id → name in the plan, for all machines of the cluster."""
    rewards: tuple[ProcessSpec, ...] = ()
    """Processes of the reward model."""
    overrides: tuple[str, ...] = ()
    """Overrides of the recipe, such as `trainer.ranks=4`, for the keys that the plan determines."""

    @property
    def training_machines(self) -> frozenset[str]:
        return frozenset(spec.machine for spec in self.ranks)


def place(plan: Plan, machines: Sequence[Machine], *, here: str = "", first_worker: int = 0) -> Placement:
    """Assign the processes of a plan to machines. Raises UserError if the machines do not have the required resources.

    `here`: id of the controller's machine. If the first stage uses this machine, rank 0 runs on it. For this, the order
    of the ranks in each stage is rotated by the same offset, so that the same pairs of ranks still communicate.
    `first_worker`: number of the first worker, which becomes a part of its name. It must be larger than all earlier
    numbers, because names are not reused."""
    check_support({"plan": _plan_shape(plan)})
    names = match(plan, machines)
    by_name = {names[machine.id]: machine for machine in machines}
    stages = [_by_process(stage) for stage in plan.training.stages]
    speeds = [stage.speed for stage, ranks in zip(plan.training.stages, stages, strict=True) for _ in ranks]
    if plan.training.is_mixed:
        stages = [[rank for ranks in stages for rank in ranks]]
    if len({len(ranks) for ranks in stages}) > 1:
        numbers = ", ".join(str(len(ranks)) for ranks in stages)
        raise UserError(
            f"--plan: the plan's stages have {numbers} ranks, but all stages need the same number: make the plan again"
        )
    is_here = [by_name[ids[0].rpartition(":")[0]].id == here for _, ids in stages[0]]
    first = is_here.index(True) if True in is_here else 0
    specs = [spec for ranks in stages for spec in (*ranks[first:], *ranks[:first])]
    ranks = tuple(_process_spec("rank", rank, gpu, ids, by_name) for rank, (gpu, ids) in enumerate(specs))
    owners = {gpu: rank for rank, (_, ids) in enumerate(specs) for gpu in ids} if plan.is_colocated else {}
    workers = _workers(plan, by_name, first_worker, owners)
    scoring = enumerate([] if plan.reward is None else _by_process(plan.reward))
    rewards = tuple(_process_spec("reward", index, gpu, ids, by_name) for index, (gpu, ids) in scoring)
    overrides = _overrides(plan, ranks, [*speeds[first:], *speeds[:first]])
    return Placement(ranks, workers, names, rewards, overrides)


def _overrides(plan: Plan, ranks: Sequence[ProcessSpec], planned_speeds: Sequence[float]) -> tuple[str, ...]:
    """Return overrides for the recipe keys that the plan determines. `planned_speeds`: speed of each rank in the plan,
    used only for a mixed stage."""
    training = plan.training
    stages = training.stages[:1] if training.is_mixed else training.stages
    layers = [last - first for first, last in (stage.layers for stage in stages)]
    on_cpu = all(stage.gpu == CPU for stage in stages)
    speeds = _speeds([spec.threads for spec in ranks], len(stages)) if on_cpu else []
    if training.is_mixed:
        speeds = _speeds(planned_speeds, 1)
    found = {
        f"trainer.ranks={len(ranks)}": True,
        f"trainer.stages={layers if len(layers) > 1 else 1}": True,
        f"trainer.tensor_parallel={1 if on_cpu else stages[0].tp}": True,
        "trainer.shard_gradients=true": training.shard_gradients,
        f"trainer.shard_size={training.shard_size}": training.shard_size > 0,
        f"trainer.speeds={speeds}": len(set(speeds)) > 1,
        'rollout.placement="colocated"': plan.is_colocated,
    }
    return tuple(override for override, is_set in found.items() if is_set)


def _speeds(threads: Sequence[float], num_stages: int) -> list[float]:
    """Return a relative speed for each rank index within a stage. `threads`: for each rank of all stages, the number of
    its threads or another measure of its speed. A rank's relative speed is the ratio of its speed to the mean speed in
    its stage. Ranks with the same index train the same trajectories, so the lowest of their relative speeds is the
    speed of the index."""
    size = len(threads) // num_stages
    of_stages = [threads[first : first + size] for first in range(0, len(threads), size)]
    return [round(min(own[rank] * size / sum(own) for own in of_stages), 4) for rank in range(size)]


def _plan_shape(plan: Plan) -> tuple[str, ...]:
    """Return the properties of this plan that `support.toml`, the table of tested and refused combinations, lists on
    its axis `plan`."""
    stages = plan.training.stages
    types, widths = {stage.gpu for stage in stages}, {stage.tp for stage in stages}
    is_mixed = plan.training.is_mixed
    if is_mixed:
        has_shape = widths == {1}
    else:
        has_shape = all(can_train(len(stages), width) for width in widths) and len({stage.dp for stage in stages}) == 1
    shapes = {
        "colocated": plan.is_colocated,
        "replica_on_machines": any(len(_by_machine(replica.gpu_ids)) > 1 for replica in plan.replicas),
        "reward_stage": plan.reward is not None and not plan.reward.context_tokens,
        "generative_reward_stage": plan.reward is not None and plan.reward.context_tokens > 0,
        "idealised": plan.trainer == "idealised" or not has_shape or (CPU in types and len(types) > 1),
        "mixed_stage": is_mixed,
        "mixed_gpus": len(types) > 1 and not is_mixed,
        "model_parallel": (len(stages) > 1 and not is_mixed) or max(widths) > 1,
    }
    found = tuple(name for name, is_so in shapes.items() if is_so)
    return found or ("data_parallel",)


def match(plan: Plan, machines: Sequence[Machine]) -> dict[str, str]:
    """Return machine id → name in the plan. Raises UserError if a machine of the plan has no match in the cluster."""
    wanted = _wanted(plan)
    free = {machine.name: machine for machine in machines}
    found: dict[str, str] = {}
    for name, (gpu, num) in wanted.items():
        machine = free.get(name)
        if machine is not None and machine.gpu == gpu and machine.num_gpus >= num:
            found[free.pop(name).id] = name
    named = set(found.values())
    for name, (gpu, num) in sorted(wanted.items(), key=lambda item: (-item[1][1], item[0])):
        if name in named:
            continue
        fitting = [m for m in free.values() if m.gpu == gpu and m.num_gpus >= num]
        if not fitting:
            left = ", ".join(f"{m.name} with {m.num_gpus} {m.gpu or 'of unknown type'}" for m in free.values())
            raise UserError(
                f"the plan needs a machine {name} with {num} {gpu}, but no such machine of the cluster is free; free "
                f"machines: {left or 'none'}"
            )
        chosen = min(fitting, key=lambda m: (m.num_gpus, m.name in wanted, m.name))
        found[free.pop(chosen.name).id] = name
    taken = set(found.values())
    # the id is appended to a free machine's name if the plan uses this name for another machine
    for machine in free.values():
        found[machine.id] = machine.name if machine.name not in taken else f"{machine.name}-{machine.id[:8]}"
    return found


def machines_of(plan: Plan) -> frozenset[str]:
    """Return the names of the machines that the plan uses."""
    return frozenset(_wanted(plan))


def _wanted(plan: Plan) -> dict[str, tuple[str, int]]:
    """Return, for each machine of a plan, its GPU type and the minimum number of GPUs that it must have."""
    wanted: dict[str, tuple[str, int]] = {}
    rewards = () if plan.reward is None else (plan.reward,)
    trained: set[str] = set()
    used: set[str] = set()  # by engines and reward models
    for part in (*plan.training.stages, *plan.replicas, *rewards):
        gpu = part.gpu
        # the engines of a colocated plan may use the GPUs of ranks
        taken = used if plan.is_colocated and isinstance(part, Replica) else trained | used
        for gpu_id in part.gpu_ids:
            name, _, index = gpu_id.rpartition(":")
            if not name or not index.isdecimal():
                raise UserError(f"--plan: got the GPU id {gpu_id!r}; allowed is MACHINE:INDEX")
            known, num = wanted.get(name, (gpu, 0))
            if gpu_id in taken or known != gpu:
                raise UserError(
                    f"--plan: {gpu_id} is used twice, or its machine has two GPU types: make the plan again"
                )
            taken.add(gpu_id)
            (trained if isinstance(part, Stage) else used).add(gpu_id)
            wanted[name] = (gpu, max(num, int(index) + 1))
    return wanted


def _by_process(stage: Stage | RewardStage) -> list[tuple[str, list[str]]]:
    """Return the GPU type and the GPUs of each process of a stage. The processes of one machine are consecutive."""
    parts = _by_machine(stage.gpu_ids).values()
    if stage.gpu == CPU:
        return [(CPU, own) for own in parts]
    return [(stage.gpu, [gpu_id]) for own in parts for gpu_id in own]


def _workers(
    plan: Plan, machines: Mapping[str, Machine], first: int, owners: Mapping[str, int]
) -> tuple[ProcessSpec, ...]:
    """`owners`: for each GPU that a worker shares with a rank, the GPU's id and the rank's number."""
    # rounded down, because a larger batch might not fit into memory
    slots = [max(1, replica.batch // SLOT_MULTIPLE) * SLOT_MULTIPLE for replica in plan.replicas]
    rates = [replica.share / num for replica, num in zip(plan.replicas, slots, strict=True)]
    mean = sum(rates) / max(1, len(rates)) or 1.0
    specs = []
    for index, (replica, num, rate) in enumerate(zip(plan.replicas, slots, rates, strict=True)):
        parts = _by_machine(replica.gpu_ids)
        if len(parts) > 1:
            _check_parts(f"--plan: replica {index}", replica, parts, machines)
        spec, *others = (
            _process_spec("worker", first + index, replica.gpu, own, machines, owners) for own in parts.values()
        )
        further = tuple(ProcessPart(each.machine, each.gpu_ids, each.resources, each.threads) for each in others)
        spec = msgspec.structs.replace(spec, gpu_ids=replica.gpu_ids, further=further)
        ranks = tuple(owners.get(gpu, -1) for gpu in replica.gpu_ids)
        shape = {"tp": replica.tp, "pp": replica.pp, "ranks": ranks if max(ranks) >= 0 else ()}
        weight = max(rate / mean, 1e-3)
        specs.append(msgspec.structs.replace(spec, slots=num, share=replica.share, weight=weight, **shape))
    return tuple(specs)


def _by_machine(gpu_ids: Sequence[str]) -> dict[str, list[str]]:
    """Group GPU ids by machine, with the machines in the order in which they first appear."""
    found: dict[str, list[str]] = {}
    for gpu_id in gpu_ids:
        found.setdefault(gpu_id.rpartition(":")[0], []).append(gpu_id)
    return found


def _check_parts(who: str, replica: Replica, parts: Mapping[str, list[str]], machines: Mapping[str, Machine]) -> None:
    """Raise UserError if vLLM cannot run a replica with these GPUs on several machines. vLLM starts equally many
    processes on each machine, and the processes of a machine have consecutive ranks. If a replica is on several
    machines, vLLM's CPU build can run only one process on each of them."""
    units = [machines[name].units for name in parts]
    if len({len(own) for own in parts.values()}) > 1 or [*chain(*parts.values())] != list(replica.gpu_ids):
        why = "the same number of consecutive GPUs on each machine"
    elif replica.tp * replica.pp != len(replica.gpu_ids):
        why = f"tp × pp GPUs, which is {replica.tp * replica.pp}"
    elif replica.gpu == CPU and len(replica.gpu_ids) > len(parts):
        why = "one core on each machine"
    elif any(CPU not in own and "GPU" not in own for own in units):
        why = "machines with Ray's resource GPU, so that each process sees only its own GPUs"
    else:
        return
    raise UserError(
        f"{who} uses {', '.join(replica.gpu_ids)}, but a replica on several machines needs {why}: change the plan, or "
        "use machines with more GPUs"
    )


def _process_spec(
    role: Role,
    number: int,
    gpu: str,
    gpu_ids: Sequence[str],
    machines: Mapping[str, Machine],
    shared: Collection[str] = (),
) -> ProcessSpec:
    """`number`: unique among the processes of this role. `shared`: GPUs that another process requests from Ray."""
    where = gpu_ids[0].rpartition(":")[0]
    machine, num = machines[where], sum(gpu not in shared for gpu in gpu_ids)
    resources = {unit: float(num) for unit in machine.units if num}
    # a process requests at most one core, so that the other cores of a GPU machine stay free
    cores = machine.cpus * num / machine.num_gpus
    if CPU not in resources and cores > 0:
        resources[CPU] = int(min(1.0, cores) * 1000) / 1000
    threads = 1 if "GPU" in machine.units else max(1, int(machine.cpus * len(gpu_ids) / machine.num_gpus))
    return ProcessSpec(f"{role}-{number}", role, where, gpu, tuple(gpu_ids), resources, threads)


def check_engines(engine: EngineSettings, workers: Sequence[ProcessSpec], transport: str = "store") -> None:
    """Raise UserError if workers with these engines cannot execute the replicas of the plan. `transport`:
    `weights.transport`."""
    if (spread := next((spec for spec in workers if spec.further), None)) and (
        engine.kind != "vllm" or transport == "store"
    ):
        raise UserError(
            f"--plan: {spread.name} uses the machines {' and '.join(spread.machines)}, but engine.kind is "
            f'"{engine.kind}" and weights.transport is "{transport}"; a replica on several machines needs engine.kind '
            '= "vllm" and weights.transport = "direct" or "sparse"; change them, or plan for machines with more GPUs'
        )
    if engine.kind == "embedded" and any(spec.gpu != CPU and spec.tp * spec.pp > 1 for spec in workers):
        raise UserError(
            '--plan: a replica has several GPUs, but engine.kind = "embedded" uses one; allowed is '
            'engine.kind = "vllm", or a plan with one GPU for each replica'
        )
    if engine.kind != "sglang" or engine.sglang.urls:
        return  # `servers_of` checks the URLs of servers
    url = engine.sglang.url
    if url is None or not is_loopback(urlsplit(url).hostname or ""):
        raise UserError(
            f"engine.sglang.url: got {url}, but with --ray each worker connects to the server on its own machine; "
            "allowed is a URL such as http://127.0.0.1:30000, with a server at this port on each machine with a "
            "replica, or engine.sglang.urls with a URL for each replica"
        )
    machine, count = max(Counter(spec.machine for spec in workers).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise UserError(
            f"--plan: machine {machine} has {count} replicas, but all its workers would use one SGLang server ({url}); "
            "allowed is one replica on each machine, engine.sglang.urls with a URL for each replica, or "
            'engine.kind = "vllm"'
        )


def servers_of(engine: EngineSettings, plan: Plan, infos: Sequence[ServerInfo | str]) -> dict[tuple[str, ...], str]:
    """Map the GPUs of each replica to the URL of its SGLang server. `infos`: for each URL, the server's description of
    itself, or the reason why the server did not answer. Raises UserError if there is not one URL per replica,
    `engine.sglang.url` is set too, a server does not answer, or a server's tensor-parallel or pipeline-parallel size
    differs from that of its replica."""
    urls, key = engine.sglang.urls, "engine.sglang.urls"
    if len(urls) != len(plan.replicas) or len(set(urls)) < len(urls):
        raise UserError(
            f"{key}: got {len(set(urls))} servers, but the plan has {len(plan.replicas)} replicas; give the URL of one "
            "server for each replica, in the plan's order"
        )
    if engine.sglang.url is not None:
        raise UserError(
            f"{key}: got {len(urls)} URLs and engine.sglang.url = {engine.sglang.url}; remove one of the keys"
        )
    wrong = []
    for url, replica, info in zip(urls, plan.replicas, infos, strict=True):
        planned = f"the plan's replica on {', '.join(replica.gpu_ids)} has tp {replica.tp}, pp {replica.pp}"
        if isinstance(info, str):
            wrong.append(f"{url} does not answer ({info})")
        elif (info.tp or replica.tp, info.pp or replica.pp) != (replica.tp, replica.pp):
            wrong.append(f"{url} has tp {info.tp}, pp {info.pp or 'unknown'}, but {planned}")
    if wrong:
        raise UserError(
            f"{key}: {'; '.join(wrong)}: start an SGLang server with the shape of its replica at each URL (--tp, --pp)"
        )
    return {replica.gpu_ids: url for url, replica in zip(urls, plan.replicas, strict=True)}


class PlacementChange(msgspec.Struct, frozen=True):
    """The difference between the running workers and the workers of a new plan."""

    kept: tuple[ProcessSpec, ...]
    """Workers that continue under their previous names, with the shares of the new plan."""
    ended: tuple[ProcessSpec, ...]
    begun: tuple[ProcessSpec, ...]


def change(now: Sequence[ProcessSpec], wanted: Sequence[ProcessSpec]) -> PlacementChange:
    """Return the difference between running and wanted workers. A running worker is kept if a worker of the new plan
    has the same GPUs, shape and slots."""
    left = {_shape(spec): spec for spec in now}
    kept, begun = [], []
    for spec in wanted:
        same = left.pop(_shape(spec), None)
        if same is None:
            begun.append(spec)
        else:
            kept.append(msgspec.structs.replace(spec, name=same.name))
    return PlacementChange(tuple(kept), tuple(left.values()), tuple(begun))


def _shape(spec: ProcessSpec) -> tuple[object, ...]:
    return frozenset(spec.gpu_ids), spec.tp, spec.pp, spec.slots


def without(plan: Plan, machines: frozenset[str]) -> Plan | None:
    """Return the plan without the replicas and the reward models on these machines. The shares of the other replicas
    are scaled so that their sum is 1. Returns None if the trainer uses one of these machines, or if no replica or no
    reward model is left."""
    left = [replica for replica in plan.replicas if not machines & _by_machine(replica.gpu_ids).keys()]
    if not left or machines & _by_machine(plan.training.gpu_ids).keys():
        return None
    total = sum(replica.share for replica in left) or 1.0
    replicas = tuple(msgspec.structs.replace(replica, share=replica.share / total) for replica in left)
    reward = plan.reward
    if reward is not None:
        gpu_ids = tuple(gpu_id for gpu_id in reward.gpu_ids if gpu_id.rpartition(":")[0] not in machines)
        if not gpu_ids:
            return None
        reward = msgspec.structs.replace(reward, gpu_ids=gpu_ids)
    return msgspec.structs.replace(plan, replicas=replicas, reward=reward)
