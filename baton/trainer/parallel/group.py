"""The trainer's view of its rank group: collectives, and how models are sharded.

The code of a train step is the same for one rank and for many. Every rank receives the whole batch, computes the same
rows, advantages and divisors, and trains its share of the rows (`balance.py`). Ranks exchange only

    parameters and gradients    gathered and summed within forward and backward passes (`policy/sharding.py`)
    sums                        per-token values for the advantages, and metrics
    trouble                     a description of a number that is not finite, sent by any rank
    hidden states, gradients    between neighbouring pipeline stages (`pipeline.py`)

The ranks of a pipeline stage run the same passes in the same order; a rank with fewer microbatches gets idle
microbatches. Only the last stage has scores, losses and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from baton.policy.load import torch_dtype
from baton.policy.sharding import Sharded, local, whole
from baton.policy.stages import StageModel
from baton.policy.stored_tensors import StoredTensors, fill_model
from baton.policy.tensor_parallel import split_products
from baton.trainer.advantages import FloatArray
from baton.trainer.parallel.balance import ALONE, BatchShare
from baton.trainer.parallel.pipeline import Pipeline, transfer
from baton.trainer.parallel.schedule import stage_layers
from baton.trainer.settings import TrainerSettings

Result = TypeVar("Result")

MAX_TEXT_BYTES = 4096
"""Maximum bytes of a string that a rank broadcasts; longer strings are truncated."""


class SingleRank:
    """A single process with unsharded models."""

    is_alone: bool = True
    """True if there is no process group."""
    num_ranks: int = 1
    share: BatchShare = ALONE
    rank: int = 0
    is_first: bool = True
    """True on rank 0, which writes files and logs warnings for all ranks."""
    first_of_stage: int = 0
    pipeline: Pipeline = Pipeline()
    repeated: Collection[str] = ()
    """Names of this rank's parameters that another stage also has. Only the other stage counts them in norms and writes
    them to checkpoints."""

    def shard(self, *modules: torch.nn.Module | None) -> None:
        """Remove the layers of other stages from modules, shard the parameters in place, move them to the rank's
        device, and read parameters on the meta device from files. The first module is the policy. A separate critic,
        whose body is a copy of the policy's, is read from the policy's files."""

    def fill_later(self, model: PreTrainedModel, stored: StoredTensors) -> None:
        """Set the stored tensors that `shard` later reads for `model`, which is on the meta device."""

    def run(self, module: Any, work: Callable[[Any], Result], arrived: torch.Tensor | None = None) -> Result:
        """Run `work` with a module that was passed to `shard`; `work` returns a tensor or a dataclass of tensors.
        `arrived`: output of the previous stage, for the module's forward pass."""
        return work(module)

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare for a backward pass. `is_last`: whether this is the last backward pass before the optimiser step."""

    def after_backward(self) -> None:
        """Reduce the gradients that the backward passes of an update have not reduced."""

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the gradient norm over all pipeline stages, given the norm of this stage's gradients."""
        return norm

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a model's tensor by name. Rank 0 gets the whole tensor; other ranks may get a meta tensor."""
        return whole(tensor)

    def sums(self, values: FloatArray) -> FloatArray:
        """Return the elementwise sums of `values` over the ranks that train different rows: [N]."""
        return values

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        return value

    def all_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the vectors, of any lengths, of all ranks that train different rows, in rank order."""
        return [values]

    def agreed(self, trouble: str | None) -> str | None:
        """Return the same text on every rank: the `trouble` of the lowest rank that passed one, or None if all ranks
        passed None."""
        return trouble

    def of_first(self, text: str) -> str:
        """Return the first rank's text on every rank."""
        return text


