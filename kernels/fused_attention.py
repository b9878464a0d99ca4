"""torch's fused attention with its log-sum-exp, which is needed to merge attention over other keys.

Backends differ in the shape of the log-sum-exp, not in its base: all return it for the scaled scores in nats.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

from kvbench.kernels.attention_choices import AttentionChoice
from kvbench.kernels.attention_states import empty_state
from kvbench.kernels.batch_invariance import is_batch_invariant
from kvbench.kernels.layout import State

Backend = Literal["cudnn", "flash", "efficient", "cpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
"""Backends of fused attention, the fastest first."""
ATEN: Any = torch.ops.aten
SHORT_QUERIES = 128
"""Queries per row up to which cuDNN is used only from `SHORT_CUDNN_VERSION` on."""
SHORT_CUDNN_VERSION = 92400
"""First version of cuDNN, 9.24, that is used for few queries per row."""
FA3_PACKAGE = "flash_attn_interface"
"""Python package of FlashAttention-3."""
MAX_OFFSET = 2**31 - 1
"""Maximum element offset inside a tensor of one call: libraries may index in 32 bits."""
CHANNELS: Mapping[Backend, int] = {"cudnn": 8, "flash": 8, "efficient": 8, "cpu": 1}
"""Required divisor of the head dim, by backend; other head dims are zero-padded."""
BATCH_DEPENDENT = "divides keys by the size of the batch (batch_invariant=true)"
"""Reason against torch's fused attention while batch invariance is on."""


class Request(NamedTuple):
    """Request to a library: head dim, dtype of the queries, queries per row, device."""

    head_dim: int
    dtype: torch.dtype
    queries: int
    device: torch.device


def find_fused_obstacle(backend: Backend, request: Request) -> str | None:
    """Return why a backend of torch (`flash`: the active FlashAttention) cannot serve a request; None if it can."""
    if backend == "cpu":
        return "reads the CPU's memory" if request.device.type == "cuda" else None
    if request.device.type != "cuda":
        return "needs a GPU"
    if backend == "efficient":
        return None
    if request.dtype not in (torch.float16, torch.bfloat16):
        return "needs 16 bits"
    major = torch.cuda.get_device_properties(request.device).major
    if major < 8:
        return "needs a GPU of capability 8.0"
    if backend == "flash":
        return "needs heads of at most 256 channels" if request.head_dim > 256 else None
    return _find_cudnn_obstacle(request, major)


def _find_cudnn_obstacle(request: Request, major: int) -> str | None:
    if major < 9:
        return "needs a GPU of capability 9.0"
    if request.head_dim > 128 or request.head_dim % 8:
        return "needs heads of at most 128 channels, a multiple of 8"
    if request.queries <= SHORT_QUERIES and (torch.backends.cudnn.version() or 0) < SHORT_CUDNN_VERSION:
        return f"needs cuDNN 9.24 for {SHORT_QUERIES} queries or fewer"
    if request.queries == 1 and _is_single_query_disabled():
        return "torch disables single queries for this cuDNN"
    return None


def find_fa3_obstacle(device: torch.device) -> str | None:
    """Return why FlashAttention-3 cannot serve a GPU, or None; if it is installed, activate it in torch, once."""
    if torch.cuda.get_device_properties(device).major != 9:
        return "needs a GPU of capability 9.0"
    active = current_flash_attention_impl()
    if active is None and (problem := _activate_fa3()):
        return problem
    return None if active in (None, "FA3") else f"{active} is active in its place"


def find_flash(device: torch.device) -> str | None:
    """Return the implementation that replaces torch's own FlashAttention on a GPU; None if there is none."""
    find_fa3_obstacle(device)  # activates it
    return current_flash_attention_impl()


@cache
def _activate_fa3() -> str | None:
    """Replace torch's own FlashAttention by FlashAttention-3; return why it is impossible, or None."""
    if find_spec(FA3_PACKAGE) is None:
        return f"{FA3_PACKAGE} is not installed"
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"cannot be activated: {' '.join(str(error).split())}"
    return None


