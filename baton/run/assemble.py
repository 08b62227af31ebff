"""Construct all parts of a run from its recipe, and connect them."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from blake3 import blake3
from msgspec.structs import replace
from safetensors.torch import save_file

from baton.environments.pool import EnvironmentPool
from baton.environments.token_bridge import TokenBridge
from baton.errors import UserError, first_line
from baton.files import writing
from baton.policy.load import end_ids, load_model, torch_device, torch_dtype
from baton.policy.settings import ModelSettings
from baton.policy.threads import set_up_threads
from baton.policy.tokenizer import Tokenizer, load_tokenizer
from baton.recipe.changes import with_current_keys
from baton.recipe.load import load_recipe, parse_recipe
from baton.recipe.recipe import Recipe, TaskRecipe
from baton.recipe.shipped import find
from baton.recipe.support import experimental_parts
from baton.records.evaluation import Evaluation
from baton.records.journal import Journal
from baton.records.lease_trace import LeaseTrace
from baton.records.metrics import MetricsWriter, WeightsAndBiases, start_wandb
from baton.records.predictions import Predictions, RunPredictions, read_predictions
from baton.records.run_directory import RunDirectory, without_none
from baton.records.run_lock import RunLock
from baton.records.trace import BEGIN, TraceWriter
from baton.rewards.functions import PASSED
from baton.rewards.pool import Launch
from baton.rewards.scorer import RewardScorer, require_judged
from baton.rewards.settings import RewardSettings
from baton.rollout.controller import RolloutController
from baton.rollout.engine import Engine, Resident
from baton.rollout.engines.embedded.engine import EmbeddedEngine
from baton.rollout.engines.factory import engine_of_model
from baton.rollout.episodes import EnvironmentInbox, EpisodePlayer, EpisodeRules, EpisodeSetup, ErrorBudget
from baton.rollout.eval_rollout import EvalRollout
from baton.rollout.processes.pool import EnginePool
from baton.rollout.processes.protocol import Start
from baton.rollout.replicas import ReplicaTransport
from baton.rollout.transport import STEPS, LocalTransport, WorkerTransport
from baton.rollout.worker_client import SeededSampling, WorkerClient
from baton.run.device_sharing import DeviceSharing
from baton.run.devices import direct_transfer, environment_with, layout_of, placed_rewards, visible
from baton.run.dry_run import check_room, choices_with
from baton.run.evaluation import Evaluator
from baton.run.hosting import check_swarm, open_swarm
from baton.run.loop import Loop, LoopState, Observer, SavedCheckpoint
from baton.run.resume import ResumePoint, checkpoint_writer, open_run, resume_point, with_dtypes, with_revisions
from baton.run.tokenization import PromptEncoder, ResponseScorer, TokenizedPrompts
from baton.run.trajectories import write_responses
from baton.stop import StopRequest
from baton.swarm.supervisor import WorkerSupervisor
from baton.tasks.environment import EnvironmentTask
from baton.tasks.prompt_lengths import measure
from baton.tasks.stream import PromptStream, TaskMixture
from baton.trainer.checkpoint import newest_intact_checkpoint
from baton.trainer.factory import make_trainer
from baton.trainer.local_trainer import LocalTrainer
from baton.trainer.parallel.local_ranks import LocalRanks
from baton.trainer.parallel.messages import Ranks, TrainerSetup
from baton.trainer.parallel.ranked_trainer import REQUEST_TIMEOUT_S, RankedTrainer
from baton.trainer.trainer import Trainer
from baton.types import PolicyVersion, Prompt, SamplingParams
from baton.weights.direct.settings import DirectTransfer
from baton.weights.version_files import TensorsOfFile

logger = logging.getLogger(__name__)


class RemoteReplicas(Protocol):
    """Starts the vLLM engines of a run (`engine.vllm.replicas`) on other machines."""

    direct: DirectTransfer
    """How versions are sent to these engines."""

    def build(self, index: int, start: Start, direct: DirectTransfer) -> Engine:
        """Start a replica, for the first time or again. Raises UserError, EngineFault and DeadlineExceeded."""


StartRanks = Callable[[int, int], Ranks]
"""Function (number of ranks, torch threads per rank) that starts the ranks of a trainer and returns them."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteParts:
    """The parts of a run that start processes on other machines. By default, there are none."""

    supervisor: WorkerSupervisor | None = None
    """Starts workers."""
    start_ranks: StartRanks | None = None
    """Starts the ranks of the trainer."""
    reward_places: Sequence[tuple[str, Launch]] = ()
    """The device of each process of a reward model, and the function that starts the process."""
    replicas: RemoteReplicas | None = None
    """Starts vLLM engines."""

    @property
    def is_here(self) -> bool:
        """True if no worker, rank or replica runs on another machine."""
        return self.supervisor is None and self.start_ranks is None and self.replicas is None


