"""torch.nn's own attention modules, whose fast path no function mode may touch."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.errors import InputError
from regard.record.calls import Call

Report = Callable[[str, Call], None]
Refuse = Callable[[str, InputError], None]
Forward = Callable[..., Any]
_MISSING = object()


class Builtin:
    """Lets nn.MultiheadAttention and nn.TransformerEncoderLayer report what they attend to.

    A module's `forward` is wrapped until `cleanup` closes; it runs with function modes off.
    """

    def __init__(self, report: Report, refuse: Refuse) -> None:
        self.report = report
        self.refuse = refuse
        self._ran: set[nn.Module] = set()

    def wrap(self, module: nn.Module, name: str, cleanup: contextlib.ExitStack) -> None:
        """Wrap `module` if it is one of the two."""
        if isinstance(module, nn.MultiheadAttention):
            _wrap(module, functools.partial(self._multihead, module, name), cleanup)
        elif isinstance(module, nn.TransformerEncoderLayer):
            _wrap(module, functools.partial(self._encoder_layer, module, name), cleanup)

    def _multihead(
        self, module: nn.MultiheadAttention, name: str, forward: Forward, given: dict[str, Any]
    ) -> Any:
        out = forward(**given)
        self._ran.add(module)
        self._report(module, name, out[0], **given)
        return out

    def _report(self, module: nn.MultiheadAttention, name: str, *args: Any, **given: Any) -> None:
        try:
            call = multihead_call(module, name, *args, **given)
        except InputError as error:
            self.refuse(name, error)
        else:
            self.report(name, call)

    def _encoder_layer(
        self, layer: nn.TransformerEncoderLayer, name: str, forward: Forward, given: dict[str, Any]
    ) -> Any:
        """The fast path never calls `self_attn`, so the layer reports for it."""
        self._ran.discard(layer.self_attn)
        out = forward(**given)
        if layer.self_attn not in self._ran:
            with torch.no_grad():
                x = layer.norm1(given["src"]) if layer.norm_first else given["src"]
            masks = {"attn_mask": given["src_mask"]}
            masks["key_padding_mask"] = given["src_key_padding_mask"]
            # The layer's result stands for its attention's: it has no graph, and NaN where that has
            self._report(layer.self_attn, f"{name}.self_attn", out, x, x, x, **masks)
        return out


def _wrap(module: nn.Module, watched: Callable[..., Any], cleanup: contextlib.ExitStack) -> None:
    forward = module.forward
    kept = module.__dict__.get("forward", _MISSING)
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with torch._C.DisableTorchFunction():
            return watched(forward, bound.arguments)

    def restore() -> None:
        if kept is _MISSING:
            del module.forward
        else:
            module.forward = kept  # type: ignore[method-assign, assignment]

    module.forward = wrapped  # type: ignore[method-assign]
    cleanup.callback(restore)


@torch.no_grad()
def multihead_call(
    module: nn.MultiheadAttention,
    name: str,
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Call:
    """The call that nn.MultiheadAttention made of its arguments."""
    if module.bias_k is not None or module.add_zero_attn or query.is_nested:
        raise InputError(
            f"{name} is an nn.MultiheadAttention with bias_k, add_zero_attn or a nested tensor; "
            "its keys are no tokens of the input and cannot be read. Choose other layers by layers="
        )
    g = module.num_heads

    def tokens_first(x: Tensor) -> Tensor:
        """(b, n, c), whatever the module's own order."""
        x = x.unsqueeze(0 if module.batch_first else 1) if x.ndim == 2 else x
        return x if module.batch_first else x.transpose(0, 1)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (g, -1)).transpose(1, 2)  # b n (g d) -> b g n d

    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    q, k, v = (
        heads(linear(tokens_first(x), weight, bias))
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )

    def to_heads(gradient: Tensor) -> Tensor:
        return heads(tokens_first(gradient) @ module.out_proj.weight)

    mask = _additive(attn_mask)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, g))  # (b g) n m -> b g n m
    padding = _additive(key_padding_mask)
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        mask = padding if mask is None else mask + padding
    return Call(q=q, k=k, v=v, out=out, to_heads=to_heads, scale=q.shape[-1] ** -0.5, mask=mask)


def _additive(mask: Tensor | None) -> Tensor | None:
    """A mask to add to logits; in torch.nn's boolean ones True forbids."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
