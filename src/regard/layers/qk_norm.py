"""Normalisation of queries and keys, per head, before their product."""

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard._device import is_traced, may_overwrite
from regard.errors import InputError, nearest
from regard.layers.checks import count

Form = Literal["unit", "rms", "layer"]
FORMS: tuple[str, ...] = get_args(Form)

# The smallest length, and the smallest mean square, that is divided by; zeros stay zeros.
UNIT_EPS = 1e-12
RMS_EPS = 1e-6


class QKNorm(nn.Module):
    """Per-head normalisation of queries or keys (…, g, n, d) with a learned gain per channel.

    ======== ============================================ ============== ====================
    form     formula, with learned gain γ (g, 1, d)       scale s of q·k initial logit s·q·k
    ======== ============================================ ============== ====================
    "unit"   x / ‖x‖₂ · √d · γ,       γ starts at 1/√d    1              in [-1, 1]
    "rms"    x / √(mean(x²) + 1e-6) · γ,   γ starts at 1  1/√d           in [-√d, √d]
    "layer"  (x - mean) / √(var + 1e-6) · γ + β, β at 0   1/√d           in [-√d, √d]
    ======== ============================================ ============== ====================

    "unit" is the norm of vit-pytorch's `simple_vit_with_qk_norm` (after ViT-22B,
    arXiv 2302.05442): queries and keys start as unit vectors and no 1/√d follows, so a logit
    starts as a cosine. "rms" and "layer" are what most other projects call QK norm: the norm is
    followed by the usual 1/√d. The norm is computed in float32; the result has x's dtype. In the
    "unit" form a length below 1e-12 counts as 1e-12, in float16 too: zeros stay zeros.
    """

    def __init__(
        self,
        form: Form,
        num_heads: int,
        dim_head: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form is None:
            raise InputError(f"form=None is no norm; give one of {', '.join(FORMS)}")
        check_form(form)
        count(num_heads, "num_heads")
        count(dim_head, "dim_head")
        self.form = form
        start = 1 / math.sqrt(dim_head) if form == "unit" else 1.0
        shape = (num_heads, 1, dim_head)
        self.gamma = nn.Parameter(torch.full(shape, start, device=device, dtype=dtype))
        self.beta: nn.Parameter | None = None
        if form == "layer":
            self.beta = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def logit_scale(self) -> float:
        """The factor s on q·k that goes with this form: 1, or 1/√d."""
        return logit_scale(self.form, self.gamma.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (…, g, n, d); same shape and dtype."""
        heads, _, width = self.gamma.shape
        shape = x.shape
        if len(shape) < 3 or shape[-3] != heads or shape[-1] != width or not x.is_floating_point():
            raise InputError(
                f"x is {x.dtype} of shape {tuple(shape)}; give floating-point (…, {heads}, n, "
                f"{width}): heads, tokens, width"
            )
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        gain = self.gamma.to(wide.dtype)
        if self.beta is not None:
            normed = _times(nn.functional.layer_norm(wide, (width,), eps=RMS_EPS), gain)
            return (normed + self.beta.to(wide.dtype)).to(x.dtype)
        rms = self.form == "rms"
        if not rms:
            gain = gain * math.sqrt(width)
        run = _Divided.apply if torch.is_grad_enabled() and not is_traced() else _divided
        return run(wide, gain, rms).to(x.dtype)

    def extra_repr(self) -> str:
        heads, _, width = self.gamma.shape
        return f"{self.form!r}, num_heads={heads}, dim_head={width}"


def _divisor(x: Tensor, rms: bool) -> Tensor:
    """Of each vector √(mean(x²) + 1e-6), or its length, which counts as 1e-12 at least."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if rms:
        return torch.sqrt(length.square() / x.shape[-1] + RMS_EPS)
    return length.clamp_min(UNIT_EPS)


def _times(fresh: Tensor, gain: Tensor) -> Tensor:
    return fresh.mul_(gain) if may_overwrite(fresh, gain) else fresh * gain


def _divided(x: Tensor, gain: Tensor, rms: bool) -> Tensor:
    return _times(x / _divisor(x, rms), gain)


class _Divided(torch.autograd.Function):
    """`_divided`, with a gradient of six passes over memory in place of some fifteen.

    With y = x/l · γ and u = x/l:  dγ = Σ u dy,  dx = (γ dy - c u Σ_t γ_t dy_t u_t) / l,  where c
    is 1/d for the root mean square, 1 for the length, and 0 for a length below the smallest.
    Where gradients of it are wanted, the same is computed by what has gradients itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, rms: bool) -> Tensor:
        length = _divisor(x, rms)
        ctx.save_for_backward(x, gain, length)
        ctx.rms = rms
        return (x / length).mul_(gain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, length = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_gradients(x, gain, grad, ctx.rms), None
        part = (grad * x).div_(length)
        dgain = part.sum_to_size(gain.shape)
        along = part.mul_(gain).sum(-1, keepdim=True).div_(length)
        if ctx.rms:
            along /= x.shape[-1]
        else:
            along.masked_fill_(length <= UNIT_EPS, 0)
        dx = torch.mul(grad, gain, out=part).addcmul_(x, along, value=-1).div_(length)
        return dx, dgain, None


def _gradients(x: Tensor, gain: Tensor, grad: Tensor, rms: bool) -> tuple[Tensor, Tensor]:
    """dx and dγ as `_Divided` says, of operations that autograd follows."""
    length = _divisor(x, rms)
    unit = x / length
    part = unit * grad
    along = (part * gain).sum(-1, keepdim=True)
    along = along / x.shape[-1] if rms else along.masked_fill(length <= UNIT_EPS, 0)
    return (gain * grad - unit * along) / length, part.sum_to_size(gain.shape)


def largest_logit(q_norm: nn.Module, k_norm: nn.Module) -> float:
    """What no logit |s·q·k| exceeds after these norms: d · max|γ_q γ_k|, for "unit"; else infinity.

    Reads the gains: not for code that is traced, or on a device that would be waited for.
    """
    if not (isinstance(q_norm, QKNorm) and isinstance(k_norm, QKNorm)):
        return math.inf
    if q_norm.form != "unit" or k_norm.form != "unit":
        return math.inf
    gains = q_norm.gamma.detach().float() * k_norm.gamma.detach().float()
    return gains.shape[-1] * float(gains.abs().max())


def check_form(form: str | None) -> None:
    """Refuse a name that is no form of QK norm; None, no norm, is fine."""
    if form is not None and form not in FORMS:
        raise InputError(
            f"qk_norm={form!r} is unknown; it is one of {', '.join(FORMS)} or None "
            f"({nearest(str(form), FORMS)})"
        )


def logit_scale(form: str | None, dim_head: int) -> float:
    """The factor on q·k: 1 for "unit", whose logits start as cosines; else 1/√d."""
    return 1.0 if form == "unit" else 1 / math.sqrt(dim_head)
