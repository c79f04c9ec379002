"""What the benchmarks share: interleaved timing, errors, peak memory, stored results."""

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import counted

Call = Callable[[], Any]
RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PASSES = ("forward", "training")
# Errors below this are float32's own rounding, and exclude nobody.
ROUNDING = 5e-7
# The largest share of the CPU that other processes may take while a row is measured.
MOST_OTHERS = 0.15


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(description=doc)
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    options.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    options.add_argument("--cells", nargs="+", help="run only these cells, as the table names them")
    options.add_argument("--seconds", type=float, default=4.0, help="of timing for each cell")
    options.add_argument(
        "--limit", type=float, default=15.0, help="leave out what is reckoned to take longer (s)"
    )
    options.add_argument("--memory", action="store_true", help="measure peak memory instead")
    options.add_argument("--names", nargs="+", help="of those whose memory is measured")
    options.add_argument("--table", action="store_true", help="print what is stored, run nothing")
    return options


def prepare(options: argparse.Namespace) -> None:
    """Threads, and the settings under which the figures are taken."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)


def sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def once(call: Call, device: str) -> float:
    """Seconds of one call."""
    sync(device)
    start = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - start


def interleaved(calls: dict[str, Call], seconds: float, device: str) -> dict[str, float]:
    """Median seconds of each call, all taken in each round so that a busy moment hits them alike.

    The order is drawn anew for each round: what a call leaves in the caches and in the allocator
    is met by each of the others. A call five times as slow as the fastest decides nothing and is
    timed by its warm-up alone. Calls of seconds are warmed up once, others twice.
    """
    first = {name: once(call, device) for name, call in calls.items()}
    slowest = 5 * min(first.values())
    again = {name: call for name, call in calls.items() if first[name] <= slowest}
    slow = sum(first[name] for name in again) > seconds
    warm = {name: first[name] if slow else once(call, device) for name, call in again.items()}
    rounds = max(2 if slow else 3, min(1000, int(seconds / sum(warm.values()))))
    times: dict[str, list[float]] = {name: [] for name in again}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(again), len(again)):
            times[name].append(once(again[name], device))
    return first | {name: statistics.median(taken) for name, taken in times.items()}


def relative_error(got: Any, reference: Any) -> float:
    """‖got - reference‖ / ‖reference‖, the largest over the tensors given."""
    if isinstance(got, Tensor):
        got, reference = [got], [reference]
    worst = 0.0
    for x, y in zip(got, reference, strict=True):
        y = y.double()
        worst = max(worst, ((x.double() - y).norm() / y.norm()).item())
    return worst


def gemm_limit(dtype: torch.dtype, device: str) -> float:
    """GFLOP/s of one large matrix product, best of five, in the dtype that is fastest here."""
    side = 1536 if device == "cpu" else 8192
    if device == "cpu" and dtype != torch.float32:
        from regard._device import BF16_PRODUCTS

        dtype = dtype if BF16_PRODUCTS and dtype == torch.bfloat16 else torch.float32
    a = torch.randn(side, side, device=device).to(dtype)
    return 2e-9 * side**3 / min(once(lambda: a @ a, device) for _ in range(6))


def peak_memory(module: str, spec: dict[str, Any]) -> int:
    """Peak bytes beyond inputs of `module.candidate(**spec)()`, in a process of its own."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-m", "benchmarks.memory", module, json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {spec}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def measure_memory(
    name: str, options: argparse.Namespace, cells: list[str], candidates: tuple[str, ...]
) -> None:
    """Measure and store the peak bytes of every candidate beyond its inputs."""
    for cell in options.cells or cells:
        for dtype in options.dtype:
            for mode in options.passes:
                spec = {"cell": cell, "dtype": dtype, "training": mode == "training"}
                spec |= {"device": options.device, "threads": options.threads}
                peaks = {
                    one: peak_memory(f"benchmarks.{name}", spec | {"name": one})
                    for one in options.names or candidates
                }
                row = key(cell, dtype, mode == "training")
                store(f"{name}-memory", options.device, {row: peaks})
                print(row, peaks, flush=True)