class RankGroup(SingleRank):
    """The ranks of torch's process group; models are sharded over them."""

    def __init__(self, device: torch.device, settings: TrainerSettings) -> None:
        """Create the device mesh over torch's process group.

        A pipeline stage consists of consecutive ranks, which form a two-dimensional mesh. Along one dimension of the
        mesh, `trainer.tensor_parallel` consecutive ranks split the matrix products of the same rows; along the other
        dimension, FSDP shards parameters. `trainer.shard_size` consecutive ranks share one copy of the stage's
        parameters; by default, all ranks of the stage share one copy.
        """
        dtype, tensor_parallel = torch_dtype(settings.dtype, device), settings.tensor_parallel
        shard_size, num_stages = settings.shard_size, settings.num_stages
        self.is_alone, self.num_ranks = False, dist.get_world_size()
        self.rank = dist.get_rank()
        self.is_first = self.rank == 0
        self._device = device
        self._stages = settings.stages
        self._ranks_per_stage = self.num_ranks // num_stages
        stage, place = divmod(self.rank, self._ranks_per_stage)
        self.first_of_stage = self.rank - place
        column = range(place, self.num_ranks, self._ranks_per_stage)
        self.pipeline = Pipeline(stage, column, dtype, device)
        num_data = self._ranks_per_stage // tensor_parallel
        shape = num_stages, num_data, tensor_parallel
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("stages", "data", "products"))
        self._column = mesh["stages"]
        self._data, self._products = mesh["data"], mesh["products"]
        self._shards, self._dtype = self._data, dtype
        if shard_size is not None and shard_size < num_data:
            assert tensor_parallel == 1, "TrainerSettings refuses copies of a model with tensor parallelism"
            shape = num_stages, num_data // shard_size, shard_size
            self._shards = init_device_mesh(device.type, shape, mesh_dim_names=("stages", "copies", "shards"))[
                "copies", "shards"
            ]
        self.share = BatchShare(self._data.get_local_rank(), num_data, speeds=settings.speeds)
        self._reduces_each = settings.shard_gradients
        self._sharded: dict[int, Sharded] = {}
        self._cut: dict[int, StageModel] = {}
        self._unsummed: list[tuple[torch.nn.Parameter, Callable[[torch.Tensor], Any]]] = []
        """Parameters whose gradients FSDP does not sum over the ranks, with the functions that sum them in place."""
        self._stored: dict[int, StoredTensors] = {}

    def shard(self, *modules: torch.nn.Module | None) -> None:
        """Remove other stages' layers; apply tensor parallelism and FSDP. Raises UserError for an unsupported model."""
        stored = [self._stored.pop(id(module), None) for module in modules]
        for module, own in zip(modules, stored, strict=True):
            if module is None or id(module) in self._sharded:
                continue
            names: list[str] = []
            shared: Sequence[str] = ()
            if self.pipeline.num_stages > 1:
                assert isinstance(module, PreTrainedModel), "a recipe with stages and a critic is refused"
                layers = stage_layers(self._stages, module.config.get_text_config().num_hidden_layers)
                cut = self._cut[id(module)] = StageModel(module, layers, self.pipeline.stage)
                shared = cut.shared
                if module is modules[0] and self.pipeline.is_last:
                    self.repeated = shared
            model = module if isinstance(module, PreTrainedModel) else getattr(module, "trunk", None)
            if self._products.size() > 1 and model is not None:
                apart = {id(parameter) for parameter in split_products(model, self._products)}
                names = [name for name, parameter in module.named_parameters() if id(parameter) in apart]
            sharded = self._sharded[id(module)] = Sharded(module, self._shards, self._dtype)
            if (weights := own or stored[0]) is not None:
                fill_model(module, weights, self._device)
            sums: tuple[tuple[Sequence[str], Callable[[torch.Tensor], Any]], ...] = (
                (names, partial(dist.all_reduce, group=self._products.get_group())),
                (sharded.unsharded, partial(dist.all_reduce, group=self._data.get_group())),
                (shared, self.pipeline.add_other_end),
            )
            self._unsummed += [(module.get_parameter(name), add) for own_names, add in sums for name in own_names]

    def fill_later(self, model: PreTrainedModel, stored: StoredTensors) -> None:
        self._stored[id(model)] = stored

    def run(self, module: Any, work: Callable[[Any], Result], arrived: torch.Tensor | None = None) -> Result:
        if (cut := self._cut.get(id(module))) is None:
            return self._sharded[id(module)].run(work)
        cut.arrived = arrived
        try:
            return self._sharded[id(module)].run(work)
        finally:
            cut.arrived = None

    def before_backward(self, *, is_last: bool) -> None:
        """Reduce gradients in the last pass of an update; with `trainer.shard_gradients`, in every pass."""
        for sharded in self._sharded.values():
            sharded.sync_gradients(is_last or self._reduces_each)

    def after_backward(self) -> None:
        """Sum the gradients that FSDP does not sum over the ranks. These are the gradients of three kinds of
        parameters: of layers that each rank applies only to its own attention heads, of parameters that FSDP does not
        shard, and of a tied embedding, which is in the first and in the last stage."""
        for parameter, add in self._unsummed:
            if parameter.grad is not None and local(parameter.grad).numel():
                add(local(parameter.grad))

    def total_norm(self, norm: torch.Tensor) -> torch.Tensor:
        if self.pipeline.num_stages == 1:
            return norm
        squares = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squares, group=self._column.get_group())
        return squares.sqrt()

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a tensor within its pipeline stage; then the stage's first rank sends it to rank 0."""
        owner = next((cut.owner_of(name) for cut in self._cut.values()), 0)
        found = whole(tensor) if owner == self.pipeline.stage else torch.empty_like(tensor, device="meta")
        if owner and self.is_first:
            found = torch.empty_like(found, device=self._device)
            transfer([dist.P2POp(dist.irecv, found, owner * self._ranks_per_stage)])
        elif owner and owner == self.pipeline.stage and self.rank == self.first_of_stage:
            transfer([dist.P2POp(dist.isend, found.contiguous(), 0)])
        return found

    def sums(self, values: FloatArray) -> FloatArray:
        # in float64: if only one rank has a value, the other ranks pass 0, and the sum is exactly this value
        found = torch.from_numpy(np.array(values, dtype=np.float64)).to(self._device)
        dist.all_reduce(found, group=self._data.get_group())
        return found.cpu().numpy()

    def largest(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def all_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        own = np.zeros(self.share.size)
        own[self.share.rank] = len(values)
        lengths = [int(length) for length in self.sums(own)]
        if not any(lengths):
            return [values for _ in lengths]
        padded = torch.zeros(max(lengths), dtype=values.dtype, device=self._device)
        padded[: len(values)] = values
        found = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(found, padded, group=self._data.get_group())
        return [each[:length] for each, length in zip(found, lengths, strict=True)]

    def agreed(self, trouble: str | None) -> str | None:
        first = -int(self.largest(-float(self.num_ranks if trouble is None else self.rank)))
        return None if first == self.num_ranks else self._broadcast(trouble or "", first)

    def of_first(self, text: str) -> str:
        return self._broadcast(text, 0)

    def _broadcast(self, text: str, rank: int) -> str:
        data = text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0")
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        dist.broadcast(found, rank)
        return bytes(found.tolist()).rstrip(b"\0").decode(errors="ignore")
