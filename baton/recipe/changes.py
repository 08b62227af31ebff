"""Define which keys of its recipe a resumed run may change, and the effect of each change."""

from __future__ import annotations

import re
from typing import Any

from baton.errors import UserError

REMOVED = {
    "weights.path": "workers always fetch versions as chunks",
    "inspection.remembered": "the newest 64 checked trajectories of a worker are always evaluated together",
    "log.trace_mb": "a trace has at most 32 MB; log.trace = false disables it",
    "trainer.rank_timeout_s": "a request to the ranks always has a timeout of 1800 s",
    "judge.load_timeout_s": "a worker process always has 300 s to import its scorers",
    "environments.load_timeout_s": "a process always has 300 s to import its environments",
    "inspection.after_suspect": "after a suspect trajectory, the worker's next 16 are always checked",
    "engine.cuda_graphs": "engine.kind = 'vllm' is the engine for GPUs and uses CUDA graphs",
    "engine.vllm.kv_cache_gb": "on a CPU, the KV cache always fits engine.slots × engine.max_context_tokens",
    "engine.vllm.prefix_caching": "vLLM always prefills common prefixes once",
    "engine.vllm.max_batched_tokens": "vLLM chooses the number of tokens per step",
    "engine.vllm.start_timeout_s": "an engine always has 1800 s to start",
    "engine.sglang.start_timeout_s": "a server always has 1800 s to respond",
    "fleet.max_restarts": "a run on a cluster always restarts its trainer up to 3 times",
    "fleet.slack": "a new plan is always accepted if it moves fewer GPUs and is at most 2 % slower than the fastest",
    "sft.min_lr_frac": "the learning rate always falls to 2 % of sft.lr",
    "sft.betas": "a warm start always uses AdamW with betas 0.9 and 0.98",
    "sft.weight_decay": "a warm start always has a weight decay of 0.05",
    "sft.max_grad_norm": "a warm start always clips the gradient to norm 1",
}
"""Removed key of earlier recipes → why it was removed."""

RENAMED = {
    "swarm.silence_s": "swarm.heartbeat_timeout_s",
    "swarm.wedge_s": "swarm.progress_timeout_s",
    "swarm.absence_s": "swarm.no_worker_timeout_s",
    "swarm.relief": "swarm.backup_lease_factor",
    "weights.anchor_every": "weights.keyframe_every",
}
"""Key of earlier recipes → its new name. Only the recipe of an old run may contain an old name."""


MAY_CHANGE = (
    "run.name",
    "run.directory",
    "eval",
    "checkpoint",
    "log",
    "judge",
    "environments",
    "rollout.placement",
    "rollout.stall_timeout_s",
    "engine.processes",
    "engine.devices",
    "swarm",
    "weights.store",
    "weights.keep",
    "fleet",
    "weights.chunk_mb",
    "weights.transport",
    "weights.keyframe_every",
    "inspection",
    "trainer.metrics_of_all_tokens",
    "trainer.max_mismatch_kl",
    "trainer.max_logprob_diff",
)
"""Keys, and whole sections, that a resumed run may change. In `sync`, such a change does not affect the run's results,
unless a call exceeds a changed limit, such as a timeout."""
MUST_NOT_CHANGE = "environments.max_observation_chars"
"""The only key of a section in `MAY_CHANGE` that must not change, because observations depend on it."""


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
"""Keys that a resumed run may change, with effect from the next train step. `N` matches any index of a list."""


CHANGES_BITS = (
    "run.threads",
    "run.deterministic",
    "model.device",
    "engine.slots",
    "engine.max_context_tokens",
    "rollout.overprovision",
    "rollout.max_concurrency",
    "trainer.max_tokens_per_microbatch",
    "trainer.packing",
    "trainer.share_prompts",
    "trainer.activation_checkpointing",
    "trainer.ranks",
    "trainer.stages",
    "trainer.tensor_parallel",
    "trainer.shard_size",
    "trainer.speeds",
    "trainer.shard_gradients",
)
"""Keys that a resumed run may change. After such a change, the last bits of the run's results may differ."""


def changes_of(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each key that differs between two resolved recipes; None if the key is absent."""
    old, new = _leaves(with_current_keys(before)), _leaves(now)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: (old.get(key), new.get(key)) for key in keys}


def compare_for_resume(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a sentence for each change that makes a resumed run differ from an uninterrupted run. Both arguments are
    resolved recipes. Raises UserError if the two recipes differ in a key that must not change."""
    said, refused = [], []
    for key, (old, new) in changes_of(before, now).items():
        change = f"resuming with {key} = {new!r} instead of {old!r}"
        holds = re.sub(r"\.\d+\.", ".N.", key) in FROM_NEXT_STEP
        if holds and (key == "algorithm.critic_lr" or None not in (old, new)):
            said.append(f"{change}: takes effect at the next train step")
        elif key in CHANGES_BITS:
            said.append(f"{change}: the last bits may differ from those of an uninterrupted run")
        elif key == MUST_NOT_CHANGE or not any(key == one or key.startswith(f"{one}.") for one in MAY_CHANGE):
            refused.append(f"{key}: was {old!r}, now {new!r}")
    if refused:
        raise UserError(
            f"a resumed run keeps its recipe, but this recipe changes {'; '.join(refused)}. Undo the change, or start "
            "a new run from the checkpoint with model.path. A resumed run may change: "
            f"{', '.join((*FROM_NEXT_STEP, *CHANGES_BITS))}; and the keys of {', '.join(MAY_CHANGE)}, except "
            f"{MUST_NOT_CHANGE}"
        )
    return said


def with_current_keys(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved recipe of a run without removed keys, and with the current names of renamed keys."""

    def kept(tree: Any, prefix: str) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {
            str(RENAMED.get(f"{prefix}{key}", key)).rpartition(".")[2]: kept(value, f"{prefix}{key}.")
            for key, value in tree.items()
            if f"{prefix}{key}" not in REMOVED
        }

    found: dict[str, Any] = kept(recipe, "")
    return found


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in _leaves(value, f"{prefix}.{key}".strip(".")).items()}
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return {k: v for index, item in enumerate(tree) for k, v in _leaves(item, f"{prefix}.{index}").items()}
    return {prefix: tree}