def set_up_torch(threads: int, *, busy: int = 0, deterministic: bool | None = None) -> int:
    """Set up torch (`set_up_threads`) and return the number of threads. If `threads` is 0, the number of threads is the
    number of available cores minus `busy`. `busy`: number of cores that other processes use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = threads or max(1, allowed - busy)
    set_up_threads(count, deterministic=deterministic)
    return count


def engines_beside(recipe: Recipe) -> int:
    """Return the number of engine processes or workers that generate while the trainer is in a step."""
    return (recipe.swarm.workers or recipe.engine.processes) if recipe.rollout.mode == "async" else 0


def build_engine(recipe: Recipe, version: PolicyVersion, direct: DirectTransfer | None, *, replica: int = 0) -> Engine:
    """Construct the recipe's engine, which loads the recipe's model. `direct`: how the engine receives later versions;
    None if it loads them from files. `replica`: index of this engine among the replicas."""
    layout, device, variables = layout_of(recipe), recipe.model.device, {}
    if layout is not None and layout.engines:
        own = layout.engines[replica]
        if recipe.engine.kind == "vllm":
            device, variables = "cuda", visible(own)
        else:
            device = f"cuda:{own[0]}"
    with environment_with(variables):
        model = recipe.model.model_copy(update={"device": device})
        return engine_of_model(model, recipe.engine, version, direct=direct, sleeps=recipe.rollout.is_colocated)


def _direct(recipe: Recipe, trainer: Trainer | None, replicas: RemoteReplicas | None) -> DirectTransfer | None:
    """Return how versions are sent to engines, and prepare the trainer for this transfer. Return None if engines load
    versions from files."""
    if recipe.weights.transport == "store":
        return None
    is_sparse = recipe.weights.transport == "sparse"
    if replicas is None:
        direct = direct_transfer(layout_of(recipe), is_sparse=is_sparse)
    else:
        direct = dataclasses.replace(replicas.direct, is_sparse=is_sparse)
    if isinstance(trainer, LocalTrainer):
        trainer.takes_digests = False
    if isinstance(trainer, RankedTrainer):
        assert direct.backend != "ipc", "direct_transfer refuses ranks on the engine's GPUs"
        trainer.backend, direct = direct.backend, dataclasses.replace(direct, source=trainer)
    return direct


def _replicas(
    recipe: Recipe,
    version: PolicyVersion,
    trace: LeaseTrace | None,
    direct: DirectTransfer,
    remote: RemoteReplicas | None,
) -> ReplicaTransport:
    """Start several engines that share the trainer's versions."""
    from baton.rollout.engines.vllm.direct import DirectVersions
    from baton.rollout.engines.vllm.remote import whole_versions

    building, model, settings = Lock(), recipe.model, recipe.engine
    versions, on_cpu = DirectVersions(direct, settings.vllm.answer_timeout_s), direct.backend == "gloo"
    direct = dataclasses.replace(direct, versions=versions)
    if remote is not None:
        versions.prepare = whole_versions(model, settings, on_host=on_cpu)
    path = Path(model.path)
    start = Start(
        str(path.absolute()) if path.exists() else model.path,
        "cpu" if on_cpu else "cuda",
        model.attention,
        settings.model_dump(),
        version,
        head_dtype=model.head_dtype,
        is_sparse=direct.is_sparse,
    )

    def build(index: int) -> Engine:
        own = dataclasses.replace(direct, replica=f"replica {index}")
        if remote is not None:
            return remote.build(index, start, own)
        with building:  # environment variables select the GPUs
            return build_engine(recipe, version, own, replica=index)

    return ReplicaTransport(settings.vllm.replicas, build, versions, version, trace=trace)


