"""The recipe classes: training and warm start, and the checks that concern several sections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from baton.environments.settings import EnvironmentSettings
from baton.policy.settings import LoraSettings, ModelSettings, ScratchSettings
from baton.recipe.sections import CheckpointSettings, EvalSettings, FleetSettings, RunSettings
from baton.recipe.support import check_support
from baton.records.metrics import LogSettings
from baton.rewards.settings import AnswerSettings, JudgeSettings, RewardSettings
from baton.rollout.engine import EngineSettings
from baton.rollout.settings import RolloutSettings, Rules
from baton.settings import Settings
from baton.specs.trainer_shapes import can_train
from baton.swarm.messages import MAX_FRAME_BYTES
from baton.swarm.settings import SwarmSettings
from baton.swarm.verification.policy import InspectionSettings
from baton.tasks.demonstrations import DemonstrationSettings
from baton.tasks.stream import TaskSettings
from baton.trainer.algorithm import AlgorithmSettings, preset_of
from baton.trainer.settings import SftSettings, TrainerSettings
from baton.weights.settings import WeightsSettings


class Recipe(Settings):
    """The recipe of a reinforcement learning run."""

    run: RunSettings
    model: ModelSettings
    task: tuple[TaskSettings, ...]
    answer: AnswerSettings = AnswerSettings()
    reward: tuple[RewardSettings, ...] = (RewardSettings(kind="correct"),)
    judge: JudgeSettings = JudgeSettings()
    environments: EnvironmentSettings = EnvironmentSettings()
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
        """Add the keys of [rollout] that the algorithm's preset sets, unless the recipe sets them."""
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
                "trajectories of a group; use 2 or more, or an algorithm without groups (reinforce_pp, ppo)"
            )
        if any(t.held_out == "none" for t in self.task) and self.eval.enabled and not self.eval.task:
            raise ValueError(
                'task.held_out: got "none", but evaluations use held-out problems; add an [[eval.task]], or set '
                "eval.enabled = false"
            )
        check_support(self.choices())
        self._check_masks()
        self._check_publish_period()
        self._check_transport()
        if self.trainer.moe_replay == "engine" and not self.engine.report_routing:
            raise ValueError(
                "trainer.moe_replay: got 'engine', but engines do not report their routing; set "
                "engine.report_routing = true"
            )
        if self.engine.kind == "vllm" and self.engine.report_routing and self.rollout.mode != "sync":
            raise ValueError(
                "engine.report_routing: got true, but vLLM returns the experts of a response only when it is complete, "
                f"so a response must have one version; set rollout.mode = 'sync' instead of '{self.rollout.mode}', or "
                "engine.report_routing = false"
            )
        if self.engine.kind == "vllm" and self.engine.vllm.is_quantized and self.algorithm.correction == "none":
            raise ValueError(
                "algorithm.correction: got 'none', but engine.vllm.quantization and kv_cache_dtype make the engine's "
                "probabilities differ from the trainer's; use a correction, such as 'token_tis'"
            )
        if self.lora is not None and 0 < self.engine.vllm.lora_rank < self.lora.rank:
            raise ValueError(
                f"engine.vllm.lora_rank: got {self.engine.vllm.lora_rank}, but [lora] trains adapters of rank "
                f"{self.lora.rank}; use at least this rank, or 0 to merge adapters"
            )
        if not can_train(self.trainer.num_stages, 1, has_critic=self.algorithm.advantage == "gae"):
            raise ValueError(
                f"trainer.stages: got {self.trainer.num_stages} stages with algorithm.advantage = 'gae', but a critic "
                "was not tested with stages; use stages = 1 or an algorithm without a critic"
            )
        longest = max(self.rollout.max_new_tokens, self.eval.max_new_tokens or 0)
        if longest >= self.engine.max_context_tokens:
            raise ValueError(
                f"engine.max_context_tokens: got {self.engine.max_context_tokens}, but a prompt with its response has "
                f"up to {longest} tokens; raise the value, or lower max_new_tokens"
            )
        if self.algorithm.num_minibatches > self.rollout.batch_groups:
            raise ValueError(
                f"algorithm.num_minibatches: got {self.algorithm.num_minibatches}, but a batch has only "
                f"rollout.batch_groups = {self.rollout.batch_groups} groups, and minibatches consist of whole groups; "
                "lower num_minibatches"
            )
        return self

    def _check_masks(self) -> None:
        kept, tokens = self.rollout.max_kept, self.engine.report_every_tokens
        if not kept:
            return
        most = MAX_FRAME_BYTES // 2 // (4 * kept)
        if self.swarm.is_on and tokens > most:
            raise ValueError(
                f"engine.report_every_tokens: got {tokens}, but with up to {kept} kept tokens per sampled token "
                f"(rollout.top_p, top_k), a report of the swarm has room for {most} sampled tokens; lower "
                "report_every_tokens or top_k"
            )
        if self.engine.kind == "vllm" and (not self.engine.vllm.return_sampling_mask or self.eval.enabled):
            raise ValueError(
                "rollout.top_p, rollout.top_k: the trainer needs the tokens that vLLM kept, so set "
                "engine.vllm.return_sampling_mask = true; vLLM then cannot evaluate, so also set eval.enabled = false"
            )

    def _check_transport(self) -> None:
        got = self.weights.transport
        if got != "store" and self.engine.kind != "vllm":
            raise ValueError(
                f'weights.transport: got "{got}" with engine.kind = "{self.engine.kind}", but direct transfers use '
                'vLLM\'s weight transfer; use "store", or engine.kind = "vllm"'
            )
        vllm = self.engine.vllm
        has_replicas = self.engine.kind == "vllm" and vllm.replicas > 1
        if has_replicas and got == "store":
            raise ValueError(
                f'engine.vllm.replicas: got {vllm.replicas} with weights.transport = "store", but several engines in '
                'one run load versions directly; use weights.transport = "direct", or replicas = 1 and swarm.workers'
            )
        if has_replicas and (vllm.lora_rank or self.rollout.is_colocated):
            other = "engine.vllm.lora_rank" if vllm.lora_rank else 'rollout.placement = "colocated"'
            raise ValueError(
                f"engine.vllm.replicas: got {vllm.replicas} with {other}, which was never tested; use replicas = 1, or "
                "remove the other key"
            )
        if got == "sparse" and vllm.quantization is not None:
            raise ValueError(
                'weights.transport: got "sparse" with engine.vllm.quantization, but quantised weights '
                'cannot be changed element by element; use "direct"'
            )

    def _check_publish_period(self) -> None:
        every, rules = self.swarm.publish_every, self.rules()
        if every > 1 and not rules.is_swarm:
            raise ValueError(
                f'swarm.publish_every: got {every}, but only a swarm with rollout.mode = "async" may generate with '
                "older versions; set publish_every = 1"
            )
        if rules.is_swarm and every + rules.max_lag - 1 > rules.max_staleness:
            raise ValueError(
                f"swarm.publish_every: got {every} with max_lag {rules.max_lag}, but then tokens are up to "
                f"{every + rules.max_lag - 1} versions old when they are trained, more than rollout.max_staleness = "
                f"{rules.max_staleness}; lower publish_every or max_lag"
            )

    @property
    def multi_turn_task(self) -> str | None:
        """Name of the first multi-turn task; None if all tasks have one turn."""
        return next((task.name for task in self.task if task.environment is not None), None)

    def choices(self) -> dict[str, tuple[str, ...]]:
        """Return the values of this run on the axes of `support.toml` that a recipe determines."""
        trainer = self.trainer
        shapes = {
            "tensor_parallel": trainer.tensor_parallel > 1,
            "stages": trainer.num_stages > 1,
            "copies": (trainer.shard_size or trainer.ranks) < trainer.ranks,
            "ranks": trainer.ranks > 1,
            "compiled": trainer.compile,
        }
        models = ("generative" if each.starts_server else "classifier" for each in self.reward if each.kind == "model")
        places = {"ray": self.fleet.ray, "swarm": self.swarm.is_on, "processes": bool(self.engine.processes)}
        tasks = (*self.task, *self.eval.task)
        sources = dict.fromkeys("episodes" if t.environment else "gym" if t.path is None else "file" for t in tasks)
        return {
            "mode": (self.rollout.mode,),
            "placement": (self.rollout.placement,),
            "engine": (self.engine.kind,),
            "vllm": self.engine.vllm_parts,
            "workers": (next((name for name, applies in places.items() if applies), "in_process"),),
            "trainer": (next((name for name, applies in shapes.items() if applies), "one_process"),),
            "optimizer": (trainer.optimizer,),
            "head": (self.model.head_dtype,),
            "sampling": ("truncated" if self.rollout.max_kept else "whole",),
            "weights": ("full" if self.lora is None else "lora",),
            "transport": (self.weights.transport,),
            "algorithm": (self.algorithm.name,),
            "reward": tuple(dict.fromkeys(models)) or ("scorers",),
            "environment": tuple(sources),
        }

    @property
    def deterministic(self) -> bool | None:
        """Whether torch uses deterministic algorithms. None means that it uses them only without CUDA."""
        asked = self.run.deterministic
        return True if asked is None and self.rollout.mode == "sync" else asked

    @property
    def num_fetchable_versions(self) -> int:
        """Number of published versions that the hub keeps. An unfinished trajectory may contain tokens from any of
        these versions, so verification needs them."""
        return self.rules().max_staleness // self.swarm.publish_every + 2

    def checks_reports(self, *, others_join: bool) -> bool:
        """Return whether the hub verifies reported tokens by recomputing their logprobs. With `on_new_version` "keep",
        verification is impossible, because the hub cannot reproduce the KV entries that a worker keeps from older
        versions. `others_join`: whether workers that the run did not start may join."""
        inspection = self.inspection
        is_on = bool(inspection.share or inspection.trusted_share or inspection.first)
        return is_on and (inspection.own or others_join) and self.rules().on_new_version != "keep"

    def rules(self) -> Rules:
        """Return the scheduler's rules. Some come from [rollout]; others depend on the kind of workers."""
        rules, swarm, engine = self.rollout.rules(), self.swarm, self.engine
        if not swarm.is_on:
            is_in_process = engine.kind == "embedded" and not engine.processes
            return replace(rules, may_pause=is_in_process and not self.rollout.is_colocated)
        if rules.mode != "async":
            return rules
        every = swarm.publish_every
        lag = swarm.max_lag if swarm.max_lag is not None else every if rules.max_staleness >= 2 * every - 1 else 0
        return replace(rules, is_swarm=True, max_lag=lag)


