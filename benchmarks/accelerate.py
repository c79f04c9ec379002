"""Whole models with random weights, as their libraries build them and after `regard.accelerate`.

python -m benchmarks.accelerate [--models NAME …] [--memory] [--table]

Both run in one process, in an order drawn anew each round; outputs are compared. The original runs
twice a round: what lies between its two medians ("same twice") is noise. The share of time that
attention takes in the original is measured beside: no acceleration gains more than that. With
--memory, peak memory beyond weights and inputs, each in a process of its own. Results go to
benchmarks/results and from there into the table.
"""

import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from regard.acceleration.swap import accelerate, attentions

Inputs = tuple[Tensor, ...]
State = list[tuple[nn.Module, type, dict[str, Any]]]


def ddpm_cifar() -> nn.Module:
    """The U-Net of DDPM for CIFAR-10: one head, at 16×16."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
    )


def ldm_celebahq() -> nn.Module:
    """The U-Net of latent diffusion for CelebA-HQ: heads of 32, at 32×32, 16×16 and 8×8."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=64,
        block_out_channels=(224, 448, 672, 896),
        down_block_types=("DownBlock2D", *("AttnDownBlock2D",) * 3),
        up_block_types=(*("AttnUpBlock2D",) * 3, "UpBlock2D"),
        attention_head_dim=32,
    )


class Decoder(nn.Module):
    """Stable Diffusion's VAE decoder: one head of width 512 at an eighth of the image's size."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512),
            layers_per_block=2,
        )
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))


class MiddleAttention(nn.Module):
    """The attention of Stable Diffusion's VAE by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Decoder().decoder.mid_block.attentions[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def timm_vit() -> nn.Module:
    """timm's ViT-S/16 with QK norm."""
    from timm.models import VisionTransformer

    return VisionTransformer(
        embed_dim=384, num_heads=6, qk_norm=True, class_token=False, global_pool="avg"
    )


# Build, and the shape of the input; a U-Net gets a time step too.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "DDPM CIFAR-10 U-Net, 4×32²": (ddpm_cifar, (4, 3, 32, 32)),
    "DDPM CIFAR-10 U-Net, 1×32²": (ddpm_cifar, (1, 3, 32, 32)),
    "LDM CelebA-HQ U-Net, 1×64²": (ldm_celebahq, (1, 3, 64, 64)),
    "SD VAE decoder, 256²": (Decoder, (1, 4, 32, 32)),
    "SD VAE decoder, 512²": (Decoder, (1, 4, 64, 64)),
    "SD VAE decoder, 1024²": (Decoder, (1, 4, 128, 128)),
    "SD VAE's attention at 1024²": (MiddleAttention, (1, 512, 128, 128)),
    "timm ViT-S/16 qk_norm, 1×224²": (timm_vit, (1, 3, 224, 224)),
    "timm ViT-S/16 qk_norm, 8×224²": (timm_vit, (8, 3, 224, 224)),
}


def built(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Inputs]:
    """A model in evaluation mode and its inputs; layers that start at zero are drawn too."""
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    inputs: Inputs = (torch.randn(shape).to(device, dtype),)
    if "U-Net" in name:
        inputs = (*inputs, torch.tensor(10, device=device))
    return model.to(device, dtype), inputs


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    result = model(*inputs)
    return getattr(result, "sample", result)


