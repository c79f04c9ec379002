"""Devices by name."""

import torch

from regard.errors import InputError


def pick_device(device: str | torch.device) -> torch.device:
    """A device that is there: auto, cpu, mps, cuda or cuda:N. "auto" is an accelerator if any."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if str(device) == "auto":
        return torch.device(next(name for name, yes in there.items() if yes))
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InputError(f"there is no device {device!r}; give auto, cpu, cuda or mps") from None
    if not there.get(chosen.type, False):
        here = ", ".join(name for name, yes in there.items() if yes)
        raise InputError(
            f"device is {str(device)!r}, which PyTorch does not find here; give {here}"
        )
    return chosen