def build_port(
    recipe: Recipe,
    version: PolicyVersion,
    trace: LeaseTrace | None = None,
    trainer: Trainer | None = None,
    replicas: RemoteReplicas | None = None,
) -> WorkerTransport:
    """Construct the recipe's worker transport: one engine in this process (`build_engine`), several replicas of vLLM,
    or a pool of engine processes. `trainer`: the trainer that produces later versions; direct transfers need it.
    `replicas`: starts replicas on other machines instead of on this machine."""
    if recipe.engine.processes:
        model, settings, timeout_s = recipe.model, recipe.engine.model_dump(), recipe.rollout.stall_timeout_s
        start = Start(model.path, model.device, model.attention, settings, version, head_dtype=model.head_dtype)
        return EnginePool(recipe.engine.processes, start, _save_tensors, timeout_s=timeout_s, trace=trace)
    direct = _direct(recipe, trainer, replicas)
    if replicas is not None or (recipe.engine.kind == "vllm" and recipe.engine.vllm.replicas > 1):
        assert direct is not None, "recipe.py refuses replicas that load versions from files"
        return _replicas(recipe, version, trace, direct, replicas)
    num_steps = STEPS if recipe.engine.kind == "embedded" else 1
    return LocalTransport(build_engine(recipe, version, direct), trace, num_steps=num_steps)


def _save_tensors(tensors: Mapping[str, Any], path: Path) -> Path:
    if isinstance(tensors, TensorsOfFile):
        return tensors.path
    with writing(path):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    return path


def build_loop(
    recipe: Recipe,
    observer: Observer,
    *,
    resume: bool,
    overwrite: bool,
    stop: StopRequest | None = None,
    remote: RemoteParts | None = None,
) -> Loop:
    """Construct all parts of a run. With `resume`, the run starts in the state of its latest checkpoint.

    Locks the run's directory, and resolves the dtypes and the revisions of Hugging Face models and datasets. A request
    through `stop` ends every wait of the loop except the wait for a train step. Raises UserError for mistakes that can
    be detected before the first step. After this error, the run's directory is unchanged.
    """
    path, recorded = recipe.run.path, None
    if not resume:
        RunDirectory.check_free(path, overwrite=overwrite)
    lock = RunLock.take(path, observer.said)
    with ExitStack() as locked:
        locked.callback(lock.release)
        if resume and (path / "run.json").exists():
            recorded = with_current_keys(RunDirectory.open(path).recipe())
        else:  # check again: another process may have written a run before this process took the lock
            RunDirectory.check_free(path, overwrite=overwrite)
        recipe = with_dtypes(with_revisions(recipe, recorded), recorded)
        opened = locked.enter_context(ExitStack())
        parts = remote or RemoteParts()
        loop = _open_loop(recipe, observer, lock, opened, stop or StopRequest(), parts, resume=resume)
        locked.pop_all()
    return loop


