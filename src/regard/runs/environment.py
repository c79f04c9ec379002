"""What a run ran on, for environment.json."""

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

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
