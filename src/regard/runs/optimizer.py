"""Optimizers: AdamW, Muon on the blocks' matrices with AdamW on the rest, or airbench94's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regard.models.pixel_resnet import PixelResNet
from regard.runs.muon import Muon

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
