"""Builds the setting of a simulation from a plan or from a recipe."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from baton.cost.efficiency import Efficiencies
from baton.cost.generate import DeviceClass, class_cost_tokens
from baton.cost.train import compute_s
from baton.errors import UserError
from baton.policy.tokenizer import model_directory
from baton.recipe.load import key_and_value, load_recipe, parse_recipe, set_key
from baton.recipe.recipe import Recipe
from baton.recipe.workload import recipe_workload
from baton.records.run_directory import RunDirectory
from baton.rollout.settings import RolloutSettings
from baton.settings import Settings
from baton.simulator.inputs import EngineSpec, ScoringSpec, Setting, SwarmSpec
from baton.simulator.scripted_trajectories import ScriptedGroup, TrajectoryWork
from baton.simulator.timing import CostSpeed, FlatSpeed, kv_tokens, rewards_differ, train_speed
from baton.specs.cluster import Cluster, Gpu, gpu_types
from baton.specs.model import ModelSpec, read_model
from baton.specs.plan import RATED_SLOTS, Plan, Replica
from baton.specs.workload import Lengths, LengthSettings, Workload
from baton.swarm.leases import LeaseRules

REPORTS_PER_STEP = 20
"""Number of reports per train step in a run without faults. More frequent reports would not change the results."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """User options that replace or supplement the values of a plan or recipe."""

    overrides: Mapping[str, Any] | Sequence[str] = ()
    """Changes of recipe keys: keys with values, or texts such as `rollout.KEY=VALUE`."""
    steps: int | None = None
    correlation: float = 0.0
    drift: float = 0.0
    judge_cv: float = 0.0
    recorded: tuple[ScriptedGroup, ...] = ()
    """Groups of a recorded run. Their lengths replace the distributions of lengths, unless `correlation` or `drift` is
    set."""
    is_detailed: bool = False
    """Whether the workers of a plan report, send heartbeats and time out as in a live run. Required with faults."""

    def also(self, overrides: Sequence[str]) -> SimulationOptions:
        return replace(self, overrides=read_overrides(self.overrides) | read_overrides(overrides))


# ---- a plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanSource:
    """A plan, with its model and workload."""

    plan: Plan
    model: ModelSpec
    work: Workload
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    cluster: Cluster | None = None
    """The plan's cluster, whose links give the bandwidths. If None, the catalogue of GPU types gives the bandwidths."""

    def setting(self, options: SimulationOptions) -> Setting:
        """Return the setting. Each engine is a worker of a swarm, as in a live run of a plan. Raises UserError."""
        plan, work = self.plan, self.work
        overlaps = plan.max_staleness > 0 and not plan.is_colocated
        base: dict[str, Any] = {
            "mode": "async" if overlaps else "sync",
            "batch_groups": work.groups,
            "group_size": work.group_size,
            "max_new_tokens": int(work.output.longest),
        }
        if overlaps:
            base |= {"max_staleness": plan.max_staleness, "on_new_version": "resume" if work.reprefills else "keep"}
        settings = rollout_settings(base, options.overrides)
        rules = settings.rules()
        if rules.mode == "async":
            rules = replace(rules, is_swarm=True, max_lag=min(1, rules.max_staleness))
        work = msgspec.structs.replace(
            work,
            groups=rules.batch_groups,
            group_size=rules.group_size,
            output=_cut(work.output, settings.max_new_tokens),
        )
        training, stage = plan.training, plan.reward
        if stage is not None:
            work = msgspec.structs.replace(work, **stage.timing)
        batch_s = training.compute_s + training.bubble_s
        return Setting(
            rules=rules,
            engines=tuple(self._engine(index, replica) for index, replica in enumerate(plan.replicas)),
            work=_script_work(work, options),
            train=train_speed(self.model, self.work, batch_s, training.time_s - batch_s),
            judges=ScoringSpec(work.reward_latency_s, options.judge_cv, work.reward_concurrency),
            publish_s=0.0,
            cycle_overhead_s=plan.breakdown.cycle_overhead_s,
            num_steps=options.steps or 50,
            swarm=self._swarm(options, restarts=rules.mode == "sync"),
            shares_prefill=work.shared_prefill,
            price_per_h=plan.price_per_h,
            currency=plan.currency,
            notes=self._notes(options),
        )

    def _swarm(self, options: SimulationOptions, *, restarts: bool) -> SwarmSpec:
        breakdown = self.plan.breakdown
        spec = SwarmSpec(LeaseRules(restarts=restarts), fetch_s=breakdown.sync_s - breakdown.cycle_overhead_s)
        if options.is_detailed:
            return spec
        pace_s = max(spec.report_every_s, breakdown.step_s / REPORTS_PER_STEP)
        patient = replace(spec.rules, heartbeat_timeout_s=math.inf, progress_timeout_s=math.inf, starve_s=math.inf)
        return replace(spec, report_every_s=pace_s, heartbeat_s=pace_s, tick_s=pace_s, rules=patient)

    def _notes(self, options: SimulationOptions) -> tuple[str, ...]:
        found = ["each engine loads new weights on its own, in the plan's sync time, and the trainer does not wait"]
        if not options.correlation and not options.recorded:
            found.append("lengths within a group are independent; --correlation changes this")
        rated = [replica for replica in self.plan.replicas if replica.memory_bytes]
        share = min((self._place(replica).efficiency.rollout for replica in rated), default=1.0)
        if share < 1:
            found.append(
                f"the plan reduces the speed of engines to {share:.0%} for interruptions, unequal load and waiting "
                "(efficiency.rollout); the simulation only has those that it simulates, so its engines may be faster"
            )
        return tuple(found)

    def _engine(self, index: int, replica: Replica) -> EngineSpec:
        name = f"{replica.gpu} tp{replica.tp} pp{replica.pp} #{index}"
        count = len(replica.gpu_ids)
        if not replica.memory_bytes:  # the plan was made with a table of rates
            speed = FlatSpeed(0.0, 1 / replica.tokens_per_s)
            slots = replica.batch if replica.batch > 1 else RATED_SLOTS  # earlier versions wrote 1
            return EngineSpec(name, slots, speed, weight=replica.tokens_per_s, num_gpus=count)
        layers = tuple(last - first for first, last in replica.layers)
        place = self._place(replica)
        return EngineSpec(
            name,
            replica.batch,
            CostSpeed(self.model, self.work, place, replica.tp, layers),
            kv_tokens(self.model, self.work, place, replica.tp, layers),
            weight=replica.tokens_per_s / replica.batch,
            num_gpus=count,
        )

    def _place(self, replica: Replica) -> DeviceClass:
        gpu, link, between, latency_s = _gpu_type(replica.gpu, self.cluster), 0.0, 0.0, 2e-5
        if self.cluster is not None:
            own = {gpu_id.rpartition(":")[0] for gpu_id in replica.gpu_ids}
            nodes = [i for i, node in enumerate(self.cluster.nodes) if node.name in own]
            if nodes:
                link = min(self.cluster.nodes[i].link_bytes_per_s for i in nodes)
                pairs = [self.cluster.bytes_per_s[a][b] for a in nodes for b in nodes if a != b]
                between, latency_s = min(pairs, default=link), self.cluster.latency_s
        link = link or gpu.link_bytes_per_s
        return DeviceClass(gpu, link, between or link, latency_s, self.efficiencies.of(gpu.name))


