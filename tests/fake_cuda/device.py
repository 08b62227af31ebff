"""A device "cuda:0" that computes on the CPU and behaves as CUDA does where code can notice.

Operations on tensors of two devices raise, so do `.numpy()` and generators of the CPU, and in deterministic mode the
operations that CUDA then refuses. float32 matrix products round their factors to TF32 if it is allowed. `LOG` counts
kernel launches, and by the line that caused them: waits for the device, copies to it, and indexed writes that
deterministic mode makes slow. Real kernels, streams, pinned memory and NCCL are not emulated.

Requires `guard.cpp`, loaded before torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import baton

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PACKAGE = str(Path(baton.__file__).parent)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_consecutive", "_unique2"}
REFUSED = {"put_", "put", "histc", "nll_loss2d_forward", "kthvalue", "cumsum", "cumsum_"}
"""Operations without a deterministic implementation on CUDA; `cumsum` only of floating-point numbers."""
SLOW = {"index_copy", "index_copy_"}
"""Indexed writes that are about fifteen launches instead of one in deterministic mode."""
LACKING: dict[str, str] = {}
"""Operations that the device does not have, and the beginning of the error."""
INDEXING = {"index", "index_put_", "index_put", "_index_put_impl_"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
NO_KERNEL = {"_unsafe_view", "empty_like", "new_empty", "empty", "empty_strided", "new_empty_strided"}
"""Operations without a kernel: views that do not declare their alias, and allocations."""


class Log:
    """What the device did since the last `reset`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.launches: Counter[str] = Counter()
        """By operation."""
        self.waits: Counter[str] = Counter()
        """Waits of the host for the device, by line and operation. A copy from the host waits, except from pinned
        memory with `non_blocking`."""
        self.copies: Counter[str] = Counter()
        """Copies from the host, by line."""
        self.slow: Counter[str] = Counter()
        """Indexed writes in deterministic mode, by line."""


LOG = Log()


class OnDevice(torch.Tensor):
    """A tensor on the emulated device. `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        found: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CUDA,
        )
        found.held = held
        return found

    def __repr__(self) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Dispatch(TorchDispatchMode):
    """Creates tensors on the device and copies them there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _tensor(original: Any) -> Any:
    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if isinstance(data, OnDevice) or not _is_cuda(device):
            return original(data, *args, device=device, **kwargs)
        _count_copy(waits=True)
        return OnDevice(original(data, *args, **kwargs).detach())

    return tensor


def _new_tensor(original: Any) -> Any:
    def new_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, OnDevice):
            return original(self, *args, **kwargs)
        _count_copy(waits=True)
        return OnDevice(self.held.new_tensor(*args, **kwargs))

    return new_tensor


def _tolist(original: Any) -> Any:
    def tolist(self: torch.Tensor) -> Any:
        if not isinstance(self, OnDevice):
            return original(self)
        LOG.waits[f"{_line()} tolist"] += 1
        return original(self.held)

    return tolist


def _numpy(original: Any) -> Any:
    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, OnDevice):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
        return original(self, *args, **kwargs)

    return numpy


def _pin_memory(original: Any) -> Any:
    def pin_memory(self: torch.Tensor) -> Any:
        found: Any = self.clone()
        found.is_pinned_here = True
        return found

    return pin_memory


def _sdpa(original: Any) -> Any:
    def scaled_dot_product_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (_attention if query.device.type == "cuda" else original)(query, *args, **kwargs)

    return scaled_dot_product_attention


REPLACED: Sequence[tuple[Any, str, Callable[[Any], Any]]] = (
    (torch, "tensor", _tensor),
    (torch, "as_tensor", _tensor),
    (torch.Tensor, "new_tensor", _new_tensor),
    (torch.Tensor, "tolist", _tolist),
    (torch.Tensor, "numpy", _numpy),
    (torch.Tensor, "pin_memory", _pin_memory),
    (torch.nn.functional, "scaled_dot_product_attention", _sdpa),
)
"""Functions that torch implements above its dispatcher. A mode does not reach autograd's thread, where blocks are
computed again."""