@cache
def _is_single_query_disabled() -> bool:
    """Return whether torch disables cuDNN for single queries; if torch has no such function, assume it does."""
    is_disabled: Callable[[], bool] | None = getattr(torch._C, "_is_cudnn_attention_decode_disabled", None)
    return is_disabled is None or not torch.cuda.is_available() or is_disabled()


def choose_backend(request: Request) -> Backend:
    """Return the fastest available backend, by published rates.

    On an H100 (128 channels, forward) FlashAttention-3 reaches 638 TFLOP/s, cuDNN 609, FlashAttention-2 368
    (arXiv:2407.08608). `flash` is FlashAttention-2 unless another implementation is active.
    """
    request = request._replace(head_dim=request.head_dim + -request.head_dim % 8)  # padded with zero channels
    order = list(BACKENDS)
    if request.device.type == "cuda" and find_flash(request.device):
        order.insert(0, "flash")
    return next(backend for backend in order if find_fused_obstacle(backend, request) is None)


def explain_backend(q: Tensor) -> AttentionChoice:
    """Return the dense backend for q [sequences, heads, queries, D] on a GPU, and the reason against every other."""
    request = Request(q.shape[3], q.dtype, q.shape[2], q.device)
    chosen = None if is_batch_invariant() else choose_backend(request)
    rest = BATCH_DEPENDENT if chosen is None else f"slower than {chosen} by published rates"
    others = tuple((name, find_fused_obstacle(name, request) or rest) for name in BACKENDS if name != chosen)
    return AttentionChoice(f"dense {chosen or 'kernel'}", others)


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, backend: Backend | None = None
) -> State:
    """Compute dense or causal attention, in several calls if element offsets would exceed `MAX_OFFSET`.

    Args:
        q: [sequences, heads, queries, D]; with grouped queries the heads of one KV head follow each other in
            `queries`: query m belongs to token m % tokens.
        k: [sequences, heads, tokens, D]; without tokens no backend is called.
        v: shaped like k.
        scale: factor on q k^T.
        causal: query m sees the first m % tokens + 1 keys; otherwise all.
        backend: backend to call; None chooses the fastest.

    Returns:
        The state; its output has q's dtype, since every backend rounds it.
    """
    tokens, shape = k.shape[2], q.shape
    if not tokens:
        return empty_state(q)
    backend = backend or choose_backend(Request(shape[3], q.dtype, shape[2], q.device))
    if len(q) > (step := _count_sequences(q, k, v)):
        out, lse = torch.empty_like(q), q.new_empty(shape[:3], dtype=torch.float32)
        for first in range(0, len(q), step):
            at = slice(first, first + step)
            out[at], lse[at] = fused_attention(q[at], k[at], v[at], scale, causal=causal, backend=backend)
        return out, lse
    if missing := -shape[3] % CHANNELS[backend]:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
        out, lse = fused_attention(q, k, v, scale, causal=causal, backend=backend)
        return out[..., : shape[3]], lse
    if causal and shape[2] > tokens:  # separate the query heads, so that each sees its own tokens
        folds = shape[2] // tokens
        q = q.unflatten(2, (folds, tokens)).flatten(1, 2)
        if backend == "efficient":
            k, v = (x.repeat_interleave(folds, 1) for x in (k, v))
    out, lse = _call_backend(backend, q, k, v, scale, causal=causal)
    return out.reshape(shape), lse.reshape(shape[:3]).contiguous()


def _count_sequences(*tensors: Tensor) -> int:
    """Return the sequences of one call: offsets in tensors [sequences, ...] stay below `MAX_OFFSET`."""
    return max(1, MAX_OFFSET // max(max(x.stride(0), x[0].numel()) for x in tensors))


def _call_backend(backend: Backend, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> State:
    """Call torch's operation of a backend; return the output and the log-sum-exp in any layout."""
    if backend == "cudnn":
        call = ATEN._scaled_dot_product_cudnn_attention
        out, lse, *_ = call(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse.view(q.shape[:3])
    if backend == "flash":
        out, lse, *_ = ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    if backend == "efficient":
        call = ATEN._scaled_dot_product_efficient_attention
        out, lse, *_ = call(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]  # padded to a multiple of 32 queries
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse
