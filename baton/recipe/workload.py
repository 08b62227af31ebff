"""Read clusters from files, and workloads from files, recipes or recorded runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import BaseModel

from baton.errors import Damaged, UserError
from baton.policy.settings import dtype_on
from baton.recipe.changes import with_current_keys
from baton.recipe.load import load_recipe, parse_recipe
from baton.recipe.recipe import Recipe
from baton.records.metrics import read_metrics
from baton.records.run_directory import RunDirectory
from baton.specs.cluster import Cluster, ClusterSettings
from baton.specs.workload import Workload, WorkloadSettings, constant, measured
from baton.types import Trajectory

Kind = TypeVar("Kind", bound=BaseModel)


def read_cluster(path: Path) -> Cluster:
    """Read a cluster TOML file."""
    return read_settings(ClusterSettings, path).build()


def read_workload(path: Path) -> Workload:
    """Read a workload TOML file; if `path` is a run's directory, measure the workload of the run."""
    if path.is_dir():
        return workload_of_run(path)
    settings = read_settings(WorkloadSettings, path)
    try:
        return settings.build()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def recipe_workload(recipe: Recipe, gpu: str = "") -> Workload:
    """Return the workload of a recipe. A recipe does not determine prompt and response lengths, so all lengths in this
    workload are one token. `max_staleness` is 0 unless the mode is `async`: in the other modes, generation and training
    do not overlap. `engine_context_tokens` is 0 except for the embedded engine, the only engine that allocates its KV
    cache per slot in advance. `gpu`: GPU type of the engines, which determines the dtype for `engine.dtype = "auto"`;
    "" stands for any GPU, and "CPU" for a CPU."""
    rules, algorithm = recipe.rollout.rules(), recipe.algorithm
    width = 4.0 if dtype_on("cpu" if gpu == "CPU" else "cuda", recipe.engine.dtype) == "float32" else 2.0
    return Workload(
        name=recipe.run.name,
        groups=rules.batch_groups,
        group_size=rules.group_size,
        prompt=constant(1),
        output=constant(1),
        max_staleness=rules.max_staleness if rules.mode == "async" else 0,
        epochs=algorithm.num_epochs,
        minibatches=algorithm.num_minibatches,
        forwards_all=recipe.trainer.metrics_of_all_tokens or algorithm.needs_all_tokens,
        backwards_all=algorithm.trains_equal_rewards,
        shares_prompts=recipe.trainer.share_prompts,
        has_proximal_forward=algorithm.num_epochs * algorithm.num_minibatches > 1,
        has_reference=algorithm.has_loss_kl or algorithm.has_reward_kl,
        has_critic=algorithm.advantage == "gae" and algorithm.critic == "separate",
        recompute=recipe.trainer.activation_checkpointing,
        shard_gradients=recipe.trainer.shard_gradients,
        microbatch_tokens=recipe.trainer.max_tokens_per_microbatch,
        reprefills=rules.on_new_version == "resume",
        weight_bytes=width,
        kv_bytes=width,
        max_batch=recipe.engine.slots,
        engine_context_tokens=recipe.engine.max_context_tokens if recipe.engine.kind == "embedded" else 0,
        max_output_tokens=recipe.rollout.max_new_tokens,
    )


def workload_of_run(path: Path, last_steps: int | None = None) -> Workload:
    """Return the workload of a run: measured values if the run has recorded them, otherwise values of its recipe.

    The measured values are the lengths of the recorded trajectories, the reward latency, and the share of groups whose
    rewards are not all equal. `last_steps`: use only this number of steps, the latest steps whose files are not
    damaged; None uses all steps. Raises Damaged if `last_steps` is None and a file is damaged.
    """
    run = RunDirectory.open(path)
    recipe = parse_recipe(Recipe, with_current_keys(run.recipe()), f"{path}/recipe.toml")
    if recipe.multi_turn_task is not None:
        raise UserError(
            f"{path}: task {recipe.multi_turn_task!r} is multi-turn, but a workload describes single-turn responses; "
            "give a workload file with the lengths that you expect"
        )
    lengths = [(len(t.prompt_ids), max(1, t.num_tokens)) for t in _trajectories(run, last_steps)]
    if not lengths:
        raise UserError(f"{path} has no recorded trajectories, so their lengths cannot be measured")
    prompts, outputs = zip(*lengths, strict=True)
    rows = read_metrics(path)
    unequal = [1 - row["reward/zero_std_frac"] for row in rows if "reward/zero_std_frac" in row]
    judged = [row["time/judge"] for row in rows if "time/judge" in row]
    return msgspec.structs.replace(
        recipe_workload(recipe),
        prompt=measured(prompts),
        output=measured(outputs),
        trained_share=max(1e-3, statistics.fmean(unequal)) if unequal else 1.0,
        reward_latency_s=statistics.median(judged) if judged else 0.0,
        reward_concurrency=1_000_000,
    )


def _trajectories(run: RunDirectory, last_steps: int | None) -> Iterator[Trajectory]:
    """Read the trajectories for `workload_of_run`, the latest steps first."""
    num_read = 0
    for step in reversed(run.recorded_steps()):
        if num_read == last_steps:
            return
        try:
            groups = run.groups(step)
        except Damaged:
            if last_steps is None:
                raise
            continue
        num_read += 1
        yield from (member.trajectory for group in groups for member in group.members)


def read_settings(kind: type[Kind], path: Path) -> Kind:
    """Read a TOML file of the given kind. Raises UserError, which names the file."""
    if not path.is_file():
        raise UserError(f"there is no file {path} (relative to {Path.cwd()})")
    return load_recipe(kind, path)
