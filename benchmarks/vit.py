"""`regard.SimpleViT`, S/16 at 224², beside vit-pytorch's and timm's.

vit-pytorch's `simple_vit_with_qk_norm` holds the same weights as ours, with no classifier; timm's
is `VisionTransformer(qk_norm=True, class_token=False, global_pool="avg")` with none either.
Training is forward, backward and a step of AdamW (fused where torch has it, for all three).
Errors of the output are against float64, each model's against its own weights.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import regard
from benchmarks import common
from regard.convert.conversion import convert

BATCHES = {"1": 1, "8": 8, "32": 32}
PEERS = ("vit-pytorch", "timm")
SIZE = {"image_size": 224, "patch_size": 16, "dim": 384, "depth": 12, "heads": 6, "mlp_dim": 1536}


def models() -> dict[str, nn.Module]:
    """The three models in float32."""
    from timm.models.vision_transformer import VisionTransformer
    from vit_pytorch.simple_vit_with_qk_norm import SimpleViT

    torch.manual_seed(0)
    theirs = SimpleViT(num_classes=1, **SIZE)
    ours = regard.SimpleViT(num_classes=None, **SIZE)
    ours.load_state_dict(convert(theirs.state_dict(), "vit-pytorch-qk"))
    timm = VisionTransformer(
        img_size=224,
        patch_size=16,
        embed_dim=384,
        depth=12,
        num_heads=6,
        qk_norm=True,
        class_token=False,
        global_pool="avg",
        num_classes=0,
    )
    return {"regard": ours, "vit-pytorch": theirs, "timm": timm}


def call_of(model: nn.Module, images: Tensor, training: bool) -> common.Call:
    model.train(training)

    def forward() -> Tensor:
        with torch.no_grad():
            return model(images)

    if not training:
        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    target = torch.randn_like(images[:, :1, 0, 0])

    def step() -> Tensor:
        loss = (model(images) * target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def images_of(batch: int, dtype: torch.dtype, device: str) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(batch, 3, 224, 224, device=device).to(dtype)


def candidate(cell: str, name: str, dtype: str, training: bool, device: str) -> common.Call:
    """One call, for the memory process."""
    kind = common.DTYPES[dtype]
    model = models()[name].to(device, kind)
    return call_of(model, images_of(BATCHES[cell], kind, device), training)


def measure(options: Any, cell: str, dtype: str, training: bool) -> dict[str, Any]:
    """One row: seconds and errors of every model, and the GEMM limit."""
    kind, device, batch = common.DTYPES[dtype], options.device, BATCHES[cell]
    error, timed = {}, {}
    for name, model in models().items():
        model.to(device, kind)
        one = images_of(1, kind, device)
        exact = call_of(copy.deepcopy(model).double(), one.double(), False)()
        error[name] = common.relative_error(call_of(model, one, False)(), exact)
        share = common.once(call_of(model, one, False), device) * batch * (3 if training else 1)
        if share < options.limit or name == "regard":
            timed[name] = call_of(model, images_of(batch, kind, device), training)
    tokens, dim, hidden, depth = 196, 384, 1536, 12
    products = 2 * tokens * (depth * (4 * dim**2 + 2 * dim * hidden) + 768 * dim)
    attention = depth * 4 * tokens**2 * dim
    return {
        "error": error,
        "seconds": common.interleaved(timed, options.seconds, device),
        "gflop": 1e-9 * batch * (products + attention) * (3 if training else 1),
        "gemm": common.gemm_limit(kind, device),
    }


def main() -> None:
    options = common.parser(__doc__).parse_args()
    common.prepare(options)
    if options.memory:
        everyone = ("regard", *PEERS)
        if not options.table:
            common.measure_memory("vit", options, list(BATCHES), everyone)
        place = options.device, list(BATCHES), "batch", everyone
        print("MiB\n\n" + common.memory_report("vit", *place, common.mebibytes))
        return
    if not options.table:
        common.run("vit", options, list(BATCHES), measure)
    results = common.stored("vit", options.device)
    print(common.report(results, list(BATCHES), "batch", PEERS, PEERS[0]))
    common.picture(results, list(BATCHES), "vit", PEERS)


if __name__ == "__main__":
    main()
