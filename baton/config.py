"""Recipes: one TOML per runnable configuration, dotted overrides, and one clear sentence for each mistake."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baton.errors import UserError
from baton.evaluation import EvalSettings
from baton.loop import CheckpointSettings
from baton.metrics import LogSettings
from baton.policy.settings import LoraSettings, ModelSettings, ScratchSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.settings import RolloutSettings, Rules
from baton.settings import Settings
from baton.support import check_support
from baton.swarm.inspector import InspectionSettings
from baton.swarm.settings import SwarmSettings
from baton.tasks.demonstrations import DemonstrationSettings
from baton.tasks.judging.settings import JudgeSettings
from baton.tasks.rewards import RewardSettings
from baton.tasks.stream import AnswerSettings, TaskSettings
from baton.trainer.algorithm import AlgorithmSettings, preset_of
from baton.trainer.settings import SftSettings, TrainerSettings
from baton.weights.settings import WeightsSettings

logger = logging.getLogger(__name__)


class RunSettings(Settings):
    """[run] name, length and seed."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's directory."""
    directory: str = "runs"
    """Where run directories lie."""
    seed: int = Field(default=0, ge=0)
    """Seed of prompts and sampling noise; the same seed on the same machine gives the same run."""
    steps: int = Field(default=100, ge=1)
    """Train steps."""
    threads: int = Field(default=0, ge=0)
    """Threads of torch on the CPU; 0 takes all cores."""

    @property
    def path(self) -> Path:
        """`directory/name`."""
        return Path(self.directory) / self.name


class FleetSettings(Settings):
    """[fleet] a run that a plan places on a Ray cluster (`--plan`, `--ray`)."""

    max_restarts: int = Field(default=3, ge=0)
    """How often the trainer may be begun again from its last checkpoint after it lost a rank or a machine."""
    replan: bool = True
    """Plan anew when machines come or go; else workers on those that are left go on."""
    slack: float = Field(default=0.02, ge=0)
    """Share of the step time given up to move less when planning anew."""
    cluster: str | None = None
    """Cluster TOML whose links, prices and GPU types hold when planning anew."""
    workload: str | None = None
    """Workload TOML for planning anew; without it what this run has recorded."""
    calibration: str | None = None
    """Efficiencies for planning anew, as `baton profile` writes them."""


