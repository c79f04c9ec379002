"""Optimizers: AdamW on everything, or Muon on the blocks' matrices with AdamW on the rest."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regard.runs.muon import Muon

ADAM_BETAS = (0.9, 0.95)


def build_optimizers(
    model: nn.Module, name: str, lr: float, weight_decay: float
) -> tuple[Optimizer, ...]:
    """The optimizers of a run, to be stepped one after the other.

    "adamw": AdamW with β = (0.9, 0.95). "muon": Muon (Jordan et al. 2024; momentum 0.95,
    Nesterov, five Newton-Schulz steps) on the matrices of repeated blocks, its update scaled to
    AdamW's size (`match_rms_adamw`, Liu et al. 2025, arXiv 2502.16982), so that one rate and one
    decay serve both; AdamW on embedding, classifier and whatever is no matrix. Only parameters of
    two or more dimensions decay: gains, biases and norms do not.
    """
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
    """Give every group of every optimizer this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