def _open_loop(
    recipe: Recipe,
    observer: Observer,
    lock: RunLock,
    opened: ExitStack,
    stop: StopRequest,
    remote: RemoteParts,
    *,
    resume: bool,
) -> Loop:
    """Construct all parts of a run whose directory is locked, and register in `opened` how they are closed."""
    threads, tokenizer = _set_up(recipe, observer, remote)
    encoder = PromptEncoder(tokenizer, (*recipe.task, *recipe.eval.task))
    mixture, judge = _open_tasks(recipe, encoder, stop, opened, remote)
    held_out = _prompts(recipe, mixture, encoder, observer)
    place = resume_point(recipe, observer) if resume else ResumePoint(LoopState(), None)
    predictions = RunPredictions(recipe.run.path, None if place.is_new else read_predictions(recipe.run.path))
    episodes = open_episodes(recipe, mixture, encoder.bridge, observer.said)
    if episodes is not None:
        opened.callback(episodes.close)
    trainer, save_checkpoint = _open_trainer(recipe, tokenizer, lock, opened, remote.start_ranks)
    trace = TraceWriter(recipe.run.path if recipe.log.trace else None)
    trace.mark(BEGIN, step=place.state.step)
    if not recipe.swarm.is_on:  # before `open_run`: an error of an engine leaves the run's directory unchanged
        port = build_port(recipe, trainer.version, LeaseTrace(trace), trainer, remote.replicas)
        opened.callback(port.close)
    wandb = start_wandb(recipe.run.path, recipe.log, without_none(recipe.model_dump(mode="json")), is_new=place.is_new)
    if wandb is not None:
        opened.callback(wandb.close)
    run = open_run(recipe, lock, trainer, tokenizer, place, threads)
    if recipe.swarm.is_on:  # after `open_run`: the hub keeps files in the run's directory
        port = open_swarm(recipe, run.path, tokenizer, trainer.version, observer.said, trace, remote.supervisor)
        opened.callback(port.close)
    metrics, journal = _open_records(recipe, run, lock, place, wandb, opened)
    most_tokens = recipe.engine.max_context_tokens
    worker = WorkerClient(port, recipe.rollout.stall_timeout_s, max_context_tokens=most_tokens, stop=stop)
    sampling = SeededSampling(recipe.rollout.sampling(), recipe.run.seed)
    player = None if episodes is None else EpisodePlayer(episodes, sampling)
    stream = PromptStream(mixture, recipe.run.seed, place.state.position)
    prompts, scorer = TokenizedPrompts(stream, encoder), ResponseScorer(judge, tokenizer, trace)
    rollout = EvalRollout(worker, episodes)
    return Loop(
        recipe=recipe,
        run=run,
        lock=lock,
        opened=opened,
        stream=stream,
        judge=judge,
        port=port,
        evaluator=Evaluator(held_out, encoder, judge, rollout, recipe.eval.samples, mixture.samples),
        controller=RolloutController(worker, recipe.rules(), prompts, scorer, sampling, journal, player),
        journal=journal,
        trainer=trainer,
        predictions=predictions,
        save_checkpoint=save_checkpoint,
        metrics=metrics,
        observer=observer,
        state=place.state,
        last_checkpoint=place.checkpoint,
        stop=stop,
        peak_memory=trainer.peak_memory if isinstance(trainer, LocalTrainer) else dict,  # ranks measure their own
        sharing=_device_sharing(recipe, remote.supervisor or port, trainer),
        trace=trace,
    )


def _set_up(recipe: Recipe, observer: Observer, remote: RemoteParts) -> tuple[int, Tokenizer]:
    """Set up torch, load the tokenizer, and check the recipe against this machine. Return the number of torch threads
    and the tokenizer. Raises UserError."""
    for note in recipe.algorithm.notes(recipe.rollout.model_dump()):
        observer.said(note)
    if recipe.fleet.ray and remote.supervisor is None and remote.replicas is None:
        raise UserError("fleet.ray: got true, but `baton train --ray` sets this key; remove it")
    if recipe.swarm.is_on:
        check_swarm(recipe, remote.supervisor)
    threads = set_up_torch(recipe.run.threads, busy=engines_beside(recipe), deterministic=recipe.deterministic)
    tokenizer = load_tokenizer(recipe.model.path)
    if recipe.checkpoint.background and remote.start_ranks is not None:
        raise UserError(
            "checkpoint.background: got true, but the trainer's ranks may be on other machines, which do not share "
            "this machine's memory; with --ray, set it to false"
        )
    config, _ = check_room(recipe, is_here=remote.is_here)
    if parts := experimental_parts(choices_with(recipe, config)):
        observer.said(f"experimental: {'; '.join(parts)}")
    return threads, tokenizer


def _open_tasks(
    recipe: Recipe, encoder: PromptEncoder, stop: StopRequest, opened: ExitStack, remote: RemoteParts
) -> tuple[TaskMixture, RewardScorer]:
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, recipe.eval.task, encoder.tool_format)
    opened.callback(mixture.close)
    mixture.stop_draws(stop.check)
    rewards = placed_rewards(recipe, layout_of(recipe)) if remote.is_here else recipe.reward
    judge = RewardScorer(mixture.scored_tasks, rewards, mixture.answers, recipe.judge, remote.reward_places)
    opened.callback(judge.close)
    return mixture, judge


