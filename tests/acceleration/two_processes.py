"""What test_accelerate_training starts under torchrun: one step of an accelerated model in DDP."""

import copy

import torch
from torch import distributed, nn

from regard.acceleration.swap import accelerate
from tests.reference import peers

C, HEADS = 32, 4


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)  # the same weights and images everywhere
    model = nn.Sequential(peers.AttentionBlock(C, HEADS, True), peers.AttnBlock(C))
    images = torch.randn(4, C, 6, 5)
    original = copy.deepcopy(model)
    original(images).square().mean().backward()

    _, report = accelerate(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(images[2 * rank : 2 * rank + 2]).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    print(f"rank {rank}: {len(report.swapped)} swapped, gradients agree", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
