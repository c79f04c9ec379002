"""`regard.PixelAttention` beside diffusers' and MONAI's blocks and the formula plainly written.

All hold the same weights. Forward is inference (eval mode, gradients off), where ours folds;
training gives gradients of the map and of every parameter. Errors are against the formula in
float64 with weights that give logits of standard deviation 3. `--memory` measures peaks instead.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

import regard
from benchmarks import common
from regard.layers.attend import attention_kernel
from regard.layers.pixel_attention import KEYS

# batch, channels, side of the map, groups, heads
CELLS = {
    "1,512,128,32,1": (1, 512, 128, 32, 1),
    "1,512,64,32,1": (1, 512, 64, 32, 1),
    "1,512,32,32,1": (1, 512, 32, 32, 1),
    "4,512,16,32,1": (4, 512, 16, 32, 1),
    "16,64,16,8,1": (16, 64, 16, 8, 1),
    "8,256,16,32,4": (8, 256, 16, 32, 4),
    "8,256,32,32,8": (8, 256, 32, 32, 8),
    "4,128,32,32,2": (4, 128, 32, 32, 2),
    "64,256,8,32,4": (64, 256, 8, 32, 4),
}
PEERS = ("diffusers", "MONAI", "MONAI flash", "plain formula")
DIFFUSERS = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "out"}
MONAI = {
    "norm": "norm",
    "attn.to_q": "q",
    "attn.to_k": "k",
    "attn.to_v": "v",
    "attn.out_proj": "out",
}


class Plain(nn.Module):
    """The formula, written with torch as it stands."""

    def __init__(self, params: dict[str, Tensor], groups: int, heads: int) -> None:
        super().__init__()
        self.p = nn.ParameterDict({key: nn.Parameter(value) for key, value in params.items()})
        self.groups, self.heads = groups, heads

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        z = nn.functional.group_norm(x, self.groups, self.p["norm_weight"], self.p["norm_bias"])
        z = z.flatten(2).transpose(1, 2)

        def project(t: Tensor, name: str) -> Tensor:
            return nn.functional.linear(t, self.p[f"{name}_weight"], self.p[f"{name}_bias"])

        q, k, v = (project(z, s).view(b, h * w, self.heads, -1).transpose(1, 2) for s in "qkv")
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(c // self.heads), dim=-1)
        out = project((weights @ v).transpose(1, 2).reshape(b, h * w, c), "out")
        return x + out.transpose(1, 2).reshape(b, c, h, w)


def parameters(channels: int, std: float) -> dict[str, Tensor]:
    """The ten, with weights such that logits have standard deviation `std`."""
    made = {}
    for key in KEYS:
        if key.startswith("norm"):
            made[key] = torch.ones(channels) if key.endswith("weight") else torch.zeros(channels)
        elif key.endswith("bias"):
            made[key] = 0.1 * torch.randn(channels)
        else:
            gain = math.sqrt(std) if key[0] in "qk" else 1.0
            made[key] = gain * torch.randn(channels, channels) / math.sqrt(channels)
    return made


def renamed(params: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {
        f"{theirs}.{part}": params[f"{ours}_{part}"]
        for theirs, ours in names.items()
        for part in ("weight", "bias")
    }


def modules(cell: str, std: float) -> dict[str, nn.Module]:
    """Every block with the same weights, in float32."""
    from diffusers.models.attention_processor import Attention
    from monai.networks.blocks.spatialattention import SpatialAttentionBlock

    _, channels, _, groups, heads = CELLS[cell]
    params = parameters(channels, std)
    theirs = Attention(
        channels,
        heads=heads,
        dim_head=channels // heads,
        norm_num_groups=groups,
        eps=1e-5,
        bias=True,
        upcast_softmax=True,
        residual_connection=True,
        _from_deprecated_attn_block=True,
    )
    theirs.load_state_dict(renamed(params, DIFFUSERS))
    made: dict[str, nn.Module] = {
        "regard": regard.PixelAttention.from_params(params, groups, heads),
        "diffusers": theirs,
    }
    for name, flash in (("MONAI", False), ("MONAI flash", True)):
        block = SpatialAttentionBlock(
            2, channels, channels // heads, groups, norm_eps=1e-5, use_flash_attention=flash
        )
        block.load_state_dict(renamed(params, MONAI))
        made[name] = block
    return made | {"plain formula": Plain(params, groups, heads)}


def call_of(module: nn.Module, x: Tensor, training: bool, score: torch.dtype | None) -> common.Call:
    """One pass of the module; `score` is what scores may be rounded to."""
    module.train(training)
    grad = torch.randn(x.shape).to(x.device, torch.bfloat16).to(x.dtype)
    wanted = [x, *module.parameters()]

    def forward() -> Tensor:
        with torch.no_grad(), attention_kernel("auto", score_dtype=score):
            return module(x)

    def both() -> tuple[Tensor, ...]:
        with attention_kernel("auto", score_dtype=score):
            out = module(x)
        return (out.detach(), torch.autograd.grad(out, wanted, grad)[0])

    return both if training else forward


def calls(
    cell: str,
    dtype: torch.dtype,
    training: bool,
    device: str,
    std: float,
    side: int | None = None,
    rounded_to: torch.dtype | None = None,
) -> dict[str, common.Call]:
    """Every candidate by name, on the same map; numbers are those that `rounded_to` holds."""
    first = rounded_to or dtype
    torch.manual_seed(0)
    batch, channels, full, _, _ = CELLS[cell]
    batch = 1 if side else batch
    x = torch.randn(batch, channels, side or full, side or full, device=device).to(first).to(dtype)
    x.requires_grad_(training)
    made = {}
    for name, module in modules(cell, std).items():
        module.to(device, first).to(dtype)
        torch.manual_seed(1)
        made[name] = call_of(module, x, training, None)
        if name == "regard" and dtype != torch.float32:
            torch.manual_seed(1)
            made["regard, rounded scores"] = call_of(module, x, training, dtype)
    return made


def candidate(cell: str, name: str, dtype: str, training: bool, device: str) -> common.Call:
    """One call, for the memory process."""
    return calls(cell, common.DTYPES[dtype], training, device, 1.0)[name]


def gflop(batch: int, channels: int, side: int, training: bool) -> float:
    """Of the formula: four projections and the two products of attention."""
    n = side**2
    products = 8 * n * channels**2 + 4 * n**2 * channels
    return 1e-9 * batch * products * (3 if training else 1)


def measure(options: Any, cell: str, dtype: str, training: bool) -> dict[str, Any]:
    """One row: seconds and errors of every candidate, and the GEMM limit."""
    kind, device = common.DTYPES[dtype], options.device
    batch, channels, full, _, _ = CELLS[cell]
    side = min(full, 16)
    exact = calls(cell, torch.float64, training, device, 3.0, side, kind)["plain formula"]()
    error = {
        name: common.relative_error(call(), exact)
        for name, call in calls(cell, kind, training, device, 3.0, side).items()
    }
    whole = gflop(batch, channels, full, training)
    larger = whole / gflop(1, channels, side, training)
    trial = calls(cell, kind, training, device, 1.0, side)
    for call in trial.values():
        call()
    reckoned = {n: common.once(c, device) * larger for n, c in trial.items()}
    timed = {
        name: call
        for name, call in calls(cell, kind, training, device, 1.0).items()
        if reckoned[name] < options.limit or name == "regard"
    }
    return {
        "error": error,
        "seconds": common.interleaved(timed, options.seconds, device),
        "gflop": whole,
        "gemm": common.gemm_limit(kind, device),
    }


def times_input(cell: str, dtype: str, training: bool, peak: int) -> str:
    """Peak memory beyond the map, the output and in training the map's gradient, in maps."""
    batch, channels, side, _, _ = CELLS[cell]
    size = batch * channels * side**2 * common.DTYPES[dtype].itemsize
    return f"{peak / size - (2 if training else 1):.1f}"


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.prepare(options)
    what, everyone = "batch, channels, side, groups, heads", ("regard", *PEERS)
    if options.memory:
        if not options.table:
            cells = ["1,512,128,32,1", "1,512,64,32,1", "8,256,32,32,8"]
            common.measure_memory("pixel", options, cells, everyone)
        place = options.device, list(CELLS), what, everyone
        print(common.memory_report("pixel", *place, times_input))
        return
    if not options.table:
        common.run("pixel", options, list(CELLS), measure)
    results = common.stored("pixel", options.device)
    print(common.report(results, list(CELLS), what, PEERS, PEERS[0]))
    common.picture(results, list(CELLS), "pixel", PEERS)


if __name__ == "__main__":
    main()
