"""Gradient-weighted relevance of every place for a class, in memory linear in the tokens."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import InputError, counted
from regard.interpret.attention_call import Call, Scratch, wide_dtype
from regard.interpret.function_mode import Watch, undisturbed
from regard.interpret.record import check_grid, check_readable
from regard.interpret.tokens import Tokens

Readout = Literal["class", "mean"]


class Relevance(NamedTuple):
    """maps (b, h, w); the classes (b,) they are for; the model's logits (b, k)."""

    maps: Tensor
    classes: Tensor
    logits: Tensor


def class_relevance(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | int | None = None,
    *,
    readout: Readout | None = None,
    grid: tuple[int, int] | None = None,
) -> Relevance:
    """Where the evidence for a class lies, by attention weighted with its gradient.

    With weights A_l and gradients G_l of the class logit with respect to them, for layers
    l = 1 … L: R = (I + Ā_L) ⋯ (I + Ā_1), Ā_l = mean over heads of max(0, G_l ⊙ A_l). The map is
    rᵀ(R - I) on the places of the grid, where r reads the tokens out: one at the class token, or
    1/n at each of n places for a model that pools their mean. G_l = dO V ᵀ from the gradient dO
    of the heads' outputs. Only rᵀR is carried, from the last layer to the first, and weights are
    made in blocks, so that no n × n matrix is held.

    Args:
        model: a classifier that returns logits (b, k), as it is to be explained (call `eval()`).
        images: model input (b, c, h, w).
        classes: a class for all images, one for each (b,), or None for each image's likeliest.
        readout: "class" (the first token) or "mean"; None takes the first of extra tokens if the
            model has some and no `global_pool` of "avg", else the mean.
        grid: (rows, columns) of the tokens, where it cannot be found from the input.

    Raises:
        InputError: for a model that cannot be read, whose attentions are over different grids, or
            whose output is no (b, k).

    Source: Chefer, Gur, Wolf 2021 (arXiv 2103.15679), the rule for self-attention; for a mean
    pool, which it does not treat, r is the pool's own weights.
    """
    check_readable(model)
    calls: list[tuple[str, Tokens, Tokens, Call]] = []

    def receive(name: str, queries: Tokens, keys: Tokens, call: Call) -> None:
        calls.append((name, queries, keys, call))

    def refuse(name: str, error: InputError) -> None:
        raise error

    watched = Watch(model, receive, refuse, grid=grid)
    with torch.enable_grad(), watched:
        logits = model(images.detach().requires_grad_())
    if not calls:
        raise InputError(f"no attention could be read in {type(model).__name__}")
    check_grid(grid, [layout for _, *layouts, _ in calls for layout in layouts])
    tokens = _one_layout(calls)
    chosen = _classes(classes, logits, images.shape[0])
    score = logits.gather(1, chosen[:, None]).sum()
    outs = [call.out for *_, call in calls]
    gradients = torch.autograd.grad(score, [out for out in outs if out is not None])
    start = _start(tokens, readout or _readout(model, tokens), calls[0][3])
    with undisturbed(images.device.type):
        row, scratch = start.clone(), Scratch()
        for (*_, call), gradient in zip(reversed(calls), reversed(gradients), strict=True):
            row = row + _through(row, call, call.to_heads(gradient), scratch)
    # A model that makes further views of the pictures has them behind the pictures themselves.
    maps = (row - start)[: len(images), tokens.places()].unflatten(1, tokens.need_grid())
    return Relevance(maps, chosen, logits.detach())


def _through(row: Tensor, call: Call, gradient: Tensor, scratch: Scratch) -> Tensor:
    """rᵀĀ of one layer, from r (b, n) and the gradient of its heads' outputs (b, g, n, e)."""
    b, g, _, m = call.shape
    gradients, values = (x.to(row.dtype).flatten(0, 1) for x in (gradient, call.v))
    shares = (row / g).repeat_interleave(g, 0)[:, None]  # (b g, 1, n): of each head
    out = row.new_zeros(b * g, 1, m)
    without = call.without_keys()
    for heads, rows, logits in call.blocks(scratch):
        slope = gradients[heads, rows] @ values[heads].mT
        weighted = slope.mul_(logits.softmax(-1)).clamp_(min=0)
        if without is not None:
            weighted.masked_fill_(without[heads, rows], 0)
        out[heads] += shares[heads, :, rows] @ weighted
    return out.view(b, g, m).sum(1)


def _one_layout(calls: list[tuple[str, Tokens, Tokens, Call]]) -> Tokens:
    name, tokens, _, _ = calls[0]
    for other, queries, keys, call in calls:
        if queries != tokens or keys != tokens:
            raise InputError(
                f"{other} attends from {queries.count} to {keys.count} tokens and {name} to "
                f"{tokens.count}; relevance is defined where all layers share one grid, as those "
                "of a plain transformer do. Look at the layers by themselves"
            )
        if call.out is None or not call.out.requires_grad:
            raise InputError(f"no gradient reaches {other}; it runs without one")
    tokens.need_grid()
    return tokens


def _classes(classes: Tensor | int | None, logits: Tensor, batch: int) -> Tensor:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != batch:
        what = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"the model returned {what}; logits ({batch}, classes) are needed")
    if classes is None:
        return logits.detach().argmax(1)
    count = logits.shape[1]
    needed = f"give an integer from 0 to {count - 1}, or one for each of {counted(batch, 'image')}"
    try:
        chosen = torch.as_tensor(classes, device=logits.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"classes={classes!r}: {needed}") from None
    whole = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool)
    if not whole or tuple(chosen.shape) not in ((), (batch,)):
        raise InputError(f"classes={classes!r}: {needed}")
    if not bool(((chosen >= 0) & (chosen < count)).all()):
        raise InputError(f"classes={classes!r}: {needed}")
    return chosen.expand(batch).long()


def _readout(model: nn.Module, tokens: Tokens) -> Readout:
    averages = getattr(model, "global_pool", "") == "avg"
    return "class" if tokens.leading and not averages else "mean"


def _start(tokens: Tokens, readout: Readout, call: Call) -> Tensor:
    """r (b, n): the weight with which each final token is read."""
    row = call.v.new_zeros(call.shape[0], tokens.count, dtype=wide_dtype(call.v))
    if readout == "class":
        if not tokens.leading:
            raise InputError('readout="class", but the model has no class token; give "mean"')
        row[:, 0] = 1
    elif readout == "mean":
        h, w = tokens.need_grid()
        row[:, tokens.places()] = 1 / (h * w)
    else:
        raise InputError(f'readout={readout!r}: give "class" or "mean"')
    return row
