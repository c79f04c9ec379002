"""The calls that `attend` and torch's fused attention were."""

import math

import torch
from torch import Tensor

from regard.record.calls import Call


def fused_call(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """The call that a scaled_dot_product_attention was."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    heads = query.shape[-3] if query.ndim > 2 else 1
    if enable_gqa:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    return attend_call(out, query, key, value, scale=scale, mask=mask, causal=is_causal)


def attend_call(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Call:
    """The call that an `attend` was: q, k, v (…, n, d) as (b, g, n, d)."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    def four(x: Tensor) -> Tensor:
        heads = x.shape[-3] if x.ndim > 3 else 1
        return x.reshape(-1, heads, *x.shape[-2:])

    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return Call(
        q=four(q),
        k=four(k),
        v=four(v),
        out=out,
        to_heads=four,
        scale=scale,
        mask=None if mask is None else mask_of_four(mask, q.shape[:-2]),
        causal=causal,
        merged=q.ndim == 3,
    )


def mask_of_four(mask: Tensor, lead: torch.Size) -> Tensor:
    """A mask that broadcasts to (b, g, n, m), of one that does to (*lead, n, m)."""
    while mask.ndim > len(lead) + 2:
        mask = mask[0]  # a dimension of 1 beyond those of the queries
    if mask.ndim < 3:
        return mask
    if len(lead) == 1:
        return mask.unsqueeze(1)  # b n m -> b 1 n m
    mask = mask[(None,) * (len(lead) + 2 - mask.ndim)]
    if any(size > 1 for size in mask.shape[:-3]):
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    return mask.flatten(0, -4)
