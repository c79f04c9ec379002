"""`regard.attend` beside torch's plain attention and its fused one.

Each cell is one interleaved run, medians. Errors are against float64 at logit standard deviation
3, in training those of the gradients too. A peer counts where its error is at most 1.5 times ours.
`--kernels` times our kernels one by one instead, on operands that lie in one packed projection as
models hand them over: the table that the rule of the choice is made of.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import common
from regard._device import BF16_PRODUCTS
from regard.layers.attend import Problem, attend, attention_kernel, choose

# batch, heads, tokens, width of a head
CELLS = (
    "1,1,4096,512",
    "1,1,1024,512",
    "4,1,256,512",
    "8,8,1024,32",
    "4,8,1024,32",
    "8,4,1024,64",
    "4,4,1024,64",
    "8,4,256,64",
    "2,6,576,64",
    "8,6,196,64",
    "32,3,64,64",
    "1,1,16384,512",
)
# Beside these, where one kernel gives way to another.
BORDERS = ("1,6,196,64", "2,6,196,64", "64,3,64,64", "16,4,64,64", "2,1,1024,512", "1,1,1024,64")
PEERS = ("torch plain", "torch SDPA")


def shape_of(cell: str) -> tuple[int, ...]:
    return tuple(int(size) for size in cell.split(","))


def torch_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ v


def functions(dtype: torch.dtype, kernels: bool) -> dict[str, Any]:
    """Everything that is timed, by name."""
    if kernels:
        return {
            name: lambda q, k, v, name=name: attend(q, k, v, kernel=name)
            for name in ("plain", "sdpa", "blocked")
        }
    found = {"regard": attend}
    if dtype != torch.float32:
        found["regard, rounded scores"] = lambda q, k, v: attend(q, k, v, score_dtype=q.dtype)
    return found | {"torch plain": torch_plain, "torch SDPA": scaled_dot_product_attention}


def operands(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    training: bool,
    *,
    std: float = 1.0,
    packed: bool = False,
) -> list[Tensor]:
    """q, k, v and a gradient; `std` is that of the logits.

    `packed`: q, k and v lie in one projection (b, n, 3, g, d), as models hand them to attention.
    """
    q, k, v, grad = (torch.randn(shape, device=device) for _ in range(4))
    made = [(q * std).to(dtype), k.to(dtype), v.to(dtype)]
    if packed:
        whole = torch.stack([x.transpose(1, 2) for x in made], dim=2).requires_grad_(training)
        made = [part.transpose(1, 2) for part in whole.unbind(2)]
    elif training:
        made = [x.requires_grad_() for x in made]
    return [*made, grad.to(dtype)]


def call_of(function: Any, inputs: list[Tensor], training: bool) -> common.Call:
    q, k, v, grad = inputs

    def forward() -> Tensor:
        with torch.no_grad():
            return function(q, k, v)

    def both() -> tuple[Tensor, ...]:
        out = function(q, k, v)
        return (out, *torch.autograd.grad(out, (q, k, v), grad))

    return both if training else forward


def candidate(
    cell: str, name: str, dtype: str, training: bool, device: str, kernels: bool = False
) -> common.Call:
    """One call, for the memory process."""
    kind = common.DTYPES[dtype]
    inputs = operands(shape_of(cell), kind, device, training)
    return call_of(functions(kind, kernels)[name], inputs, training)


def errors(
    cell: str, dtype: torch.dtype, training: bool, device: str, kernels: bool
) -> dict[str, float]:
    """Relative errors at logit standard deviation 3, on one head of at most 1024 tokens.

    Ours runs there the kernel that it chooses for the whole cell.
    """
    whole = shape_of(cell)
    _, _, n, d = whole
    inputs = operands((1, 1, min(n, 1024), d), dtype, device, training, std=3.0)
    exact = [x.detach().double().requires_grad_(training) for x in inputs]
    reference = call_of(torch_plain, exact, training)()
    found = {}
    for name, function in functions(dtype, kernels).items():
        rounded = name == "regard, rounded scores"
        with attention_kernel(chosen(whole, dtype, device, training, rounded)):
            found[name] = common.relative_error(call_of(function, inputs, training)(), reference)
    return found


def chosen(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, training: bool, rounded: bool
) -> str:
    """The kernel that `attend` chooses."""
    b, g, n, d = shape
    size = {"heads": b * g, "n": n, "m": n, "d": d, "e": d, "grad": training}
    problem = Problem(
        device=device.split(":")[0],
        dtype=dtype,
        rounded=rounded and dtype.itemsize < 4,
        bf16_products=BF16_PRODUCTS,
        **size,
    )
    return choose(problem).kernel


def reckoned(function: Any, cell: str, dtype: torch.dtype, training: bool, device: str) -> float:
    """Seconds that a cell will take, from a problem of at most 2²⁶ scores times width."""
    b, g, n, d = shape_of(cell)
    short = min(n, max(16, int((2**24 / d) ** 0.5)))
    inputs = operands((1, 1, short, d), dtype, device, training)
    call = call_of(function, inputs, training)
    seconds = min(common.once(call, device), common.once(call, device))
    return seconds * b * g * (n / short) ** 2


def measure(options: Any, cell: str, dtype: str, training: bool) -> dict[str, Any]:
    """One row: seconds and errors of every candidate, and the GEMM limit."""
    kind = common.DTYPES[dtype]
    inputs = operands(shape_of(cell), kind, options.device, training, packed=options.kernels)
    calls = {
        name: call_of(function, inputs, training)
        for name, function in functions(kind, options.kernels).items()
        if reckoned(function, cell, kind, training, options.device) < options.limit
    }
    b, g, n, d = shape_of(cell)
    return {
        "error": errors(cell, kind, training, options.device, options.kernels),
        "seconds": common.interleaved(calls, options.seconds, options.device),
        "gflop": 4e-9 * b * g * n * n * d * (3.5 if training else 1),
        "gemm": common.gemm_limit(kind, options.device),
    }


def kernel_report(results: dict[str, Any]) -> str:
    names = ("plain", "sdpa", "blocked")
    body = [
        [
            cell,
            *(common.milliseconds(row["seconds"].get(name)) for name in names),
            min(row["seconds"], key=row["seconds"].get),
        ]
        for cell, row in sorted(results["rows"].items())
    ]
    return common.table(["cell", *names, "fastest"], body)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--kernels", action="store_true", help="time our kernels one by one")
    given = options.parse_args()
    common.prepare(given)
    if given.memory:
        everyone = ("regard", *PEERS)
        if not given.table:
            cells = ["1,1,4096,512", "8,8,1024,32"]
            common.measure_memory("attend", given, cells, everyone)
        place = given.device, list(CELLS), "batch, heads, tokens, width", everyone
        print("MiB\n\n" + common.memory_report("attend", *place, common.mebibytes))
        return
    name = "attend-kernels" if given.kernels else "attend"
    if not given.table:
        cells = [*CELLS, *BORDERS] if given.kernels else list(CELLS)
        common.run(name, given, cells, measure)
    results = common.stored(name, given.device)
    if given.kernels:
        print(kernel_report(results))
        return
    print(common.report(results, list(CELLS), "batch, heads, tokens, width", PEERS, PEERS[1]))
    common.picture(results, list(CELLS), name, PEERS)


if __name__ == "__main__":
    main()
