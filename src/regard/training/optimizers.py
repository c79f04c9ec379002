"""Muon whose orthogonalisation runs in a dtype that the device multiplies fast."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regard._device import product_dtype
from regard.models.pixel_resnet import PixelResNet

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


# Optimizers: AdamW, Muon on the blocks' matrices with AdamW on the rest, or airbench94's.


ADAM_BETAS = (0.9, 0.95)

# Rates of airbench94's groups at a learning rate of 0.02, which is also a good one under "muon".
# Its loss is the sum over 2,000 images and ours a mean. Its classifier's output is divided by its
# width, 256, where ours starts 1 / width as large: the same function, with gradients 256 times as
# large. At other widths w a rate that goes as 1 / w changes the logits by as much a step.
KERNEL_RATE = 0.12 / 0.02
BIAS_RATE = 0.053 * 2000 / 0.02
CLASSIFIER_RATE = 0.67 * 2000 / 256 / 0.02  # / w

# Pixel attention's, which the source has not: chosen on CIFAR-10 (docs/results.md), where rates of
# lr made its logits two to three times as large, and the net worse than without it.
MATRIX_RATE = 0.25
VECTOR_RATE = 0.1


def build_optimizers(
    model: nn.Module, name: str, lr: float, weight_decay: float
) -> tuple[Optimizer, ...]:
    """The optimizers of a run, to be stepped one after the other.

    "adamw": AdamW with β = (0.9, 0.95). "muon": Muon (Jordan et al. 2024; momentum 0.95,
    Nesterov, five Newton-Schulz steps) on the matrices of repeated blocks, its update scaled to
    AdamW's size (`match_rms_adamw`, Liu et al. 2025, arXiv 2502.16982), so that one rate and one
    decay serve both; AdamW on embedding, classifier and whatever is no matrix. Only parameters of
    two or more dimensions decay: gains, biases and norms do not. "muon-sgd": `hold_and_descend`.
    """
    if name == "muon-sgd":
        return hold_and_descend(model, lr, weight_decay)
    matrices = block_matrices(model) if name == "muon" else {}
    rest = {n: p for n, p in model.named_parameters() if n not in matrices and p.requires_grad}
    decayed = [p for p in rest.values() if decays(p)]
    plain = [p for p in rest.values() if not decays(p)]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, betas=ADAM_BETAS, fused=True
    )
    if not matrices:
        return (adamw,)
    muon = Muon(list(matrices.values()), lr=lr, weight_decay=weight_decay)
    return (muon, adamw)


def hold_and_descend(model: nn.Module, lr: float, weight_decay: float) -> tuple[Optimizer, ...]:
    """The optimizers of airbench94 (Jordan 2024, arXiv 2404.00498), for a PixelResNet.

    Muon (momentum 0.6, three Newton-Schulz steps) on convolutions, held to their norm, at 6 lr; SGD
    with Nesterov momentum 0.85 on the biases of stem and norms at 5300 lr and on the classifier at
    262 lr / width, all of which decay by lr · weight_decay a step. At lr = 0.02 and width 256 the
    rates are the source's. What the source has not: the classifier's bias, by SGD at lr; and pixel
    attention, as under "muon", its matrices at lr / 4, its gains and biases at lr / 10.
    """
    assert isinstance(model, PixelResNet)  # others are refused before: `refuse.refuse_unfit`
    kernels, biases = model.kernels(), model.biases()
    head = {} if model.classifier is None else dict(model.classifier.named_parameters())
    taken = {id(p) for p in (*kernels, *biases, *head.values())}
    rest = [p for p in model.parameters() if id(p) not in taken and p.requires_grad]
    matrices = [p for p in rest if p.ndim == 2]
    vectors = [p for p in rest if p.ndim != 2]

    def group(parameters: Sequence[Tensor], rate: float, decay: bool = True) -> dict[str, Any]:
        """Parameters at `rate` times the run's rate, which lose lr · weight_decay a step."""
        return {
            "params": list(parameters),
            "lr": lr * rate,
            "rate": rate,
            "weight_decay": weight_decay / rate if decay else 0.0,
        }

    held = {"momentum": 0.6, "newton_schulz_steps": 3, "hold": True}
    turned = [{**group(kernels, KERNEL_RATE, decay=False), **held}]
    descended = [group(biases, BIAS_RATE)]
    if matrices:
        turned.append(group(matrices, MATRIX_RATE))
    if head:
        width = model.config["widths"][-1]
        descended.append(group([head["weight"]], CLASSIFIER_RATE / width))
        descended.append(group([head["bias"]], 1))
    found: list[Optimizer] = [
        Muon(turned, lr),
        torch.optim.SGD(descended, momentum=0.85, nesterov=True),
    ]
    if vectors:
        rest_groups = [group(vectors, VECTOR_RATE, decay=False)]
        found.append(torch.optim.AdamW(rest_groups, betas=ADAM_BETAS, fused=True))
    return tuple(found)


def block_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The matrices inside repeated blocks (an nn.ModuleList or nn.Sequential).

    These are the weights of linear layers, of pixel attention, and of convolutions that keep their
    kernels as matrices (`layers.conv.MatrixConv`).
    """
    found: dict[str, Tensor] = {}
    for stack_name, stack in model.named_modules():
        if isinstance(stack, (nn.ModuleList, nn.Sequential)):
            for name, parameter in stack.named_parameters(prefix=stack_name):
                if parameter.ndim == 2 and parameter.requires_grad:
                    found[name] = parameter
    return found


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices and kernels, but no gain, bias or norm."""
    return parameter.ndim in (2, 4)


def set_rate(optimizers: Sequence[Optimizer], lr: float) -> None:
    """Give every group of every optimizer this learning rate, times the group's own "rate"."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