def in_turn(calls: dict[str, common.Call], seconds: float, device: str) -> dict[str, list[float]]:
    """Seconds of each call, all in each round, after one round that is not counted."""
    warm = sum(common.once(call, device) for call in calls.values())
    rounds = max(3, min(100, int(seconds / warm)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            times[name].append(common.once(calls[name], device))
    return times


def share(model: nn.Module, inputs: Inputs, device: str) -> float:
    """The part of a forward's time that passes within attention modules."""
    spent: list[float] = []
    for _, module, _ in list(attentions(model)):
        original = module.forward

        def timed(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            kept: list[Any] = []
            spent.append(common.once(lambda: kept.append(original(*args, **kwargs)), device))
            return kept[0]

        module.forward = timed  # type: ignore[method-assign]
    whole = common.once(lambda: output(model, inputs), device)
    for _, module, _ in list(attentions(model)):
        del module.__dict__["forward"]
    return sum(spent) / whole


def state(modules: list[nn.Module]) -> State:
    """What acceleration changes in modules, so that one model can be timed both ways.

    A copy will not do: two copies of one model were seen to differ by several percent, by where
    their weights lie in memory.
    """
    names = ("processor", "regard_spec", "regard_fold")
    return [(m, type(m), {n: m.__dict__[n] for n in names if n in m.__dict__}) for m in modules]


def put(states: State) -> None:
    """Bring modules into a state that `state` kept."""
    for module, cls, entries in states:
        module.__class__ = cls
        for name in ("processor", "regard_spec", "regard_fold"):
            module.__dict__.pop(name, None)
        module.__dict__.update(entries)


def measure(name: str, dtype: str, options: Any) -> dict[str, Any]:
    """One row: times, ratio, difference and attention's share."""
    device = options.device
    model, inputs = built(name, common.DTYPES[dtype], device)
    attending = [module for _, module, _ in attentions(model)]
    plain = state(attending)
    _, report = accelerate(model)
    ours = state(attending)

    def run(side: State) -> Tensor:
        put(side)
        return output(model, inputs)

    calls = {"before": lambda: run(plain), "again": lambda: run(plain), "after": lambda: run(ours)}
    times = in_turn(calls, options.seconds, device)
    before = statistics.median(times["before"] + times["again"])
    after = statistics.median(times["after"])
    twice = [statistics.median(times[side]) for side in ("before", "again")]
    got, wanted = run(ours).double(), run(plain).double()
    return {
        "before": before,
        "after": after,
        "ratio": before / after,
        "same twice": max(twice) / min(twice),
        "rounds": len(times["before"]),
        "difference": float((got - wanted).abs().max() / wanted.abs().max()),
        "share": share(model, inputs, device),
        "swapped": len(report.swapped),
    }


def candidate(name: str, dtype: str, side: str, device: str) -> common.Call:
    """For `common.peak_memory`: a model before or after; its first call is small."""
    model, inputs = built(name, common.DTYPES[dtype], device)
    if side == "after":
        accelerate(model)
    corner = tuple(x[..., :16, :16] if x.ndim == 4 and "ViT" not in name else x for x in inputs)
    ahead = iter([corner])

    @torch.no_grad()
    def call() -> Tensor:
        return output(model, next(ahead, inputs))

    return call


def memory(name: str, dtype: str, options: Any) -> dict[str, Any]:
    """Peak bytes of both sides."""
    spec = {"name": name, "dtype": dtype, "device": options.device, "threads": options.threads}
    sides = ("before", "after")
    module = "benchmarks.accelerate"
    return {f"peak {side}": common.peak_memory(module, {**spec, "side": side}) for side in sides}


def show(device: str) -> str:
    """The stored results as a table."""
    held = common.stored("accelerate", device)
    header = ["model", "dtype", "before, ms", "after, ms", "speed", "same twice"]
    header += ["attention's share"]
    header += ["largest difference", "peak before, MiB", "peak after, MiB"]
    rows = []
    for name in MODELS:
        for dtype in common.DTYPES:
            row = held["rows"].get(f"{name}|{dtype}")
            if row is None:
                continue
            peaks = [row.get(f"peak {side}") for side in ("before", "after")]
            timed = "ratio" in row
            rows.append(
                [
                    *(name, dtype),
                    *(common.milliseconds(row.get(side)) for side in ("before", "after")),
                    f"{row['ratio']:.3f}×" if timed else "—",
                    f"{row['same twice']:.3f}×" if "same twice" in row else "—",
                    f"{row['share']:.1%}" if timed else "—",
                    f"{row['difference']:.1e}" if timed else "—",
                    *("—" if peak is None else f"{peak / 2**20:.0f}" for peak in peaks),
                ]
            )
    return f"{held['machine']}\n\n{common.table(header, rows)}"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    common.prepare(options)
    if not options.table:
        for name in options.models:
            for dtype in options.dtype:
                key = f"{name}|{dtype}"
                with torch.no_grad():
                    row = (memory if options.memory else measure)(name, dtype, options)
                held = {}
                if (common.RESULTS / f"accelerate-{options.device.split(':')[0]}.json").exists():
                    held = common.stored("accelerate", options.device)["rows"].get(key, {})
                common.store("accelerate", options.device, {key: held | row})
                print(key, row, flush=True)
    print(show(options.device))


if __name__ == "__main__":
    main()