class Recipe(Settings):
    """A reinforcement learning run."""

    run: RunSettings
    model: ModelSettings
    task: tuple[TaskSettings, ...]
    answer: AnswerSettings = AnswerSettings()
    reward: tuple[RewardSettings, ...] = (RewardSettings(kind="correct"),)
    judge: JudgeSettings = JudgeSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings | None = None
    swarm: SwarmSettings = SwarmSettings()
    weights: WeightsSettings = WeightsSettings()
    inspection: InspectionSettings = InspectionSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    fleet: FleetSettings = FleetSettings()

    @model_validator(mode="before")
    @classmethod
    def _rollout_of_preset(cls, given: Any) -> Any:
        """Fill in keys of [rollout] that the algorithm's preset sets and the recipe does not."""
        preset = preset_of(given.get("algorithm", "grpo")) if isinstance(given, dict) else None
        if preset is None or not preset.rollout:
            return given
        rollout = given.get("rollout", {})
        if isinstance(rollout, RolloutSettings):
            rollout = {key: getattr(rollout, key) for key in rollout.model_fields_set}
        return {**given, "rollout": {**preset.rollout, **rollout}} if isinstance(rollout, dict) else given

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.rollout.group_size < self.algorithm.fewest_judged:
            raise ValueError(
                f"rollout.group_size: got {self.rollout.group_size}, but {self.algorithm.name} compares the "
                "trajectories of a group and needs at least 2; algorithms without groups are reinforce_pp and ppo"
            )
        check_support(self.choices())
        self._check_publish_period()
        if self.trainer.moe_replay == "engine" and not self.engine.report_routing:
            raise ValueError(
                "trainer.moe_replay: got 'engine', but engines do not report their routing; set "
                "engine.report_routing = true"
            )
        longest = max(self.rollout.max_new_tokens, self.eval.max_new_tokens or 0)
        if longest >= self.engine.max_context_tokens:
            raise ValueError(
                f"engine.max_context_tokens: got {self.engine.max_context_tokens}, but responses of {longest} tokens "
                "and their prompts must fit into it"
            )
        if self.algorithm.num_minibatches > self.rollout.batch_groups:
            raise ValueError(
                f"algorithm.num_minibatches: got {self.algorithm.num_minibatches}, but a batch has only "
                f"rollout.batch_groups = {self.rollout.batch_groups} groups, and {self.algorithm.name} makes each "
                "of its minibatches of whole groups"
            )
        return self

    def _check_publish_period(self) -> None:
        every, rules = self.swarm.publish_every, self.rules()
        if every > 1 and not rules.is_swarm:
            raise ValueError(
                f'swarm.publish_every: got {every}, but only a swarm with rollout.mode = "async" may generate with '
                "another version than the latest; allowed here is 1"
            )
        if rules.is_swarm and every + rules.max_lag - 1 > rules.max_staleness:
            raise ValueError(
                f"swarm.publish_every: got {every} with max_lag {rules.max_lag}, but then tokens are up to "
                f"{every + rules.max_lag - 1} versions old before they are trained; rollout.max_staleness is "
                f"{rules.max_staleness}"
            )

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return what this run is on the axes of `support.toml` that a recipe decides."""
        trainer, swarm = self.trainer, self.swarm
        shapes = {"tensor_parallel": trainer.tensor_parallel > 1, "ranks": trainer.ranks > 1}
        shapes |= {"compiled": trainer.compile, "one_process": True}
        sources = dict.fromkeys("gym" if task.path is None else "file" for task in self.task)
        return {
            "mode": (self.rollout.mode,),
            "placement": (self.rollout.placement,),
            "engine": (self.engine.kind,),
            "workers": ("swarm" if swarm.is_on else "processes" if self.engine.processes else "in_process",),
            "trainer": (next(name for name, is_so in shapes.items() if is_so),),
            "weights": ("full" if self.lora is None else "lora",),
            "algorithm": (self.algorithm.name,),
            "environment": tuple(sources),
        }

    def rules(self) -> Rules:
        """The rules of the rollout side, with what the swarm adds to them."""
        rules, swarm = self.rollout.rules(), self.swarm
        if not swarm.is_on or rules.mode != "async":
            return rules
        every = swarm.publish_every
        lag = swarm.max_lag if swarm.max_lag is not None else every if rules.max_staleness >= 2 * every - 1 else 0
        return replace(rules, is_swarm=True, max_lag=lag)


class WarmStart(Settings):
    """A supervised warm start."""

    run: RunSettings
    output: str
    """Directory that receives the model."""
    model: ModelSettings | None = None
    scratch: ScratchSettings | None = None
    task: tuple[TaskSettings, ...] = ()
    answer: AnswerSettings = AnswerSettings()
    demonstrations: DemonstrationSettings | None = None
    data: str | None = None
    """JSONL file with `prompt` and `completion` in each row, in place of generated demonstrations."""
    sft: SftSettings = SftSettings()
    eval: EvalSettings = EvalSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _one_of_each(self) -> WarmStart:
        if (self.model is None) == (self.scratch is None):
            raise ValueError("give either [model] (continue from a model) or [scratch] (make one), not both")
        if (self.demonstrations is None) == (self.data is None):
            raise ValueError("give either [demonstrations] with [[task]] (generated) or data (a file), not both")
        if self.demonstrations is not None and not self.task:
            raise ValueError("[demonstrations] needs at least one [[task]] to demonstrate")
        return self


class TaskRecipe(BaseModel):
    """What an evaluation needs of a recipe of either kind; the rest is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: RunSettings
    model: ModelSettings | None = None
    task: tuple[TaskSettings, ...]
    answer: AnswerSettings = AnswerSettings()
    reward: tuple[RewardSettings, ...] = (RewardSettings(kind="correct"),)
    judge: JudgeSettings = JudgeSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    eval: EvalSettings = EvalSettings()


Kind = TypeVar("Kind", bound=BaseModel)


def load_recipe(kind: type[Kind], path: Path, overrides: Sequence[str] = ()) -> Kind:
    """Read a recipe file of a kind and apply `a.b=c` overrides. Raises UserError, one line for each mistake."""
    if not path.is_file():
        near = get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"there is no recipe {path} (seen from {Path.cwd()}){hint}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _apply_override(tree, override)
    try:
        recipe = kind.model_validate(tree)
    except ValidationError as error:
        lines = [_sentence(kind, problem) for problem in error.errors()]
        raise UserError("\n".join(f"{path}: {line}" for line in lines)) from error
    model = getattr(recipe, "model", None)
    if not isinstance(model, ModelSettings) or not (Path(model.path) / "run.json").is_file():
        return recipe
    return recipe.model_copy(update={"model": model.model_copy(update={"path": _checkpoint_of_run(Path(model.path))})})


def _checkpoint_of_run(run: Path) -> str:
    """Return the newest checkpoint of a run, which the resolved recipe then names."""
    from baton.trainer.checkpoint import newest_intact_checkpoint  # loads torch, and few recipes name a run

    found = newest_intact_checkpoint(run / "checkpoints", logger.warning)
    if found is None:
        raise UserError(
            f"model.path: the run {run} has no checkpoint; give a model's directory, such as the output of `baton sft`"
        )
    return str(found)