def install(*, is_hip: bool = False) -> None:
    """Make torch use the emulated device where it would ask CUDA. `is_hip`: as a build of torch for ROCm, without the
    kernels that such builds may lack."""
    if is_hip:
        torch.version.hip, torch.version.cuda = "6.4", None
        LACKING.update({"_varlen_attn": "attention", "mm.dtype": "gemm input type at::BFloat16 and output type float"})
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "mem_get_info": (80 * 2**30, 80 * 2**30),
        "max_memory_allocated": 0,
        "get_device_name": "emulated",
    }
    for name in ("_lazy_init", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        values[name] = None
    for name, value in values.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    for owner, name, make in REPLACED:
        setattr(owner, name, make(getattr(owner, name)))
    torch.inference_mode = torch.no_grad  # type: ignore[misc]  # wrapped tensors cannot be inference tensors
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # type: ignore[attr-defined]
    torch._C._cuda_isCurrentStreamCapturing = lambda *args, **kwargs: False  # type: ignore[attr-defined]
    torch.__future__.set_swap_module_params_on_conversion(True)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _line() -> str:
    """Return the innermost line of the package that is being executed."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return "outside" if frame is None else f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"


def _count_copy(*, waits: bool) -> None:
    LOG.copies[_line()] += 1
    if waits:
        LOG.waits[f"{_line()} copy from the host"] += 1


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnDevice) else value


def _moved(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) and not isinstance(value, OnDevice) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    own = [leaf for leaf in leaves if isinstance(leaf, OnDevice)]
    name, device = func._schema.name.split("::")[1], kwargs.get("device")
    implicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    if name != "item" and implicit and (own or device is not None):
        with Dispatch():
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    if name in ("_to_copy", "to") and device is not None:
        return _copied(func, args, kwargs)
    if name == "copy_":
        return _overwritten(*args)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if not own:
        if not _is_cuda(device):
            return func(*args, **kwargs)
        LOG.launches[name] += name not in NO_KERNEL
        return tree_map(_moved, func(*args, **{**kwargs, "device": CPU}))
    if device is not None and not _is_cuda(device):  # such as zeros_like(…, device="cpu")
        return func(*tree_map(_held, args), **kwargs)
    overload = func.name().split("::")[1]
    if (lacking := LACKING.get(overload) or LACKING.get(name)) is not None:
        raise RuntimeError(f"{lacking} is not supported for ROCm")
    _check(name, args, leaves)
    if name == "_varlen_attn":
        return _packed_attention(*args)
    if name == "_varlen_attn_backward":
        return _packed_attention_backward(*args)
    assert not name.startswith(("_flash_attention", "_efficient")), name
    kwargs = {key: CPU if key == "device" and value is not None else _held(value) for key, value in kwargs.items()}
    held = tree_map(_held, args)
    if name in PRODUCTS and torch.backends.cuda.matmul.allow_tf32:
        held = tree_map(_tf32, held)
    is_wide = func is torch.ops.aten.mm.dtype  # its output has another dtype, which a CPU does not support
    found = held[0].to(held[2]) @ held[1].to(held[2]) if is_wide else func(*held, **kwargs)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    LOG.launches[name] += not is_view and name not in NO_KERNEL
    if func._schema.is_mutable and isinstance(found, torch.Tensor):
        for tensor in own:
            if tensor.held is found:
                return tensor
    return found if name in WAITS and not isinstance(found, torch.Tensor) else tree_map(_moved, found)


def _check(name: str, args: Any, leaves: Sequence[Any]) -> None:
    """Raise what CUDA would raise, and count what it would wait for."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu': {name} at {_line()}")
    others = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, OnDevice) and t.dim() > 0]
    if others and name not in INDEXING:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} at {_line()}")
    if name in WAITS:
        LOG.waits[f"{_line()} {name}"] += 1
    if name in INDEXING:
        indices = [index for index in args[1] if isinstance(index, torch.Tensor)]
        if any(index.dtype is torch.bool for index in indices):
            LOG.waits[f"{_line()} {name} by a mask"] += 1
        if others:
            _count_copy(waits=True)
    if torch.are_deterministic_algorithms_enabled():
        if name in REFUSED and (not name.startswith("cumsum") or args[0].is_floating_point()):
            raise RuntimeError(f"{name} does not have a deterministic implementation: {_line()}")
        if name in SLOW:
            LOG.slow[f"{_line()} {name}"] += 1