def _gpu_type(name: str, cluster: Cluster | None) -> Gpu:
    known = gpu_types()
    if cluster is not None:
        known |= {node.gpu.name: node.gpu for node in cluster.nodes}
    if name not in known:
        raise UserError(
            f"GPU type {name} of the plan is not in the catalogue; give the plan's cluster file with --cluster"
        )
    return known[name]


class _PlanOverrides(Settings):
    """The sections of a recipe that a simulation of a plan uses."""

    rollout: RolloutSettings


def rollout_settings(base: dict[str, Any], overrides: Mapping[str, Any] | Sequence[str]) -> RolloutSettings:
    """Return the settings of [rollout] after the overrides. Raises UserError for an invalid override."""
    tree: dict[str, Any] = {"rollout": {}}
    for key, value in read_overrides(overrides).items():
        set_key(tree, key, value)
    given = tree["rollout"]
    if isinstance(given, Mapping):
        # `on_new_version` and `max_staleness` of `base` are defaults of the plan's mode; another mode has its own
        if given.get("mode", base["mode"]) != base["mode"]:
            base = {key: value for key, value in base.items() if key not in ("on_new_version", "max_staleness")}
        tree["rollout"] = {**base, **given}
    return parse_recipe(_PlanOverrides, tree, "--plan").rollout


