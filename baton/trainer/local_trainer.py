"""The trainer on a single device, or on one rank among several."""

from __future__ import annotations

import logging
import platform
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import baton
from baton.errors import TrainingDiverged, UserError
from baton.files import atomic_directory
from baton.policy.adapters import add_adapters
from baton.policy.digest import identity_digest
from baton.policy.head import find_head, set_max_logits
from baton.policy.load import torch_dtype
from baton.policy.logprobs import checkpoint_activations, compute_in
from baton.policy.memory import peak_bytes, peak_memory
from baton.policy.routing import RoutingReplay
from baton.policy.settings import LoraSettings
from baton.policy.sharding import box_of, local
from baton.policy.stored_tensors import TensorFile, write_gathered
from baton.policy.tensors import as_published, published_dtypes, published_tensors, trained_tensors, weights_digest
from baton.policy.tokenizer import Tokenizer
from baton.trainer.alarms import Alarms
from baton.trainer.algorithm import AlgorithmSettings
from baton.trainer.checkpoint import (
    CheckpointState,
    read_critic,
    read_optimizer,
    read_state,
    read_weights,
    saved_digest,
    write_critic,
    write_optimizer,
    write_state,
    write_weights,
)
from baton.trainer.critic import Critic
from baton.trainer.forward import Passes
from baton.trainer.memory import logits_on_gpu
from baton.trainer.microbatches import ANY_SHAPE, FEW_SHAPES, MiniBatch, cut, prepare
from baton.trainer.model_setup import (
    check_critic,
    even_tokens,
    fit_attention,
    fit_sharing,
    trade_time_and_memory,
)
from baton.trainer.offload import Offload
from baton.trainer.optimizer import Schedule, load_optimizer_tensors, set_learning_rate
from baton.trainer.parallel.group import SingleRank
from baton.trainer.samples import TrainingSample, batch_metrics, minibatches
from baton.trainer.settings import TrainerSettings
from baton.trainer.step_metrics import Totals
from baton.trainer.trainer import PublishedWeights, Trainer, new_version_path
from baton.trainer.update import Update, make_learners
from baton.trainer.version_stream import VersionStream
from baton.types import Batch, PolicyVersion
from baton.weights.flat_buffer import flattened
from baton.weights.manifest import identities_of
from baton.weights.version_files import FlatFile

logger = logging.getLogger(__name__)


