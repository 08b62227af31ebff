"""Compiles `kernels.c` for this processor, and calls it. Used only with `engine.row_attention` on a CPU."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module

from baton.errors import UserError, first_line

LANES = 16
"""`head_dim` and the number of positions per slot must be multiples of this number."""
_TIMEOUT_S = 120


@cache
def kernels() -> ctypes.CDLL:
    """Compile and load the kernels, once per process. Raises UserError without a working C compiler."""
    source = Path(__file__).with_suffix(".c")
    command = [*shlex.split(os.environ.get("CC", "cc")), "-O3", "-march=native", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory(prefix="baton-kernels-") as scratch:
        library = Path(scratch) / "kernels.so"
        try:
            subprocess.run(
                [*command, str(source), "-o", str(library)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
            found = ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(
                "engine.row_attention: on a CPU it requires a C compiler (GCC or Clang), and "
                f"`{' '.join(command)}` failed ({first_line(error)}); install one, "
                "set CC, or set engine.row_attention = false"
            ) from error
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    found.attend.argtypes, found.attend.restype = [*[pointer] * 6, *[size] * 6, ctypes.c_float], None
    found.rms_norm.argtypes, found.rms_norm.restype = [*[pointer] * 3, *[size] * 2, ctypes.c_float], None
    return found


def replace_norms(model: Module) -> int:
    """Replace the RMS norms of a bfloat16 model on the CPU by a kernel; return how many were replaced. A norm is
    replaced only if the kernel computes the same values up to rounding."""
    found = [m for m in model.modules() if hasattr(m, "variance_epsilon") and _can_replace(m)]
    for norm in found:
        norm.forward = _rms_norm(norm)
    return len(found)


def _can_replace(norm: Module) -> bool:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16 or weight.dim() != 1 or len(weight) % LANES:
        return False
    states = torch.linspace(-3, 2, 4 * len(weight)).to(torch.bfloat16).view(4, -1)
    try:
        with torch.inference_mode():
            return torch.allclose(_rms_norm(norm)(states).float(), norm(states).float(), rtol=2**-6, atol=1e-6)
    except (RuntimeError, TypeError, ValueError):
        return False


def _rms_norm(norm: Module) -> Callable[[Tensor], Tensor]:
    compute, epsilon = kernels().rms_norm, float(cast("float", norm.variance_epsilon))

    def forward(states: Tensor) -> Tensor:
        weight, states = cast("Tensor", norm.weight), states.contiguous()
        assert states.dtype == torch.bfloat16
        out, size = torch.empty_like(states), len(weight)
        compute(states.data_ptr(), weight.data_ptr(), out.data_ptr(), states.numel() // size, size, epsilon)
        return out

    return forward


def attend(query: Tensor, keys: Tensor, values: Tensor, lengths_W: Tensor, scale: float, window: int) -> Tensor:
    """Return the attention [W, heads, head_dim] of one query per row over the first `lengths_W` positions of the row's
    slot.

    `query`: [W, heads, head_dim]. `keys`, `values`: [slots, length, kv_heads, head_dim], contiguous. query, keys and
    values are bfloat16 on the CPU, and `length` and `head_dim` are multiples of `LANES`. `lengths_W`: int32. `window`:
    number of last positions that a query attends to; 0 means all positions.
    """
    width, heads, dim = query.shape
    _, length, kv_heads, _ = keys.shape
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert dim % LANES == length % LANES == 0
    query = query.contiguous()
    out, scores = torch.empty_like(query), torch.empty(heads // kv_heads * length)
    tensors = (query, keys, values, out, lengths_W, scores)
    sizes = (width, length, kv_heads, heads // kv_heads, dim, window)
    kernels().attend(*[tensor.data_ptr() for tensor in tensors], *sizes, scale)
    return out
