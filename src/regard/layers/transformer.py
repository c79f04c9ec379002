"""Linear layers and layer norms that compute in their input's dtype, whatever their weights'."""

import torch
from torch import Tensor, nn

from regard._device import autocasts, may_overwrite
from regard.layers.attend import attend, rounds_faster
from regard.layers.qk_norm import Form, QKNorm, largest_logit, logit_scale


def _as(value: Tensor | None, x: Tensor) -> Tensor | None:
    # Autocast casts by itself, and a cast before it would be one too many.
    if value is None or value.dtype == x.dtype or autocasts(x.device.type):
        return value
    return value.to(x.dtype)


class Linear(nn.Linear):
    """x Wᵀ + b with W and b in x's dtype.

    Half-precision weights meet float32 tokens where the CPU has no half-precision instructions
    (`regard.hardware`): the products are then exact, and many times faster.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = _as(self.weight, x)
        assert weight is not None
        return nn.functional.linear(x, weight, _as(self.bias, x))


class LayerNorm(nn.LayerNorm):
    """(x - mean) / √(var + 1e-5) · γ + β over the last dimension, with γ and β in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _as(self.weight, x), _as(self.bias, x)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


# Pre-norm transformer blocks whose attention is `attend`.


# A bfloat16 number below this is within 2⁻⁸ of what it rounds, and e to it within 0.4%: as much as
# the softmax's weights lose in bfloat16 themselves.
SMALL_LOGIT = 2.0


class Attention(nn.Module):
    """Multi-head self-attention over tokens, with optional QK norm.

    z = LayerNorm(x);  [q, k, v] = z W_qkvᵀ, split into heads as contiguous runs of channels;
    q, k ← QKNorm(q), QKNorm(k);  head = softmax(s q kᵀ) v;  returns [heads] W_outᵀ.
    The scale s is 1 for `qk_norm="unit"` and 1/√d otherwise (see `QKNorm`). No biases.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dim_head: int,
        qk_norm: Form | None = "unit",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = num_heads * dim_head
        self.num_heads = num_heads
        self.dim_head = dim_head
        self.scale = logit_scale(qk_norm, dim_head)
        self.norm = LayerNorm(dim, device=device, dtype=dtype)
        self.qkv = Linear(dim, 3 * inner, bias=False, device=device, dtype=dtype)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if qk_norm is not None:
            self.q_norm = QKNorm(qk_norm, num_heads, dim_head, device=device, dtype=dtype)
            self.k_norm = QKNorm(qk_norm, num_heads, dim_head, device=device, dtype=dtype)
        self.out = Linear(inner, dim, bias=False, device=device, dtype=dtype)

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors given to `attend`, each (b, g, n, d), from tokens x (b, n, dim)."""
        b, n, _ = x.shape
        packed = self.qkv(self.norm(x)).view(b, n, 3, self.num_heads, self.dim_head)
        # b n 3 g d -> 3 of b g n d; unbound where they lie, their gradients are joined in one copy
        q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
        return self.q_norm(q), self.k_norm(k), v

    def score_dtype(self, q: Tensor) -> torch.dtype:
        """q's dtype where that is faster and logits are bounded by `SMALL_LOGIT`, else float32."""
        if rounds_faster(q) and largest_logit(self.q_norm, self.k_norm) <= SMALL_LOGIT:
            return q.dtype
        return torch.float32

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)
        heads = attend(q, k, v, scale=self.scale, score_dtype=self.score_dtype(q))
        return self.out(heads.transpose(1, 2).flatten(2))  # b g n d -> b n (g d)


class MLP(nn.Module):
    """W_down GELU(W_up LayerNorm(x)), with biases; GELU is the exact one, by erf."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(dim, device=device, dtype=dtype)
        self.up = Linear(dim, hidden, device=device, dtype=dtype)
        self.down = Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if may_overwrite(hidden) and not self.up._forward_hooks:
            # Memory of this size comes fresh from the system, page by page, each time.
            return self.down(torch.ops.aten.gelu_(hidden))
        return self.down(nn.functional.gelu(hidden))


def drop_path(branch: Tensor, rate: float) -> Tensor:
    """Each sample of `branch` (b, …) zeroed with probability `rate`, else divided by 1 - rate.

    Its expectation is `branch`. Source: stochastic depth, Huang et al. 2016, arXiv 1603.09382.
    """
    kept = torch.rand(branch.shape[:1] + (1,) * (branch.ndim - 1), device=branch.device) >= rate
    return branch * (kept / (1 - rate)).to(branch.dtype)


class Block(nn.Module):
    """x ← x + Attention(x);  x ← x + MLP(x).

    In training each of the two branches is dropped by sample at the rate `drop_path`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        dim_head: int,
        mlp_dim: int,
        qk_norm: Form | None = "unit",
        drop_path: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.attention = Attention(dim, num_heads, dim_head, qk_norm, device=device, dtype=dtype)
        self.mlp = MLP(dim, mlp_dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.drop_path > 0:
            x = x + drop_path(self.attention(x), self.drop_path)
            return x + drop_path(self.mlp(x), self.drop_path)
        x = x + self.attention(x)
        return x + self.mlp(x)
