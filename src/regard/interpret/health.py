"""The health of attention, by layer: cheap enough to take along in training."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.foreign import Spec, recognise
from regard.interpret.record import record
from regard.interpret.recording import Recording

# Names under which norms keep a gain.
GAINS = ("gamma", "weight")


@contextlib.contextmanager
def attention_health(
    model: nn.Module, *, images: int | None = None
) -> Iterator[dict[str, dict[str, float]]]:
    """A dict that holds, when the block ends, the `health` of each attention that ran in it.

        with attention_health(model, images=8) as health:
            loss = loss_of(model(batch))
        write({"step": step, "attention": health})

    `images` bounds the cost: the first so many of the batch stand for it.
    """
    result: dict[str, dict[str, float]] = {}
    with record(model, keep=("entropy", "largest_logit"), images=images) as seen:
        yield result
    result.update(health(seen, model))


def health(seen: Recording, model: nn.Module) -> dict[str, dict[str, float]]:
    """By attention, from a recording that kept "entropy" and "largest_logit":

    entropy: mean over images, heads and queries, in nats; log m is uniform attention, 0 one key.
    largest_logit: the largest s·q·k + mask of any image, head, query and key.
    q_gain, k_gain: root mean square of the norm's gain over heads and channels, 1 at the start;
    only where the module norms queries and keys.
    """
    # As a recording names them: by path, or a model that is itself an attention by its class.
    modules = {path or type(model).__name__: module for path, module in model.named_modules()}
    rows: list[tuple[str, str]] = []
    values: list[Tensor] = []
    for name, attention in seen.items():
        numbers = {
            "entropy": attention.need("entropy").mean(),
            "largest_logit": attention.need("largest_logit").amax(),
        }
        norms = qk_norms(modules.get(name.partition("#")[0]))
        for key, norm in zip(("q_gain", "k_gain"), norms, strict=True):
            gain = norm_gain(norm)
            if gain is not None:
                numbers[key] = gain
        for key, value in numbers.items():
            rows.append((name, key))
            values.append(value.float())
    # One transfer for all numbers: a device need not be waited for once a layer.
    result: dict[str, dict[str, float]] = {name: {} for name in seen}
    for (name, key), number in zip(rows, torch.stack(values).tolist(), strict=True):
        result[name][key] = number
    return result


def qk_norms(module: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms of queries and keys: where `foreign` says they are, else q_norm and k_norm."""
    if module is None:
        return None, None
    spec = recognise(module)
    if isinstance(spec, Spec):
        paths = (spec.q_norm, spec.k_norm)
        q, k = (None if path is None else module.get_submodule(path) for path in paths)
        if q is not None or k is not None:
            return q, k
    # A module that is left alone has them under timm's names or under diffusers'.
    q, k = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    return q or getattr(module, "norm_q", None), k or getattr(module, "norm_k", None)


@torch.no_grad()
def norm_gain(norm: nn.Module | None) -> Tensor | None:
    """Root mean square of a QK norm's gain, relative to its start; None for no gain."""
    gain = next((g for g in (getattr(norm, k, None) for k in GAINS) if g is not None), None)
    if gain is None:
        return None
    # A gain on unit vectors starts at 1/√d (see QKNorm), the others at 1.
    unit = getattr(norm, "form", None) == "unit" or hasattr(norm, "scale")
    start = 1 / math.sqrt(gain.shape[-1]) if unit else 1.0
    return gain.float().square().mean().sqrt() / start
