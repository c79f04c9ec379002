"""What recording costs: time and memory beside the same forward unrecorded.

`python -m benchmarks.recording`: simple-vit-s/16 at 224², reductions only; one pixel of a 128×128
map of pixel attention; health in a training step of simple-vit-nano/4; and, with `--page`, how
long the look page of a 12-layer, 6-head model takes to answer a pointer move in Chromium.
"""

import contextlib
import functools
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks import common
from regard.interpret.health import attention_health
from regard.interpret.record import record
from regard.layers.pixel_attention import PixelAttention
from regard.models.registry import create

REDUCTIONS = ("received", "entropy", "largest_logit")


@functools.cache
def built(system: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """One model for plain and recorded: two copies differ by percents, by where they lie."""
    model: torch.nn.Module = (
        create("simple-vit-s/16", num_classes=1000)
        if system == "vit"
        else PixelAttention(64, num_heads=1, num_groups=8)
    )
    return model.eval().to(device, dtype)


def forward(kind: str, batch: int, dtype: torch.dtype, device: str) -> common.Call:
    """A forward, plain or recorded, of "vit" or "pixel"."""
    system, _, how = kind.partition(" ")
    model = built(system, dtype, device)
    shape = (3, 224, 224) if system == "vit" else (64, 128, 128)
    images = torch.randn(batch, *shape, device=device, dtype=dtype)
    options: dict[str, Any] = {
        "reductions": {"keep": REDUCTIONS},
        "weights": {"keep": "weights"},
        "pixel": {"queries": [(64, 64)]},
    }.get(how, {})

    @torch.no_grad()
    def call() -> None:
        with record(model, **options) if how else contextlib.nullcontext():
            model(images)

    return call


def candidate(kind: str, batch: int, dtype: str, device: str) -> common.Call:
    """For `common.peak_memory`."""
    return forward(kind, batch, common.DTYPES[dtype], device)


def training_step(watched: bool, device: str) -> common.Call:
    """One step on 128 images of 32², with or without health on 16 of them."""
    torch.manual_seed(0)
    model = create("simple-vit-nano/4", num_classes=10, image_size=32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(128, 3, 32, 32, device=device)
    labels = torch.randint(10, (128,), device=device)

    def call() -> None:
        with attention_health(model, images=16) if watched else contextlib.nullcontext():
            loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def measure(options: Any) -> list[list[str]]:
    """Rows of what, plain, recorded, ratio."""
    rows = []
    for name in options.dtype:
        dtype = common.DTYPES[name]
        for batch in (1, 8):
            calls = {
                "plain": forward("vit", batch, dtype, options.device),
                "recorded": forward("vit reductions", batch, dtype, options.device),
            }
            times = common.interleaved(calls, options.seconds, options.device)
            what = f"simple-vit-s/16, batch {batch}, {name}, reductions, ms"
            rows.append(compared(what, times["plain"] * 1e3, times["recorded"] * 1e3))
    calls = {
        "plain": training_step(False, options.device),
        "recorded": training_step(True, options.device),
    }
    times = common.interleaved(calls, options.seconds, options.device)
    what = "simple-vit-nano/4, training step of 128, health of 16, ms"
    rows.append(compared(what, times["plain"] * 1e3, times["recorded"] * 1e3))
    for what, plain, recorded, batch in (
        ("simple-vit-s/16, batch 1, reductions, peak MB", "vit", "vit reductions", 1),
        ("simple-vit-s/16, batch 8, reductions, peak MB", "vit", "vit reductions", 8),
        ("pixel attention on 128×128, one pixel, peak MB", "pixel", "pixel pixel", 1),
    ):
        peaks = [peak(kind, batch, options.device) for kind in (plain, recorded)]
        rows.append(compared(what, *peaks))
    return rows


def peak(kind: str, batch: int, device: str) -> float:
    """Megabytes beyond weights and input, the median of three processes."""
    spec = {"kind": kind, "batch": batch, "dtype": "float32", "device": device}
    return statistics.median(
        common.peak_memory("benchmarks.recording", spec) / 1e6 for _ in range(3)
    )


def compared(what: str, plain: float, recorded: float) -> list[str]:
    return [what, f"{plain:.3g}", f"{recorded:.3g}", f"{recorded / plain:.3f}"]


def answer_times(moves: int = 60) -> list[float]:
    """Milliseconds from a pointer move to the next painted frame, in Chromium, ascending.

    The browser itself is still at work for a second after loading; nobody points before.
    """
    from playwright.sync_api import sync_playwright

    from regard.data.preprocess import Preprocess
    from regard.pages.look_data import Picture, look_at
    from regard.pages.look_page import look_page

    model = create("simple-vit-s/16", num_classes=10).eval()
    preprocess = Preprocess((224, 224))
    pixels = torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8)
    picture = Picture("noise", pixels, preprocess(pixels), preprocess.geometry(224, 224))
    text = look_page(look_at(model, picture, [str(i) for i in range(10)]))
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "look.html")
        file.write_text(text, encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        tab = chromium.new_page(viewport={"width": 1200, "height": 900})
        tab.goto(file.as_uri())
        tab.wait_for_timeout(1000)
        print(f"page of {len(text.encode()) / 1e6:.2f} MB")
        times = tab.evaluate(
            """async moves => {
              const stage = document.getElementById("overlay"), r = stage.getBoundingClientRect();
              const frame = () => new Promise(requestAnimationFrame), times = [];
              for (let i = 0; i < moves; i++) {
                await frame();
                const started = performance.now();
                stage.dispatchEvent(new PointerEvent("pointermove", {
                  clientX: r.left + r.width * ((i * 7) % moves + 0.5) / moves,
                  clientY: r.top + r.height * (i + 0.5) / moves }));
                await frame(); await new Promise(done => setTimeout(done));
                times.push(performance.now() - started);
              }
              return times; }""",
            moves,
        )
        chromium.close()
    return sorted(times)


def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--page", action="store_true", help="time the look page in Chromium")
    given = options.parse_args()
    common.prepare(given)
    if given.page:
        times = answer_times()
        print(f"pointer to frame: median {times[len(times) // 2]:.1f} ms, most {times[-1]:.1f} ms")
        return
    rows = measure(given)
    common.store("recording", given.device, {row[0]: row[1:] for row in rows})
    print(common.machine(given.device))
    print(common.table(["", "plain", "recorded", "ratio"], rows))


if __name__ == "__main__":
    main()
