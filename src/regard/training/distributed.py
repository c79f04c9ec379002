"""One process or many: what lightning-fabric sets up, behind a small face."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from regard._device import pick_device
from regard.errors import InputError, MissingExtraError


class Processes:
    """The processes of this run, as torchrun started them, and the device of each.

    device: "auto", "cpu", "cuda" or "mps"; strategy: "auto" (DDP where there are several), "ddp"
    or "fsdp" (FSDP2: parameters, gradients and optimizer state are sharded).
    """

    def __init__(self, device: str, strategy: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world)))
        pick_device(device)
        self.fabric = make_fabric(device, strategy, self.world, here)
        self.fabric.launch()
        self.rank: int = self.fabric.global_rank
        self.device: torch.device = self.fabric.device
        self.sharded = strategy == "fsdp"

    @property
    def main(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def wrap(self, model: nn.Module, compiled: bool = False) -> Any:
        """The model to call in training. It holds `model`, moved to this process's device."""
        called: Any = torch.compile(model) if compiled else model
        return self.fabric.setup_module(called)

    def accumulating(self, wrapped: Any, more: bool) -> AbstractContextManager[Any]:
        """Within, and while `more` microbatches follow, backward leaves gradients unaveraged."""
        if self.world == 1 or not more:
            return nullcontext()
        return self.fabric.no_backward_sync(wrapped)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Elementwise sum over the processes."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def of_main(self, value: Any) -> Any:
        """The main process's value, on all."""
        return self.fabric.broadcast(value) if self.world > 1 else value

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, on all, in order of rank; they may differ in size."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all."""
        if self.world > 1:
            dist.barrier()


def make_fabric(device: str, strategy: str, world: int, here: int) -> Any:
    """A Fabric over `world` processes, `here` of them on this machine."""
    try:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import ModelParallelStrategy
    except ImportError:
        raise MissingExtraError("lightning-fabric", "train", "training") from None
    chosen: Any = strategy
    if strategy == "fsdp":
        if world == 1:
            raise InputError(
                "strategy is fsdp, but there is one process; start several with "
                "`torchrun --nproc-per-node N -m regard train …`"
            )
        chosen = ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    elif world > 1:
        chosen = "ddp"
    return Fabric(
        accelerator=device,
        strategy=chosen,
        devices=here,
        num_nodes=world // here,
        precision="32-true",
    )


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2 on each repeated block, then on what is left."""
    from torch.distributed.fsdp import fully_shard

    data_parallel = mesh["data_parallel"]
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=data_parallel)
    fully_shard(model, mesh=data_parallel)
    return model