class LocalTrainer(Trainer):
    """Trains a model, or adapters of a model, on one device.

    The trained parameters are float32 master weights. `trainer.dtype` sets the dtype of autocast, of the parameters
    that ranks gather, and (in `factory.py`) of the frozen weights of a model with adapters. The model stays in eval
    mode, because dropout would make logprobs differ between rollout, proximal pass and update. Only the initialisation
    of adapters is random. Equal batches therefore give bit-identical weights if torch's kernels are deterministic.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        settings: TrainerSettings,
        algorithm: AlgorithmSettings,
        *,
        temperature: float,
        total_steps: int,
        version: PolicyVersion,
        max_new_tokens: int,
        max_staleness: int | None = None,
        reference: PreTrainedModel | None = None,
        lora: LoraSettings | None = None,
        seed: int = 0,
        publish_dtype: torch.dtype = torch.float32,
        parallel: SingleRank | None = None,
    ) -> None:
        """Take ownership of `model`. Raises UserError for settings that contradict each other or do not fit the model.

        `temperature`: sampling temperature of the rollout. `total_steps`: train steps of the run, for the learning
        rate. `max_new_tokens`: maximum response length. `seed`: initialises adapters. `max_staleness`: maximum age, in
        versions, of a token that gets a gradient; None means no limit. `reference`: reference model, which a KL term
        requires; with `lora`, the default is the model without adapters. `parallel`: the group of ranks; each rank
        constructs a trainer from the same models.
        """
        if not temperature > 0:
            raise UserError(f"got temperature {temperature}, allowed are values above 0: training needs sampling")
        self._schedule = Schedule(settings.warmup_steps, settings.decay, total_steps, settings.min_lr_frac)
        self._schedule.check("trainer")
        for name, parameter in model.named_parameters():
            is_exact = parameter.dtype is torch.float32 or lora is not None
            assert is_exact, f"master weights must be float32, but {name} is {parameter.dtype}"
        self.model = model
        model.eval()  # type: ignore[no-untyped-call]
        critic = Critic(model, is_separate=algorithm.critic == "separate") if algorithm.advantage == "gae" else None
        if lora is not None:
            add_adapters(model, lora, seed)
        trade_time_and_memory(model, settings)
        if settings.activation_checkpointing and critic is not None and critic.trunk is not None:
            checkpoint_activations(critic.trunk)
        if algorithm.kl_coef and reference is None:
            assert lora is not None, "a KL term needs a reference model"
            reference = model
        reference = reference if algorithm.kl_coef else None
        self._parallel = parallel or SingleRank()
        self._share = replace(self._parallel.share, even_tokens=even_tokens(model))
        self._parallel.shard(model, reference, critic)  # moves the models to their device
        trunk = None if critic is None else critic.trunk
        is_packed = fit_attention(model, trunk, reference, settings, self._parallel)
        can_share = fit_sharing(model, trunk, reference, settings)
        self._tokenizer, self._settings, self._algorithm = tokenizer, settings, algorithm
        self._version, self._max_new_tokens, self._max_staleness = version, max_new_tokens, max_staleness
        # `find_head` runs a forward pass, which routing replay must not record, so replay is set up later. The
        # forward pass uses autocast only if parameters may be bfloat16: if the model has adapters, or if ranks gather
        # parameters in the compute dtype.
        has_rounded = lora is not None or not self._parallel.is_alone
        dtype = torch_dtype(settings.dtype, model.device) if has_rounded else torch.float32
        with compute_in(dtype, model.device):
            if self._parallel.pipeline.is_last:
                if reference is not None:
                    self._parallel.run(reference, find_head)
                check_critic(self._parallel.run(model, find_head), model, algorithm)
                if model.device.type != "cpu" and settings.num_stages == 1:
                    wide = torch_dtype(settings.dtype, model.device).itemsize
                    set_max_logits(model, logits_on_gpu(model.config, settings, algorithm, lora, value_bytes=wide))
            replay = None
            if settings.moe_replay != "off":
                replay = RoutingReplay(model, self._parallel.run, self._parallel.largest)
        self.passes = Passes(
            model, reference, critic, settings, algorithm, temperature, replay, is_packed, can_share, self._parallel
        )
        self.learners = make_learners(model, critic, settings, algorithm)
        optimizers = [learner.optimizer for learner in self.learners]
        self._offload = Offload(model.device, (model, reference, critic), optimizers)
        self._publish_dtype, self._num_updates = publish_dtype, 0
        self._num_applied = 0
        """Number of updates that a failed train step applied. If above 0, the weights belong to no version, and the
        next call must be `restore`."""
        self._has_agreed = False  # whether engine and trainer have agreed in a train step
        self._peak_tokens = 0
        """Tokens, including padding, of the largest microbatch so far."""
        self._alarms = Alarms(algorithm, settings)
        self.publish_in: Path | None = None
        """Directory in which `publish` writes a version tensor by tensor, for engines in other processes. The trainer
        creates it. None if `publish` copies the weights on the trainer's device."""
        self.takes_digests = True
        """Whether `publish` computes digests. A digest requires a copy of all weights on the host; direct transfers
        need no digests."""

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory used by weights, gradients and moments."""
        return self._offload.held_bytes

    def take_peak_bytes(self) -> int | None:
        """Return the peak bytes of device memory used by this process since the last call; None on a CPU."""
        device = self._offload.device
        return peak_bytes(device) if device.type == "cuda" else None

    def peak_memory(self) -> dict[str, float]:
        """Return two metrics: this process's peak memory, and the number of tokens of its largest microbatch."""
        return {**peak_memory(), "perf/trainer_peak_tokens": float(self._peak_tokens)}

    def sleep(self) -> None:
        """Move all tensors to the host (`offload.py`). `publish`, `save` and `restore` also work during sleep."""
        self._offload.sleep()

    def wake_up(self) -> None:
        """Move all tensors back to the device, as `step` requires."""
        self._offload.wake_up()

    def step(self, batch: Batch) -> dict[str, float]:
        """Run one train step and return its metrics by name. Pipeline stages before the last return no metrics.

        A metric per token is a mean over the trained tokens for which the updates computed logprobs. It is absent if
        there are no such tokens. `policy/mismatch_kl` and `policy/logprob_diff_*` compare engine and trainer on tokens
        that the trainer's current version sampled, if the batch has such tokens. Raises the errors of `Trainer.step`.
        """
        algorithm, start = self._algorithm, self._version
        self._check_not_failed()
        assert batch.step == start.number + 1, f"got the batch of train step {batch.step} at version {start.number}"
        rate = self._schedule.learning_rate(batch.step, 1.0)
        for learner in self.learners:
            set_learning_rate(learner.optimizer, learner.lr * rate)
        oldest = 0 if self._max_staleness is None else max(0, start.number - self._max_staleness)
        samples = minibatches(batch, algorithm, oldest=oldest, longest=self._max_new_tokens)
        parts = [self._cut(part) for part in samples]
        prepared = prepare(parts, self.passes)
        totals = Totals(self.passes.reference is not None, self.passes.critic is not None)
        update = Update(self.passes, self.learners, totals, batch.step, self._max_new_tokens, self._has_agreed)
        try:
            if algorithm.num_updates > 1:
                update.compare(prepared)
            for _ in range(algorithm.num_epochs):
                for part, fixed in zip(parts, prepared, strict=True):
                    update.run(part, fixed)
        except Exception as error:
            for learner in self.learners:
                learner.optimizer.zero_grad()
            self._num_applied = len(totals.grad_norms)
            if not isinstance(error, TrainingDiverged):
                raise
            state = f"the weights are still those of version {start.number}"
            if self._num_applied:
                state = (
                    f"{self._num_applied} of {algorithm.num_updates} updates are applied: no version has these weights"
                )
            raise TrainingDiverged(f"{error}; {state}") from error
        totals.add_ranks(self._parallel)
        self._has_agreed |= totals.distance.current > 0
        self._peak_tokens = max(self._peak_tokens, totals.largest)
        self._num_updates += algorithm.num_updates
        self._version = PolicyVersion(start.lineage, batch.step)
        if not self._parallel.pipeline.is_last:
            return {}
        # These metrics are computed after the updates, because the updates raise TrainingDiverged if a reward is not
        # finite. The statistics of such rewards would fail with another error.
        metrics = {
            **batch_metrics(batch, list(chain.from_iterable(samples)), algorithm, longest=self._max_new_tokens),
            **totals.metrics(),
            "policy/lr": self.learners[0].lr * rate,
        }
        if self._parallel.rank == self._parallel.first_of_stage:
            self._alarms.watch(metrics)
        return metrics

    def _check_not_failed(self) -> None:
        assert not self._num_applied, "a train step failed after some of its updates: restore a checkpoint first"

    def _cut(self, samples: Sequence[TrainingSample]) -> MiniBatch:
        settings, algorithm = self._settings, self._algorithm
        # On a CPU, bfloat16 kernels are compiled for each new shape, so microbatches then have few different shapes.
        device = self.model.device
        makes_kernels = device.type == "cpu" and torch_dtype(settings.dtype, device) is torch.bfloat16
        return cut(
            samples,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            device=device,
            multiples=FEW_SHAPES if makes_kernels else ANY_SHAPE,
            is_flat=algorithm.is_flat,
            skips_flat=not (settings.metrics_of_all_tokens or algorithm.needs_all_tokens),
            keeps_masked=algorithm.needs_model_for_advantages,
            is_packed=self.passes.is_packed,
            shares_prompts=self.passes.can_share,
            share=self._share,
        )

    def publish(self) -> PublishedWeights:
        """Return a copy of the current weights or, with adapters, a copy of the adapter alone. The copy is on the
        trainer's device; if `publish_in` is set, it is mapped from a file. The digest is computed after the cast to the
        published dtypes, so it identifies the tensors that engines load. Raises OSError and StorageFault."""
        if self.publish_in is not None:
            self.publish_in.mkdir(exist_ok=True)
            path = new_version_path(self.publish_in, self._version)
            try:
                version, digests = self.publish_to(path)
                return PublishedWeights.of_file(version, path, digests)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        tensors, dtypes = self._published()
        tensors = as_published(tensors, dtypes)
        if self.takes_digests:
            self._stamp(weights_digest(tensors))
        self._check_not_failed()
        return PublishedWeights(self._version, tensors)

    def stream(self, bucket_bytes: int) -> VersionStream:
        """Return the current weights in buckets, for direct transfers from ranks. Raises UserError if tensors cannot be
        sent one by one."""
        return VersionStream(self.model, self._publish_dtype, self._parallel.whole, bucket_bytes)

    def publish_to(self, path: Path) -> tuple[PolicyVersion, dict[str, str]]:
        """Write the new file `path` on the first rank. It contains the tensors that `publish` would return; the ranks
        gather one tensor at a time. Return the version and, on the first rank, the digest of each tensor by its name.
        Collective: all ranks must call it. Raises OSError and StorageFault."""
        tensors, dtypes = self._published()
        if self._parallel.is_alone:
            entries, _ = flattened(tensors, partial(FlatFile.of_tensors, path), dtypes)
            identities = identities_of(entries)
        elif self._parallel.is_first:
            with TensorFile(path, {name: (dtypes[name], tensor.shape) for name, tensor in tensors.items()}) as file:
                identities = write_gathered(tensors, file.put, self._parallel.whole, dtypes)
        else:
            identities = write_gathered(tensors, None, self._parallel.whole, dtypes)
        self._stamp(identity_digest(identities))
        return self._version, {name: digest for name, _, _, digest in identities}

    def _published(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.dtype]]:
        tensors = published_tensors(self.model)
        return tensors, published_dtypes(self.model, tensors, self._publish_dtype)

    def save(self, directory: Path) -> None:
        """Write a checkpoint (format: `checkpoint.py`). With one process, the write is atomic. With several ranks, each
        rank writes its part into an existing directory, and `RankedTrainer.save` creates this directory atomically."""
        if self._parallel.is_alone:
            with atomic_directory(directory) as unfinished:
                self._write(unfinished)
        else:
            self._write(directory)

    def _write(self, directory: Path) -> None:
        parallel, critic = self._parallel, self.passes.critic
        self._stamp(write_weights(directory, self.model, parallel.whole, is_first=parallel.is_first))
        moments = {n: t for learner in self.learners for n, t in learner.moments(parallel.repeated).items()}
        write_optimizer(directory, moments, None if parallel.is_alone else parallel.rank, parallel.first_of_stage)
        if critic is not None:
            write_critic(directory, critic.state_dict(), parallel.whole, is_first=parallel.is_first)
        state = CheckpointState(
            version=self._version,
            num_updates=self._num_updates,
            libraries=_libraries(),
            num_threads=torch.get_num_threads(),
            num_ranks=parallel.num_ranks,
        )
        if parallel.is_first:
            write_state(directory, self._tokenizer.hf, state)

    def _stamp(self, digest: str) -> None:
        """Set the version's digest on every rank to that of the first rank: only this rank gathers all weights."""
        self._check_not_failed()
        version = self._version
        self._version = PolicyVersion(version.lineage, version.number, self._parallel.of_first(digest))

    def restore(self, directory: Path) -> None:
        """Load a checkpoint. Raises UserError, before anything changes, if the checkpoint does not fit this trainer.
        The version gets the number and the digest of the checkpoint, but not its lineage, because a resumed run has a
        new lineage."""
        known = [learner.parameters for learner in self.learners]
        state = read_state(directory)
        moments = read_optimizer(directory, {name: p for parameters in known for name, p in parameters.items()})
        parts = [(read_weights(directory, self.model), trained_tensors(self.model))]
        if (critic := self.passes.critic) is not None:
            parts.append((read_critic(directory), critic.state_dict()))
        for saved, own in parts:
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            if differing := sorted(dict(saved.shapes.items() ^ shapes.items())):
                raise UserError(
                    f"{directory} holds another model than the trainer: {differing[0]} has shape "
                    f"{saved.shapes.get(differing[0], 'none')} in the checkpoint and "
                    f"{shapes.get(differing[0], 'none')} in the trainer ({len(differing)} tensors differ)"
                )
        parallel = self._parallel
        digest = parallel.of_first(saved_digest(parts[0][0], self.model) if parallel.is_first else "")
        if digest != state.version.digest:
            raise UserError(f"{directory} is damaged: its weights have digest {digest}, not {state.version.digest}")
        elsewhere = {name for name, tensor in parts[0][1].items() if tensor.is_meta}
        moments = {name: tensor for name, tensor in moments.items() if name.partition("/")[2] not in elsewhere}
        if state.num_updates and not moments:
            raise UserError(f"{directory} cannot be resumed: its optimizer state is empty")
        for learner in reversed(self.learners):
            # `apart` also contains moments whose names match no learner. For these moments,
            # `load_optimizer_tensors` raises UserError.
            others = [names for names in known if names is not learner.parameters]
            apart = {n: t for n, t in moments.items() if not any(n.partition("/")[2] in names for names in others)}
            load_optimizer_tensors(learner.optimizer, learner.parameters, apart)
        with torch.no_grad():
            for saved, own in parts:
                for name, tensor in own.items():
                    if not tensor.is_meta:  # another stage has it
                        saved.fill(name, local(tensor), box_of(tensor))
        self._num_updates, self._num_applied = state.num_updates, 0
        self._version = PolicyVersion(self._version.lineage, state.version.number, digest)
        if parallel.is_first:
            _warn_of_other_bits(state, parallel.num_ranks)

    def close(self) -> None:
        """Remove the directory of published versions (`publish_in`)."""
        if self.publish_in is not None:
            shutil.rmtree(self.publish_in, ignore_errors=True)


def _libraries() -> dict[str, str]:
    return {
        "baton": baton.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _warn_of_other_bits(state: CheckpointState, num_ranks: int) -> None:
    made_with = {**state.libraries, "threads": str(state.num_threads), "ranks": str(state.num_ranks)}
    now = {**_libraries(), "threads": str(torch.get_num_threads()), "ranks": str(num_ranks)}
    changed = [f"{name} {made_with.get(name)} → {now[name]}" for name in now if made_with.get(name) != now[name]]
    if changed:
        logger.warning("resuming with %s: the last bits may differ from an uninterrupted run", ", ".join(changed))