def _copied(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source, target = args[0], torch.device(kwargs["device"])
    own = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    found = func(_held(source), *args[1:], **own, device=CPU)
    if target.type != "cuda":
        if isinstance(source, OnDevice):
            LOG.waits[f"{_line()} copy to the host"] += 1
        return found
    if isinstance(source, OnDevice):
        LOG.launches["_to_copy"] += 1
    else:
        _count_copy(waits=not (kwargs.get("non_blocking") and hasattr(source, "is_pinned_here")))
    return OnDevice(found)


def _overwritten(target: Any, source: Any, non_blocking: bool = False) -> Any:
    _held(target).copy_(_held(source))
    is_free = non_blocking and hasattr(source, "is_pinned_here")
    match isinstance(target, OnDevice), isinstance(source, OnDevice):
        case True, True:
            LOG.launches["copy_"] += 1
        case True, False:
            _count_copy(waits=not is_free)
        case False, True:
            LOG.waits[f"{_line()} copy to the host"] += 1
    return target


def _tf32(value: Any) -> Any:
    """Round a float32 tensor to 10 bits of mantissa."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return value
    return ((value.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cuda")) for tensor in (query, key, value))
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale
    )[0]


def _rows(
    args: Sequence[Any], num: int, offset: int
) -> tuple[list[torch.Tensor], list[tuple[slice, slice]], Callable[[int, int], torch.Tensor], float]:
    """Return the tensors of packed attention, the slices of each row, its mask, and the scale of its scores."""
    tensors = [_held(tensor) for tensor in args[:num]]
    query = tensors[offset]
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    after = [*[_held(value) for value in args[num:]], *[None] * 9]
    is_causal, (scale, window) = after[4], after[5:7] if num == 3 else after[6:8]
    used, window = after[8] if num == 3 else None, window or (-1, -1)
    ends_q, ends_k = after[0].tolist(), after[1].tolist()
    lengths = [end - begin for begin, end in pairwise(ends_k)] if used is None else used.tolist()
    slices = [
        (slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i] + lengths[i])) for i in range(len(ends_q) - 1)
    ]

    def seen(queries: int, keys: int) -> torch.Tensor:
        ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
        found = torch.ones(queries, keys, dtype=torch.bool)
        if is_causal or window[1] >= 0:
            found &= ahead <= max(0, window[1])
        if window[0] >= 0:
            found &= ahead >= -window[0]
        return found

    return tensors, slices, seen, query.shape[-1] ** -0.5 if scale is None else scale


def _by_head(tensor: torch.Tensor, groups: int = 1) -> torch.Tensor:
    return tensor.float().transpose(0, 1).repeat_interleave(groups, 0)


def _packed_attention(*args: Any) -> Any:
    LOG.launches["_varlen_attn"] += 1
    (query, key, value), slices, seen, scale = _rows(args, 3, 0)
    groups, outputs, sums = query.shape[1] // key.shape[1], [], []
    for own, others in slices:
        scores = _by_head(query[own]) @ _by_head(key[others], groups).transpose(1, 2) * scale
        scores = scores.masked_fill(~seen(*scores.shape[1:]), float("-inf"))
        outputs.append((scores.softmax(-1) @ _by_head(value[others], groups)).transpose(0, 1).to(query.dtype))
        sums.append(scores.logsumexp(-1))
    return OnDevice(torch.cat(outputs)), OnDevice(torch.cat(sums, 1)), OnDevice(torch.zeros(2, dtype=torch.uint64))


def _packed_attention_backward(*args: Any) -> Any:
    LOG.launches["_varlen_attn_backward"] += 1
    (of_output, query, key, value, _, _), slices, seen, scale = _rows(args, 6, 1)
    groups, found = query.shape[1] // key.shape[1], [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for own, others in slices:
        q, k, v = _by_head(query[own]), _by_head(key[others], groups), _by_head(value[others], groups)
        gradient = _by_head(of_output[own])
        probabilities = (q @ k.transpose(1, 2) * scale).masked_fill(~seen(q.shape[1], k.shape[1]), float("-inf"))
        probabilities = probabilities.softmax(-1)
        inner = gradient @ v.transpose(1, 2)
        scores = probabilities * (inner - (inner * probabilities).sum(-1, keepdim=True)) * scale
        found[0][own] = (scores @ k).transpose(0, 1).to(query.dtype)
        sums = scores.transpose(1, 2) @ q, probabilities.transpose(1, 2) @ gradient
        for target, each in zip(found[1:], sums, strict=True):
            folded = each.view(key.shape[1], groups, *each.shape[1:]).sum(1)
            target[others] = folded.transpose(0, 1).to(target.dtype)
    return tuple(OnDevice(tensor) for tensor in found)
