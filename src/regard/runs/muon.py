"""Muon whose orthogonalisation runs in a dtype that the device multiplies fast."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from regard.hardware import product_dtype

# The quintic of Jordan et al. 2024: steep at 0, so that small singular values rise fast.
QUINTIC = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: the update of torch.optim.Muon with `match_rms_adamw`.

    m ← β m + (1 - β) g;  u = (1 - β) g + β m (Nesterov);  o = NewtonSchulz(u), whose singular
    values are all near 1;  w ← (1 - lr·decay) w - lr · 0.2 √max(rows, columns) · o.

    With `hold`, for matrices whose length does nothing as a norm follows (a row is a filter):
    w ← √rows · w / ‖w‖ - lr · o, so that a step turns w by the rate and nothing decays.

    Differs from torch's, which rounds u to bfloat16, in two ways: where the device has no
    bfloat16 products, float32 is used (a CPU without them is 50 to 100 times slower otherwise),
    and matrices of one shape are orthogonalised in one batch.
    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv 2502.16982 (the scale 0.2 √max);
    airbench94 (Jordan 2024) for `hold`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        newton_schulz_steps: int = 5,
        hold: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "newton_schulz_steps": newton_schulz_steps,
            "hold": hold,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; the learning rates are the groups' own."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape, parameter.device, parameter.dtype].append(parameter)
            for parameters in by_shape.values():
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters (rows, columns) that share a shape."""
        beta, lr = group["momentum"], group["lr"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - beta)
        updates = torch._foreach_lerp(gradients, buffers, beta)
        turned = orthogonalise(torch.stack(list(updates)), group["newton_schulz_steps"])
        if group["hold"]:
            norms = torch._foreach_norm(parameters)
            root = len(parameters[0]) ** 0.5
            torch._foreach_mul_(parameters, [root / n.clamp(min=1e-7) for n in norms])
            scale = 1.0
        else:
            scale = 0.2 * max(parameters[0].shape) ** 0.5
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, list(turned.unbind(0)), alpha=-lr * scale)


def orthogonalise(updates: Tensor, steps: int) -> Tensor:
    """Each matrix of `updates` (b, rows, columns) with its singular values brought near 1.

    X ← a X + (b A + c A²) X with A = X Xᵀ, after scaling to Frobenius norm 1.
    """
    a, b, c = QUINTIC
    x = updates.to(product_dtype(torch.bfloat16, updates.device.type))
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.transpose(1, 2) if tall else x).to(updates.dtype)
