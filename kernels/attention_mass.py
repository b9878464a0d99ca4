"""Attention mass of each cached key, computed without storing the attention matrix."""

import torch
from torch import Tensor

from kvbench.kernels.layout import Layout, Past, fold_rows, pad_rows
from kvbench.kernels.products import onednn_products

CHUNK = 256
"""Queries per step on the CPU, where probabilities of batch x rows x `CHUNK` x keys exist at once; on CUDA none do."""


def attention_scores(
    q: Tensor, k: Tensor, past: Past, scale: float, *, tokens: Tensor | None = None
) -> Tensor:
    """Return the logits of every slot, before the softmax; arguments are those of `attention_mass`.

    Returns:
        float32 [batch, rows, queries, longest + tokens], -inf past the end of a row and for masked keys.
    """
    q = fold_rows(q, len(past.keys), len(past.layout.counts))
    return _compute_scores(q, _join_keys(k, past), _mask_ends(past.layout), scale, tokens, k.shape[2])


def attention_mass(
    q: Tensor,
    k: Tensor,
    past: Past,
    scale: float,
    *,
    power: int = 1,
    lse: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """Return the mean attention probability of every slot over the queries, or the mean of its power.

    Args:
        q: [sequences, heads, queries, D]; heads are the layout's rows, sequence by sequence if each has its own rows.
        k: current keys [sequences, heads, tokens, D].
        past: stored keys; its values are not read.
        scale: factor on q k^T, positive.
        power: 2 for the mean square, from which a variance follows.
        lse: float32 [sequences, heads, queries], contiguous, log-sum-exp of the scores if attention has computed it:
            saves half the work on CUDA, and is not read elsewhere.
        tokens: int [queries], current token of each query, which sees no later ones; None: queries see all tokens.

    Returns:
        float32 [batch, rows, longest + tokens], zero past the end of a row; with power 1 each row sums to 1.
    """
    if q.is_cuda:
        from kvbench.kernels.triton.attention_mass import attention_mass_triton

        return attention_mass_triton(q, k, past, scale, power=power, lse=lse, tokens=tokens)
    q = fold_rows(q, len(past.keys), len(past.layout.counts))
    keys, absent = _join_keys(k, past), _mask_ends(past.layout)
    mass: Tensor | None = None
    for start in range(0, q.shape[2], CHUNK):
        queries = slice(start, start + CHUNK)
        last = None if tokens is None else tokens[queries]
        some = q if q.shape[2] <= CHUNK else q[:, :, queries]
        probabilities = _compute_scores(some, keys, absent, scale, last, k.shape[2]).softmax(-1)
        part = (probabilities if power == 1 else probabilities.pow_(power)).sum(2)
        mass = part if mass is None else mass.add_(part)
    assert mass is not None, "there are no queries"
    return mass.div_(q.shape[2])


def _join_keys(k: Tensor, past: Past) -> Tensor:
    """Return keys float32 [batch, rows, longest + tokens, D], the past rounded to the dtype of the present."""
    if past.joined is not None:
        k = past.joined.read_slots()
        return k.float()
    keys = k
    if past.layout.longest:
        stored = pad_rows(past.keys, past.layout).to(k.dtype)
        keys = torch.cat((stored.view(*k.shape[:2], *stored.shape[2:]), k), 2)
    return fold_rows(keys.float().contiguous(), len(past.keys), len(past.layout.counts))


def _mask_ends(layout: Layout) -> Tensor | None:
    """Return bool [rows, longest], the slots past the end of a row; None if all rows are equally long."""
    return None if layout.uniform else layout.positions < 0


def _compute_scores(
    q: Tensor, keys: Tensor, absent: Tensor | None, scale: float, tokens: Tensor | None, present: int
) -> Tensor:
    """Return the logits of queries over joined keys; the last `present` keys are the current segment's."""
    with onednn_products(q.numel() * keys.shape[2], q.device):
        scores = (q.float() * scale) @ keys.mT
    if absent is not None:
        scores[..., : absent.shape[1]].masked_fill_(absent[:, None], -torch.inf)
    if tokens is not None:
        later = torch.arange(present, device=q.device) > tokens[:, None]
        scores[..., scores.shape[-1] - present :].masked_fill_(later, -torch.inf)
    return scores