def _open_trainer(
    recipe: Recipe, tokenizer: Tokenizer, lock: RunLock, opened: ExitStack, start_ranks: StartRanks | None
) -> tuple[Trainer, Callable[[LoopState], Callable[[], SavedCheckpoint]]]:
    """Return the trainer, and the function that saves a checkpoint (`Loop.save_checkpoint`)."""
    own = blake3(str(recipe.run.path.resolve()).encode()).hexdigest(length=8)  # runs may share the directory
    publish_in = recipe.weights.files_in(recipe.run.path) / f".{recipe.run.name[:40]}.{own}.versions.unfinished"
    trainer = build_trainer(recipe, tokenizer, start_ranks, publish_in)
    opened.callback(trainer.close)
    # raises UserError for `checkpoint.background` without /dev/shm, so it comes before `open_run`
    save_checkpoint = checkpoint_writer(recipe, RunDirectory(recipe.run.path, lock), trainer)
    if recipe.rollout.is_colocated:  # the engine, which is constructed next, needs the memory
        assert isinstance(trainer, LocalTrainer | RankedTrainer)
        trainer.sleep()
    return trainer, save_checkpoint


def _open_records(
    recipe: Recipe,
    run: RunDirectory,
    lock: RunLock,
    place: ResumePoint,
    wandb: WeightsAndBiases | None,
    opened: ExitStack,
) -> tuple[MetricsWriter, Journal]:
    metrics = MetricsWriter(
        run.path, resume_step=place.resume_step, log=recipe.log, before_write=lock.check, wandb=wandb
    )
    opened.callback(metrics.close)
    journal = Journal(run.journal, keeps_partials=recipe.rollout.mode != "sync", before_commit=lock.check)
    opened.callback(journal.close)
    return metrics, journal


def train_here(
    recipe: Recipe,
    observer: Observer,
    stop: StopRequest,
    *,
    resume: bool,
    overwrite: bool,
    predictions: Predictions | None = None,
) -> Loop:
    """Run a recipe in this process until the run ends or `stop` is requested. Return the run's closed `Loop`."""
    with _memory_errors(recipe):
        with stop.interrupting():
            loop = build_loop(recipe, observer, resume=resume, overwrite=overwrite, stop=stop)
        try:
            if predictions is not None:
                loop.predictions.replace(predictions, loop.state.step)
            loop.train()
        finally:
            loop.close()
    return loop