class WarmStart(Settings):
    """The recipe of a supervised warm start."""

    run: RunSettings
    output: str
    """Directory to which the model is written."""
    model: ModelSettings | None = None
    scratch: ScratchSettings | None = None
    task: tuple[TaskSettings, ...] = ()
    answer: AnswerSettings = AnswerSettings()
    demonstrations: DemonstrationSettings | None = None
    data: str | None = None
    """JSONL file of demonstrations, each line with `prompt` and `completion`; replaces [demonstrations]."""
    sft: SftSettings = SftSettings()
    eval: EvalSettings = EvalSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _one_of_each(self) -> WarmStart:
        if (self.model is None) == (self.scratch is None):
            raise ValueError("give exactly one of [model] (fine-tune a model) and [scratch] (train a new model)")
        if (self.demonstrations is None) == (self.data is None):
            raise ValueError("give exactly one of [demonstrations] (generated from [[task]]) and data (a file)")
        if self.demonstrations is not None and not self.task:
            raise ValueError("[demonstrations] needs at least one [[task]], from which demonstrations are generated")
        needed = EngineSettings().max_context_tokens
        is_evaluated = self.eval.enabled and bool(self.task or self.eval.task)
        if is_evaluated and self.scratch is not None and self.scratch.max_context_tokens < needed:
            raise ValueError(
                f"scratch.max_context_tokens: got {self.scratch.max_context_tokens}, but evaluations of "
                f"[[task]] use this context and need {needed} tokens; raise it, or set eval.enabled = false"
            )
        return self


class TaskRecipe(BaseModel):
    """The sections of a training or warm start recipe that an evaluation needs; other keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    run: RunSettings
    model: ModelSettings | None = None
    task: tuple[TaskSettings, ...] = ()
    answer: AnswerSettings = AnswerSettings()
    reward: tuple[RewardSettings, ...] = (RewardSettings(kind="correct"),)
    judge: JudgeSettings = JudgeSettings()
    environments: EnvironmentSettings = EnvironmentSettings()
    rollout: RolloutSettings = RolloutSettings()
    engine: EngineSettings = EngineSettings()
    eval: EvalSettings = EvalSettings()