# ---- a recipe --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecipeSource:
    """A recipe that runs on this machine. Each engine process or worker is simulated as one engine."""

    path: Path | Recipe
    """The recipe, or its file."""
    efficiencies: Efficiencies | None = None
    """Efficiencies that `baton profile` measured on this machine. If None, default efficiencies are used."""
    work: Workload | None = None
    """Workload with measured lengths and scoring times. If None, typical lengths are assumed."""
    gpu: str = "CPU"
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def setting(self, options: SimulationOptions) -> Setting:
        """Return the setting. Raises UserError."""
        recipe = self.path
        if isinstance(recipe, Path):
            recipe = load_recipe(Recipe, recipe, read_overrides(options.overrides))
        if recipe.multi_turn_task is not None:
            raise UserError(
                f"{self.path}: task {recipe.multi_turn_task!r} is multi-turn, but the simulator has no environments; "
                "simulate a recipe whose tasks have one turn"
            )
        model = read_model(model_directory(recipe.model.path))
        work, notes = self._work(recipe)
        efficiency = (self.efficiencies or Efficiencies()).of(self.gpu)
        gpu = gpu_types()[self.gpu]
        place = DeviceClass(gpu, gpu.link_bytes_per_s, gpu.link_bytes_per_s, 0.0, efficiency)
        rules, swarm = recipe.rules(), recipe.swarm
        count = max(1, swarm.workers if swarm.is_on else recipe.engine.processes)
        kind = "worker" if swarm.is_on else "engine process"
        speed = CostSpeed(model, work, place, 1, (model.num_layers,))
        classes = class_cost_tokens(model, place) if recipe.model.attention == "sdpa" else math.inf
        threads = recipe.run.threads or self.cores
        overlaps = rules.mode == "async"
        devices = max(1, threads - count) if overlaps else threads
        shared = max(1.0, (devices + count) / self.cores)
        batch_s = compute_s(model, work, place, devices)
        if self.efficiencies is None:
            notes.append(
                "efficiencies are defaults: to measure them, run `baton profile` and give its file with --calibration"
            )
        spec = None
        if swarm.is_on:
            spec = SwarmSpec(
                swarm.lease_rules(restarts=rules.mode == "sync"),
                fetch_s=efficiency.publish_latency_s,
                heartbeat_s=swarm.heartbeat_s,
                report_every_s=swarm.report_every_s,
            )
        return Setting(
            rules=rules,
            engines=tuple(
                EngineSpec(f"{kind} {i}", recipe.engine.slots, speed, class_cost=classes) for i in range(count)
            ),
            work=_script_work(work, options),
            train=train_speed(model, work, batch_s, efficiency.train_overhead_s, efficiency.backward),
            judges=ScoringSpec(work.reward_latency_s, options.judge_cv, work.reward_concurrency),
            publish_s=0.0 if swarm.is_on else efficiency.publish_latency_s,
            cycle_overhead_s=efficiency.cycle_overhead_s,
            num_steps=options.steps or recipe.run.steps,
            publish_every=swarm.publish_every,
            checkpoint_every=recipe.checkpoint.every,
            swarm=spec,
            train_slowdown=shared * efficiency.train_beside if overlaps else 1.0,
            engine_slowdown=shared * efficiency.engine_beside if overlaps else 1.0,
            handover_s=0.0 if swarm.is_on else efficiency.handover_s,
            shares_prefill=work.shared_prefill,
            price_per_h=self.cores * gpu.price_per_h,
            currency=gpu.currency,
            notes=tuple(notes),
        )

    def _work(self, recipe: Recipe) -> tuple[Workload, list[str]]:
        own = recipe_workload(recipe, self.gpu)
        known = self.work
        notes: list[str] = []
        if known is not None:
            changes: dict[str, Any] = {
                key: getattr(known, key)
                for key in ("prompt", "trained_share", "reward_latency_s", "reward_concurrency")
            }
            longest = recipe.rollout.max_new_tokens
            changes["output"] = _cut(known.output, longest)
            if known.output.longest > longest:
                notes.append(f"responses of the workload end after {longest} tokens (rollout.max_new_tokens)")
        else:
            longest = recipe.rollout.max_new_tokens
            mean = max(1.0, longest / 4)
            changes = {
                "prompt": LengthSettings(mean=max(1, min(64, recipe.engine.max_context_tokens - longest))).build(),
                "output": LengthSettings(kind="lognormal", mean=mean, cv=1.0, max=max(longest, mean + 1)).build(),
            }
            notes.append(
                f"lengths are assumed (lognormal, {mean:.0f} tokens on average, at most {longest}): to use measured "
                "lengths, give a run's directory with --workload"
            )
        return msgspec.structs.replace(own, **changes), notes


SettingSource = PlanSource | RecipeSource


def _cut(lengths: Lengths, longest: int) -> Lengths:
    """Return the lengths of responses that end after at most `longest` tokens."""
    return Lengths(tuple(min(length, float(longest)) for length in lengths.values))


def _script_work(work: Workload, options: SimulationOptions) -> TrajectoryWork:
    drawn = TrajectoryWork(work.prompt, work.output, options.correlation, options.drift, work.trained_share)
    if options.correlation or options.drift:
        return drawn
    longest = int(work.output.longest)
    groups = (replace(group, lengths=[min(length, longest) for length in group.lengths]) for group in options.recorded)
    return replace(drawn, recorded=tuple(groups))


def recorded_groups(path: Path) -> tuple[ScriptedGroup, ...]:
    """Return a run's recorded groups in the order in which they were opened. Raises UserError if the path has no
    run."""
    run = RunDirectory.open(path)
    groups = sorted((g for step in run.recorded_steps() for g in run.groups(step)), key=lambda g: g.group_id)
    return tuple(
        ScriptedGroup(
            len(group.members[0].trajectory.prompt_ids),
            tuple(max(1, member.trajectory.num_tokens) for member in group.members),
            rewards_differ(group),
        )
        for group in groups
    )


def read_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return the changed keys with their values. A key without a section is a key of [rollout]."""
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(key_and_value, overrides)
    return {key if "." in key or key in Recipe.model_fields else f"rollout.{key}": value for key, value in pairs}