@contextmanager
def _memory_errors(recipe: Recipe | TaskRecipe) -> Iterator[None]:
    """Convert an out-of-memory error of the device to a UserError that names the keys to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = (
            f"engine.slots = {recipe.engine.slots} or engine.max_context_tokens = {recipe.engine.max_context_tokens}"
        )
        if isinstance(recipe, Recipe):
            most = recipe.trainer.max_tokens_per_microbatch
            advice += f" (to generate) or trainer.max_tokens_per_microbatch = {most} (to train)"
        raise UserError(
            f"the device is out of memory: {first_line(error)}; lower {advice}, use a smaller model or [lora], or set "
            "trainer.activation_checkpointing = true; a run with a checkpoint continues with --resume"
        ) from error


def _prompts(recipe: Recipe, mixture: TaskMixture, encoder: PromptEncoder, observer: Observer) -> list[Prompt]:
    """Exclude too long prompts from the tasks, and return the held-out prompts. The observer receives a message with
    the number of excluded prompts, and a message if fewer than `eval.num_prompts` prompts are held out."""
    room, seed, wanted = recipe.engine.max_context_tokens, recipe.run.seed, recipe.eval.num_prompts
    with observer.phase("measure prompts", 0) as measured:
        for lengths in measure(mixture, encoder.num_tokens, room, seed=seed, on_measured=measured):
            if lengths.too_long:
                observer.said(f"task {lengths}")
    if not recipe.eval.enabled:
        return []
    held_out = mixture.held_out(wanted, or_fewer=True)
    if len(held_out) < wanted and not mixture.tests:
        observer.said(
            f"evaluations use {len(held_out)} held-out prompts: the tasks have fewer than eval.num_prompts = {wanted}"
        )
    return held_out


def _device_sharing(
    recipe: Recipe, engines: WorkerTransport | WorkerSupervisor, trainer: Trainer
) -> DeviceSharing | None:
    if not recipe.rollout.is_colocated:
        return None
    engine: Any = engines.engine if isinstance(engines, LocalTransport) else engines
    assert isinstance(engine, Resident), "support.toml refuses other colocated engines"
    assert isinstance(trainer, LocalTrainer | RankedTrainer)
    return DeviceSharing(engine, trainer)


def open_episodes(
    recipe: Recipe | TaskRecipe, mixture: TaskMixture, bridge: TokenBridge | None, say: Callable[[str], None]
) -> EpisodeSetup | None:
    """Start the environments of a recipe's multi-turn tasks. Return None if the recipe has no multi-turn task. Raises
    UserError if an environment cannot be loaded."""
    if bridge is None:
        return None
    every = (mixture.tasks | mixture.tests).items()
    specs = {name: task.spec for name, task in every if isinstance(task, EnvironmentTask)}
    if bridge.removes_thoughts:
        say(
            "the chat template removes reasoning from the turns before an observation of role "
            f"{' or '.join(bridge.removes_thoughts)}: the episode then continues in a new path"
        )
    pool = EnvironmentPool(specs, recipe.environments)
    rules = {
        own.name: EpisodeRules(
            own.max_turns,
            own.max_turn_tokens or recipe.rollout.max_new_tokens,
            own.max_observation_tokens,
            own.discount,
            may_replay=own.name not in pool.never_replayed,
        )
        for own in (*recipe.task, *recipe.eval.task)
        if own.name in specs
    }
    say(f"environments: {pool.description}")
    budget = ErrorBudget(recipe.environments.max_failed_share)
    return EpisodeSetup(EnvironmentInbox(pool), bridge, rules, recipe.engine.max_context_tokens, budget)


def build_trainer(
    recipe: Recipe, tokenizer: Tokenizer, start_ranks: StartRanks | None = None, publish_in: Path | None = None
) -> Trainer:
    """Construct the recipe's trainer in this process, or in ranks that `start_ranks` starts. `publish_in`: directory
    for the files of published versions, which the trainer creates."""
    setup = TrainerSetup(
        model_path=recipe.model.path,
        device=recipe.model.device,
        attention=recipe.model.attention,
        head_dtype=recipe.model.head_dtype,
        trainer=recipe.trainer.model_dump(),
        algorithm=recipe.algorithm.model_dump(),
        lora=None if recipe.lora is None else recipe.lora.model_dump(),
        temperature=recipe.rollout.temperature,
        total_steps=recipe.run.steps,
        max_new_tokens=recipe.rollout.max_new_tokens,
        max_staleness=recipe.rules().max_staleness,
        publish_dtype=recipe.weights.published_in(recipe.engine.dtype),
        version=PolicyVersion(secrets.token_hex(4), 0),
        seed=recipe.run.seed,
        deterministic=recipe.deterministic,
    )
    if publish_in is not None:
        shutil.rmtree(publish_in, ignore_errors=True)  # a killed process of this run may have left files
    count = recipe.trainer.ranks
    if count == 1 and start_ranks is None:
        trainer = make_trainer(setup, tokenizer)
        if recipe.swarm.is_on or recipe.engine.processes:
            trainer.publish_in = publish_in
        return trainer
    threads = recipe.run.threads or max(1, torch.get_num_threads() // count)
    if start_ranks is None:
        ranks: Ranks = LocalRanks(count, threads=threads, publish_in=publish_in)
    else:
        ranks = start_ranks(count, threads)
    return RankedTrainer(ranks, setup, REQUEST_TIMEOUT_S)


def evaluated_model(path: Path, recipe_path: Path | None) -> tuple[TaskRecipe, str]:
    """Return the recipe whose tasks evaluate a model, and the path of the model.

    `path` is a run's directory (the run's latest checkpoint is evaluated), a checkpoint, any model directory, or the
    shipped `models/quickstart`. Without `recipe_path`, the tasks come from the run's recipe. Raises UserError if the
    recipe or the checkpoint is missing.
    """
    path = find(path) if path.parts[:1] == ("models",) else path
    run = next((p for p in (path, *path.parents[:3]) if (p / "run.json").is_file()), None)
    if recipe_path is None and run is None:
        raise UserError(f"{path} is not part of a run, so its tasks are unknown: give a recipe with --recipe")
    model_path = path
    if run == path:
        checkpoint = newest_intact_checkpoint(RunDirectory(path).checkpoints, logger.warning)
        if checkpoint is None:
            raise UserError(f"{path} has no complete checkpoint to evaluate")
        model_path = checkpoint
    if recipe_path is None and run is not None:
        recipe = parse_recipe(TaskRecipe, with_current_keys(RunDirectory(run).recipe()), f"{run}/recipe.toml")
    else:
        recipe = load_recipe(TaskRecipe, recipe_path or path / "recipe.toml")
    lost = [r for r in recipe.reward if (r.function or "").startswith("__main__:") and r.function not in PASSED]
    if lost:
        logger.warning(
            "the evaluation omits the rewards %s: only the script that started the training defines their functions",
            ", ".join(r.name for r in lost),
        )
        kept = tuple(r for r in recipe.reward if r not in lost) or (RewardSettings(kind="correct"),)
        recipe = recipe.model_copy(update={"reward": kept})
    return recipe, str(model_path)


def evaluate_recipe(
    recipe: TaskRecipe | Recipe,
    model_path: str,
    sampling: SamplingParams,
    *,
    num_prompts: int | None = None,
    samples: int | None = None,
    default_samples: int = 1,
    write_to: Path | None = None,
) -> list[Evaluation]:
    """Evaluate a model on a recipe's test sets or held-out prompts, and return the results.

    `sampling` has temperature, top_p and top_k. `samples`: number of responses to each prompt; the default is the
    recipe's number for the test set, or `default_samples` if the recipe states no number. `write_to`: file for the
    responses, one JSON object per line. Raises UserError if `samples` or the temperature is too low, or if several
    greedy samples are requested, because these would be equal.
    """
    if samples is not None and samples < 1:
        raise UserError(f"samples: got {samples}, allowed are 1 or more")
    if not 0 <= sampling.temperature < math.inf:
        raise UserError(f"temperature: got {sampling.temperature}, allowed are 0 (greedy) and positive numbers")
    if not sampling.temperature and (samples or 1) > 1:
        raise UserError(
            f"samples: got {samples} at temperature 0, but all greedy responses to a prompt are equal; use 1 sample, "
            "or a temperature above 0"
        )
    longest = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
    sampling = replace(sampling, max_new_tokens=longest, stop=recipe.rollout.stop)
    wanted = num_prompts or recipe.eval.num_prompts

    def chosen(mixture: TaskMixture) -> Sequence[Prompt]:
        return mixture.held_out(wanted, or_fewer=num_prompts is None)

    with open_evaluator(recipe, model_path, chosen, default_samples) as evaluator:
        results, groups = evaluator.evaluate(sampling, version=EVAL.number, samples=samples)
    if write_to is not None:
        write_responses(write_to, evaluator.encoder.tokenizer, groups)
    require_judged(groups, "the evaluation")
    return results


EVAL = PolicyVersion("eval", 0)
"""Policy version of a model that is only evaluated, not trained."""


@contextmanager
def open_evaluator(
    recipe: TaskRecipe | Recipe,
    model_path: str,
    choose: Callable[[TaskMixture], Sequence[Prompt]],
    default_samples: int = 1,
) -> Iterator[Evaluator]:
    """Load a model for evaluation only, as version `EVAL`, and open the tasks and scorers of a recipe. `choose` selects
    the prompts. `default_samples`: number of responses to each prompt whose test set states no number."""
    set_up_torch(recipe.run.threads, deterministic=recipe.run.deterministic)
    tokenizer = load_tokenizer(model_path)
    encoder = PromptEncoder(tokenizer, (*recipe.task, *recipe.eval.task))
    mixture = TaskMixture(recipe.task, recipe.answer, recipe.environments, recipe.eval.task, encoder.tool_format)
    with _memory_errors(recipe), closing(mixture):
        mixture.limit(encoder.num_tokens, recipe.engine.max_context_tokens - 1)
        judge = RewardScorer(mixture.scored_tasks, recipe.reward, mixture.answers, recipe.judge)
        prompts = choose(mixture)
        own = recipe.model or ModelSettings(path=model_path)
        device = torch_device(own.device)
        dtype = torch_dtype(recipe.engine.dtype, device)
        model = load_model(model_path, dtype=dtype, device=device, attention=own.attention, head_dtype=own.head_dtype)
        engine = EmbeddedEngine(model, tokenizer, recipe.engine, EVAL, end_ids(model, tokenizer))
        episodes = open_episodes(recipe, mixture, encoder.bridge, logger.info)
        timeout_s, most_tokens = recipe.rollout.stall_timeout_s, recipe.engine.max_context_tokens
        worker = WorkerClient(LocalTransport(engine), timeout_s, max_context_tokens=most_tokens)
        with judge, closing(episodes) if episodes is not None else nullcontext():
            yield Evaluator(prompts, encoder, judge, EvalRollout(worker, episodes), default_samples, mixture.samples)