def memory_report(
    name: str,
    device: str,
    cells: list[str],
    what: str,
    candidates: tuple[str, ...],
    shown: Callable[[str, str, bool, int], str],
) -> str:
    """The stored peaks as a table; `shown` words the bytes of a cell, dtype and pass."""
    rows = stored(f"{name}-memory", device)["rows"]
    body = []
    for cell in cells:
        for dtype in DTYPES:
            for training, mode in enumerate(PASSES):
                peaks = rows.get(f"{cell} {dtype} {mode}")
                if peaks:
                    words = [
                        shown(cell, dtype, bool(training), peaks[n]) if n in peaks else "—"
                        for n in candidates
                    ]
                    body.append([cell, dtype, mode, *words])
    return table([what, "dtype", "pass", *candidates], body)


def mebibytes(cell: str, dtype: str, training: bool, peak: int) -> str:
    return f"{peak / 2**20:.0f}"


def machine(device: str) -> str:
    """The machine in words that name what matters to the figures."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    from regard._device import BF16_PRODUCTS

    has = "with" if BF16_PRODUCTS else "no"
    return (
        f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}, {has} bfloat16 "
        f"instructions, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def store(name: str, device: str, rows: dict[str, Any]) -> None:
    """Add rows to the stored results, replacing those of the same key."""
    path = RESULTS / f"{name}-{device.split(':')[0]}.json"
    RESULTS.mkdir(exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    old["machine"] = machine(device)
    old["rows"] |= rows
    path.write_text(json.dumps(old, indent=1, sort_keys=True) + "\n")


def stored(name: str, device: str) -> dict[str, Any]:
    path = RESULTS / f"{name}-{device.split(':')[0]}.json"
    if not path.exists():
        raise SystemExit(f"no results stored in {path}; run without --table first")
    return json.loads(path.read_text())


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(x) for x in values)) if values else math.nan


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def points(
    path: Path, title: str, groups: dict[str, dict[str, float]], legend: dict[str, str]
) -> None:
    """Speed over a peer on a logarithmic axis: one line a cell, one mark a series."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    every = [x for group in groups.values() for x in group.values()]
    low, high = min(0.8, 0.95 * min(every)), max(1.25, 1.12 * max(every))
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.36 * len(groups)), layout="constrained")
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.axvline(1, color="0.25", linewidth=1)
    colours = ("#1b6ca8", "#d1662a")
    for place, (name, words) in enumerate(legend.items()):
        shift = 0.17 * (2 * place - 1)
        known = [
            (group[name], i + shift) for i, group in enumerate(groups.values()) if name in group
        ]
        if not known:
            continue
        x, y = zip(*known, strict=True)
        axes.hlines(y, 1, x, color=colours[place], linewidth=2, alpha=0.45)
        axes.plot(x, y, "o", color=colours[place], markersize=6, label=words)
        for value, at in known:
            side, where = (6, "left") if value >= 1 else (-6, "right")
            axes.annotate(
                f"{value:.2f}",
                (value, at),
                (side, 0),
                textcoords="offset points",
                ha=where,
                va="center",
                fontsize=7.5,
            )
    ticks = [t for t in (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 8, 12) if low < t < high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda t, _: f"{t:g}×"))
    axes.set_yticks(range(len(groups)), list(groups), fontsize=8.5)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("times as fast as the best peer that counts (right of the line: faster)")
    axes.set_title(title, fontsize=11, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8.5, frameon=False, borderpad=0
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def key(cell: str, dtype: str, training: bool) -> str:
    """The name of a row."""
    return f"{cell} {dtype} {PASSES[training]}"


def best_peer(row: dict[str, Any], peers: tuple[str, ...]) -> float | None:
    """Seconds of the fastest peer that counts: its error is at most 1.5 times ours, or rounding.

    None where none was timed.
    """
    bound = max(1.5 * row["error"]["regard"], ROUNDING)
    times = [s for n, s in row["seconds"].items() if n in peers and row["error"][n] <= bound]
    return min(times, default=None)


def report(
    results: dict[str, Any], cells: list[str], what: str, peers: tuple[str, ...], against: str
) -> str:
    """Tables of times and errors, one for each dtype and pass, with means under each."""
    parts = [f"{results['machine']}."]
    for dtype in DTYPES:
        for mode in PASSES:
            rows = {c: results["rows"].get(f"{c} {dtype} {mode}") for c in cells}
            rows = {cell: row for cell, row in rows.items() if row}
            if rows:
                parts += [
                    f"**{dtype}, {mode}**: milliseconds (error)",
                    *_section(rows, what, peers, against),
                ]
    return "\n\n".join(parts)


def _section(rows: dict[str, Any], what: str, peers: tuple[str, ...], against: str) -> list[str]:
    known = {name for row in rows.values() for name in row["error"]}
    ours = [n for n in ("regard", "regard, rounded scores") if n in known]
    names = [*ours, *peers]
    ratios: dict[str, list[float]] = {}
    body = []
    for cell, row in rows.items():
        seconds, error = row["seconds"], row["error"]
        peer, mine = best_peer(row, peers), seconds["regard"]
        for own in ours:
            if own in seconds and against in seconds:
                ratio = seconds[against] / seconds[own]
                ratios.setdefault(f"{own} over {against}", []).append(ratio)
        if peer:
            ratios.setdefault("regard over the best peer that counts", []).append(peer / mine)
        times = [f"{milliseconds(seconds.get(n))} ({error[n]:.0e})" for n in names]
        best = f"{peer / mine:.2f}" if peer else "—"
        busy = f"{row['others']:.0%}" if "others" in row else "—"
        share = f"{row['gflop'] / mine / row['gemm']:.0%}"
        body.append([cell, *times, best, share, busy])
    header = [what, *names, "over best peer", "of GEMM limit", "other load"]
    means = [f"{n} {geometric_mean(r):.2f} ({counted(len(r), 'cell')})" for n, r in ratios.items()]
    return [table(header, body), "Geometric means: " + "; ".join(means) + "."]


def picture(results: dict[str, Any], cells: list[str], name: str, peers: tuple[str, ...]) -> None:
    """docs/NAME-DTYPE.png: speed over the best peer that counts."""
    for dtype in DTYPES:
        groups: dict[str, dict[str, float]] = {}
        for cell in cells:
            for mode in PASSES:
                row = results["rows"].get(f"{cell} {dtype} {mode}")
                peer = best_peer(row, peers) if row else None
                if row and peer:
                    groups.setdefault(cell, {})[mode] = peer / row["seconds"]["regard"]
        if groups:
            path = RESULTS.parents[1] / "docs" / f"{name}-{dtype}.png"
            legend = {"forward": "forward", "training": "forward + backward"}
            points(path, f"{name}, {dtype}", groups, legend)


def cpu_ticks() -> tuple[float, float]:
    """Seconds that all cores, and that this process, have worked."""
    own = sum(os.times()[:2])
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, soft, steal = (int(x) for x in fields[:8])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK"), own


def run(
    name: str,
    options: argparse.Namespace,
    cells: list[str],
    measure: Callable[[argparse.Namespace, str, str, bool], dict[str, Any]],
) -> None:
    """Measure and store every row asked for, with the share of the CPU that others took.

    Rows during which others took much of it say nothing, and are not stored.
    """
    for cell in options.cells or cells:
        for dtype in options.dtype:
            for mode in options.passes:
                start, (all_before, own_before) = time.perf_counter(), cpu_ticks()
                row = measure(options, cell, dtype, mode == "training")
                all_after, own_after = cpu_ticks()
                others = (all_after - all_before) - (own_after - own_before)
                row["others"] = max(0.0, others / (time.perf_counter() - start) / os.cpu_count())
                kept = row["others"] <= MOST_OTHERS
                if kept:
                    store(name, options.device, {key(cell, dtype, mode == "training"): row})
                times = ", ".join(f"{n} {milliseconds(s)}" for n, s in row["seconds"].items())
                times += f" ms; others {row['others']:.0%}" + ("" if kept else ", not stored")
                print(f"{key(cell, dtype, mode == 'training')}: {times}", flush=True)
