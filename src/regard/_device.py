"""Devices by name."""

import importlib.metadata
import os
import platform
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

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


# What the hardware multiplies: half precision where it can, float32 in its place where not.


def _has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 numbers in hardware, as far as torch can use it."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


BF16_PRODUCTS = _has_bf16_products()


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The dtype to hold the operands of products in: `dtype`, or float32 where that is faster.

    A CPU without bfloat16 instructions multiplies half precision a hundred times slower than
    float32, which holds every half-precision number exactly.
    """
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if torch.compiler.is_exporting():  # the file runs elsewhere
        return dtype
    return dtype if dtype == torch.bfloat16 and BF16_PRODUCTS else torch.float32


def working_dtype(x: Tensor) -> torch.dtype:
    """`product_dtype` for x."""
    return product_dtype(x.dtype, x.device.type)


def autocasts(device: str) -> bool:
    """Whether autocast is on for a kind of device; there is none for "meta"."""
    return device != "meta" and torch.is_autocast_enabled(device)


def native_products(device: str) -> AbstractContextManager[None]:
    """Autocast off where its dtype would only slow products down; else nothing changes."""
    if not autocasts(device):
        return nullcontext()
    dtype = torch.get_autocast_dtype(device)
    if product_dtype(dtype, device) == dtype:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def is_traced() -> bool:
    """Whether what runs is compiled, traced or transformed, and not just computed."""
    transformed = torch._C._are_functorch_transforms_active()
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed


def may_overwrite(*operands: Tensor) -> bool:
    """Whether intermediate results may be written over: no autograd, nothing traced or cast.

    Autocast casts the operands of a product, and not those of one that is written in place.
    """
    if any(autocasts(x.device.type) for x in operands[:1]):
        return False
    if is_traced():
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in operands))


# What a run ran on, for environment.json.


PACKAGES = ("regard", "torch", "numpy", "safetensors", "torchvision", "lightning-fabric")


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Versions, machine and threads; the numbers that bits depend on are all here."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "packages": versions,
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
