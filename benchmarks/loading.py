"""Decoding against PIL, torchvision and simplejpeg; the loader against the training step it feeds.

    python -m benchmarks.loading [FOLDER_OR_ZIP_OF_SMALL_JPEGS]

The decoders take turns within each round; a ratio is the median over the rounds. Each gives pixels
for training, upright where the file says how; simplejpeg knows nothing of Exif and does less there.
"""

import functools
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import Image, ImageOps
from torch.nn import functional as F

import regard
from regard.data.augment import Augment
from regard.data.batches import TrainBatches
from regard.data.decode import decode
from regard.data.memory_cache import remember
from regard.data.open import open_data
from regard.data.preprocess import Preprocess

ROUNDS = 60
ORIENTATION = 0x0112


def megapixel_jpeg(orientation: int | None = None) -> bytes:
    """A smooth picture of 1000 x 1000 with some noise, at quality 90; with Exif, if given."""
    generator = np.random.default_rng(0)
    coarse = torch.from_numpy(generator.random((1, 3, 125, 125), np.float32))
    smooth = F.interpolate(coarse, (1000, 1000), mode="bicubic").clamp(0, 1)[0]
    pixels = smooth.permute(1, 2, 0).numpy() * 230 + generator.random((1000, 1000, 3)) * 20
    buffer = io.BytesIO()
    exif = Image.Exif()
    if orientation is not None:
        exif[0x010F], exif[ORIENTATION] = "A camera", orientation
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=90, exif=exif)
    return buffer.getvalue()


def compare_decoders(title: str, raw: bytes) -> None:
    """Pictures a second of each decoder, and its speed over simplejpeg's."""
    stored = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    torchvisions = functools.partial(torchvision.io.decode_jpeg, apply_exif_orientation=True)
    decoders: dict[str, Callable[[], object]] = {
        "simplejpeg": lambda: simplejpeg.decode_jpeg(raw),
        "regard": lambda: decode(raw, 3),
        "torchvision": lambda: torchvisions(stored),
        "PIL": lambda: np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))),
    }
    times: dict[str, list[float]] = {name: [] for name in decoders}
    names = list(decoders)
    for n in range(ROUNDS):
        for name in names[n % len(names) :] + names[: n % len(names)]:
            start = time.perf_counter()
            decoders[name]()
            times[name].append(time.perf_counter() - start)
    print(f"{title:28} images/s  over simplejpeg")
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(times["simplejpeg"], taken, strict=True)]
        print(f"{name:28} {1 / statistics.median(taken):8.0f}  {statistics.median(ratios):.3f}")


def rate(batches: TrainBatches, steps: int = 20) -> float:
    """Images a second, once running."""
    running = batches.start()
    for _ in range(5):
        next(running)
    start = time.perf_counter()
    for _ in range(steps):
        next(running)
    return steps * batches.batch_size / (time.perf_counter() - start)


def compare_with_training(spec: str) -> None:
    """Images a second from the loader, and into the training step of simple-vit-ti/4 at 32²."""
    data, preprocess = open_data(spec), Preprocess((32, 32))
    light = Augment(flip="random", shift=4, mixup=0.2, cutmix=1.0)
    strong = Augment(crop_scale=(0.35, 1.0), randaugment=(2, 9), flip="random", cutmix=1.0)
    held = remember(data)
    for title, source, augment in (
        ("files, flip + shift", data, light),
        ("memory, flip + shift", held, light),
        ("files, crop + RandAugment", data, strong),
    ):
        batches = TrainBatches(source.splits["train"], preprocess, augment, batch_size=128)
        print(f"{title:26} {rate(batches):8.0f} images/s, one process")
    model = regard.create("simple-vit-ti/4", num_classes=len(data.classes), image_size=32)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = TrainBatches(held.splits["train"], preprocess, batch_size=128).at(0)
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        F.cross_entropy(model(batch.images), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    print(
        f"{'training step':26} {128 / min(taken):8.0f} images/s, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    compare_decoders("1 MP JPEG", megapixel_jpeg())
    compare_decoders("with Exif, upright", megapixel_jpeg(1))
    compare_decoders("with Exif, on its side", megapixel_jpeg(6))
    torch.set_num_threads(threads)
    if len(sys.argv) > 1:
        compare_with_training(sys.argv[1])
