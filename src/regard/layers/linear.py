"""Linear layers and layer norms that compute in their input's dtype, whatever their weights'."""

from torch import Tensor, nn

from regard.hardware import autocasts


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
