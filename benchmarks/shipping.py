"""Exported files beside eager torch, int8, and `regard predict`: speed and peak memory.

    python -m benchmarks.shipping files             ONNX beside eager torch, both model families
    python -m benchmarks.shipping int8              and quantised to 8 bits
    python -m benchmarks.shipping predict JPEGS     images a second beside the model's own speed
    python -m benchmarks.shipping memory JPEGS      peak memory for 1,000 images and for all

JPEGS is a folder or a zip of small pictures. Models have random weights, on which time and memory
do not depend. Functions that are compared take turns within each round; a ratio is the median over
the rounds, ± half its interquartile range. `--models` and `--seconds` choose.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

import regard
from regard._io import write_weights
from regard.data.preprocess import Preprocess
from regard.export.formats import (
    FileFacts,
    ModuleRunner,
    Runner,
    dynamic_axes,
    open_file,
    quantise,
    trace,
    write,
)
from regard.export.parity import interleaved
from regard.predict.predict import PredictOptions, predict
from regard.predict.predictor import Predictor, load

CLASSES = tuple(f"class {i}" for i in range(10))
# name: side of the input
MODELS = {"simple-vit-ti/4": 32, "simple-vit-s/16": 224, "pixel-resnet-nano": 32,
          "pixel-resnet-s": 32}  # fmt: skip
ROUNDS = 4  # of prediction beside the model alone


def show(cells: list[str]) -> None:
    """A line of a Markdown table, at once."""
    print("| " + " | ".join(cells) + " |", flush=True)


def head(cells: list[str]) -> None:
    show(cells)
    show(["---"] * len(cells))


def model_of(name: str) -> tuple[torch.nn.Module, Preprocess]:
    """A model of random weights, and its preprocessing."""
    torch.manual_seed(0)
    side = MODELS[name]
    model = regard.create(name, num_classes=len(CLASSES), image_size=side)
    return model.eval(), Preprocess((side, side))


def files_of(name: str, folder: Path, int8: bool) -> dict[str, Runner]:
    """The model in eager torch, as an ONNX file, and where asked quantised."""
    model, preprocess = model_of(name)
    facts = FileFacts(
        takes="tensor", precision="fp32", classes=CLASSES, preprocess=preprocess, model={},
        dynamic=dynamic_axes(model, "tensor"), multiple=(1, 1), run={}, licence="",
        versions={"regard": regard.__version__},
    )  # fmt: skip
    whole = folder / "fp32.onnx"
    write(trace(model, preprocess, "tensor"), facts, whole)
    runners: dict[str, Runner] = {
        "eager torch": ModuleRunner(model, torch.device("cpu")),
        "ONNX": open_file(whole)[1],
    }
    if int8:
        rounded = folder / "int8.onnx"
        quantise(whole, rounded, facts)
        runners["ONNX int8"] = open_file(rounded)[1]
    return runners


def compare_files(names: list[str], batches: list[int], seconds: float, int8: bool) -> None:
    """Milliseconds a call and the speed over eager torch."""
    head(["model", "batch", "eager torch", "ONNX", *["ONNX int8"] * int8])
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            runners = files_of(name, Path(folder), int8)
            for batch in batches:
                images = torch.randn(batch, 3, MODELS[name], MODELS[name])
                found = interleaved(runners, images, seconds)
                cells = [f"{found['eager torch'].milliseconds:.2f} ms"]
                for kind in list(runners)[1:]:
                    one = found[kind]
                    cells.append(
                        f"{one.milliseconds:.2f} ms ({one.speedup:.2f} ± {one.error:.2f} ×)"
                    )
                show([name, str(batch), *cells])


def untrained(name: str, folder: Path) -> Path:
    """A weights file that `regard predict` takes for a run."""
    model, preprocess = model_of(name)
    arguments = {"name": name, "num_classes": len(CLASSES), "image_size": MODELS[name]}
    metadata = {"model": arguments, "classes": CLASSES, "preprocess": preprocess.to_dict()}
    path = folder / "model.safetensors"
    said = {key: json.dumps(value) for key, value in metadata.items()}
    write_weights(path, model.state_dict(), said)
    return path


def own_speed(predictor: Predictor, images: torch.Tensor) -> float:
    """Images a second of the model on tensors that are ready."""
    start = time.perf_counter()
    for batch in images.split(64):
        predictor.runner(batch)
    return len(images) / (time.perf_counter() - start)


def compare_prediction(name: str, jpegs: Path, count: int) -> None:
    """Predict `count` pictures in turns with the model alone on as many tensors."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        weights, chosen = untrained(name, folder), some_of(jpegs, count, folder / "pictures")
        predictor = load(weights)
        size = predictor.preprocess.size
        images = torch.randn(count // ROUNDS, 3, *size)
        options = {"batch_size": 64, "force": True}
        own_speed(predictor, images[:256])
        head(["images", f"{name} alone, images/s", "regard predict", "ratio"])
        parts = sorted(chosen.rglob("*.jpg"))
        for turn in range(ROUNDS):
            mine = tuple(str(path) for path in parts[turn::ROUNDS])
            alone = own_speed(predictor, images)
            start = time.perf_counter()
            predict(PredictOptions(weights, mine, folder / "out.csv", **options))  # type: ignore[arg-type]
            whole = len(mine) / (time.perf_counter() - start)
            show([f"{len(mine):,}", f"{alone:.0f}", f"{whole:.0f}", f"{whole / alone:.3f}"])


def compare_memory(name: str, jpegs: Path, counts: list[int]) -> None:
    """The most memory that the process of `regard predict` held, for each number of images."""
    head(["images", "peak memory", "images/s, start included"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        weights = untrained(name, folder)
        for count in counts:
            chosen = some_of(jpegs, count, folder / f"pictures-{count}")
            code = (
                "import resource, sys; from regard.__main__ import run; code = run(sys.argv[1:]);"
                "print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
            )
            out = folder / f"{count}.csv"
            command = [sys.executable, "-c", code, "predict", str(weights), str(chosen), "--out",
                       str(out)]  # fmt: skip
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            code_text, kilobytes = done.stdout.split()[-2:]
            assert code_text == "0", done.stderr
            written = sum(1 for _ in out.open()) - 1
            rate = written / (time.perf_counter() - start)
            show([f"{written:,}", f"{int(kilobytes) / 1e3:.0f} MB", f"{rate:.0f}"])


def some_of(jpegs: Path, count: int, folder: Path) -> Path:
    """A folder of `count` of the pictures, spread evenly over them."""
    folder.mkdir()
    if jpegs.is_dir():
        paths = sorted(jpegs.rglob("*.jpg"))
        for i, path in enumerate(paths[:: max(1, len(paths) // count)][:count]):
            (folder / f"{i:06d}.jpg").write_bytes(path.read_bytes())
        return folder
    with zipfile.ZipFile(jpegs) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jpg")]
        for i, name in enumerate(names[:: max(1, len(names) // count)][:count]):
            (folder / f"{i:06d}.jpg").write_bytes(archive.read(name))
    return folder


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("part", choices=("files", "int8", "predict", "memory"))
    options.add_argument("jpegs", nargs="?", type=Path)
    options.add_argument("--models", nargs="+", choices=MODELS)
    options.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    options.add_argument("--seconds", type=float, default=4.0, help="for each model and batch")
    options.add_argument("--count", nargs="+", type=int, help="how many images to predict")
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    if given.part in ("predict", "memory") and given.jpegs is None:
        options.error(f"{given.part} needs a folder or a zip of JPEGs")
    if given.part == "files":
        compare_files(given.models or list(MODELS), given.batches, given.seconds, False)
    elif given.part == "int8":
        compare_files(given.models or ["simple-vit-s/16"], given.batches, given.seconds, True)
    elif given.part == "predict":
        name = (given.models or ["pixel-resnet-s"])[0]
        compare_prediction(name, given.jpegs, (given.count or [10000])[0])
    else:
        name = (given.models or ["pixel-resnet-nano"])[0]
        compare_memory(name, given.jpegs, given.count or [1000, 50000])


if __name__ == "__main__":
    main()
