"""Peak memory of one candidate, measured in a process of its own (see `common.peak_memory`)."""

import importlib
import json
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most since the mark was reset)."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    module, spec = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(spec.pop("threads", 2))
    call = importlib.import_module(module).candidate(**spec)
    if spec["device"].startswith("cuda"):
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        print(torch.cuda.max_memory_allocated() - before)
        return
    call()  # so that libraries are loaded and their buffers there
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    call()
    print(max(0, resident("VmHWM") - before))


if __name__ == "__main__":
    main()