REMOVED = {"weights.path": "workers always fetch versions as chunks"}
"""Keys of earlier recipes, with the reason why nothing replaces them."""
MAY_CHANGE = (
    "run.name",
    "run.directory",
    "eval",
    "checkpoint",
    "log",
    "judge",
    "rollout.placement",
    "rollout.stall_timeout_s",
    "trainer.rank_timeout_s",
    "engine.processes",
    "swarm",
    "weights.store",
    "weights.keep",
    "fleet",
    "weights.chunk_mb",
    "weights.anchor_every",
    "inspection",
)
"""Keys, or whole sections, that a resumed run may change and stay what it was."""
FROM_NEXT_STEP = (
    "run.steps",
    "trainer.lr",
    "trainer.warmup_steps",
    "trainer.decay",
    "trainer.min_lr_frac",
    "trainer.betas",
    "trainer.weight_decay",
    "trainer.max_grad_norm",
    "algorithm.critic_lr",
    "algorithm.value_coef",
    "algorithm.value_clip",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "algorithm.entropy_coef",
    "algorithm.kl_coef",
    "reward.N.weight",
)
"""Keys that a resumed run may change: a new value holds from its next train step on. N is any index."""
CHANGES_BITS = (
    "run.threads",
    "model.device",
    "engine.slots",
    "engine.max_context_tokens",
    "rollout.overprovision",
    "rollout.max_concurrency",
    "trainer.max_tokens_per_microbatch",
    "trainer.packing",
    "trainer.activation_checkpointing",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.shard_gradients",
)
"""Keys that a resumed run may change, at the price of other last bits."""


def changes_of(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return old and new value of each key in which two resolved recipes differ; None where a key is absent."""
    old, new = _leaves(before), _leaves(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and key not in REMOVED]
    return {key: (old.get(key), new.get(key)) for key in keys}


def compare_for_resume(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a sentence for each key whose change makes a resumed run differ from one never stopped.

    Both are resolved recipes. Raises UserError naming the keys that may not change within a run, and those that may.
    """
    said, refused = [], []
    for key, (old, new) in changes_of(before, now).items():
        change = f"resuming with {key} = {new!r} instead of {old!r}"
        holds = re.sub(r"\.\d+\.", ".N.", key) in FROM_NEXT_STEP
        if holds and (key == "algorithm.critic_lr" or None not in (old, new)):
            said.append(f"{change}: it holds from the next train step on")
        elif key in CHANGES_BITS:
            said.append(f"{change}: the last bits may differ from those of a run never stopped")
        elif not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE):
            refused.append(f"{key}: was {old!r}, now {new!r}")
    if refused:
        raise UserError(
            f"a resumed run keeps its recipe, but this changes {'; '.join(refused)}. Undo the change, or begin a new "
            "run from the checkpoint with model.path. What can change: "
            f"{', '.join((*FROM_NEXT_STEP, *CHANGES_BITS))}; and the keys of {', '.join(MAY_CHANGE)}"
        )
    return said


def without_removed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved recipe of a run, which an earlier Baton may have written, without `REMOVED` keys."""

    def kept(tree: Any, prefix: str) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {key: kept(value, f"{prefix}{key}.") for key, value in tree.items() if f"{prefix}{key}" not in REMOVED}

    found: dict[str, Any] = kept(recipe, "")
    return found


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in _leaves(value, f"{prefix}.{key}".strip(".")).items()}
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return {k: v for index, item in enumerate(tree) for k, v in _leaves(item, f"{prefix}.{index}").items()}
    return {prefix: tree}


def load_tasks(path: Path) -> TaskRecipe:
    """Read what an evaluation needs from a recipe of either kind."""
    return load_recipe(TaskRecipe, path)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"override {override!r}: allowed is section.key=value, such as trainer.lr=3e-6")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a text
    *parents, last = key.strip().split(".")
    if parents == ["algorithm"] and isinstance(tree.get("algorithm"), str):
        tree["algorithm"] = {"name": tree["algorithm"]}
    node: Any = tree
    try:
        for parent in parents:
            node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"override {override!r}: the recipe has nothing at {key!r} that could be set") from error


def _sentence(kind: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        if where in REMOVED:
            return f"{where} was removed: {REMOVED[where]}; remove the key"
        known = sorted(_fields_at(kind, problem["loc"][:-1]))
        key = str(problem["loc"][-1])
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"unknown key {where}; {hint}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if problem["type"] != "value_error" else message
    got = problem["input"]
    shown = f": got {got!r}" if where and not isinstance(got, (dict, BaseModel)) else ""
    return f"{where}{shown}, {message}" if shown else f"{where}: {message}" if where else message


def _fields_at(kind: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Known keys of the section that a validation error's location points into."""
    for part in location:
        if isinstance(part, int):
            continue
        annotation = kind.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return []
        kind = nested[0]
    return list(kind.model_fields)
