"""What a study's measurements add to its training.

`python -m benchmarks.study_cost`: for each form, one step of training as it is, one with attention
and gradient measured, and one look at the held-out images, interleaved, in one thread as a study's
processes have. A study measures 20 of its steps and looks 10 times; the share is that of a run.
"""

import torch
from torch.nn.functional import cross_entropy

from benchmarks import common
from regard.data.open import open_data
from regard.data.preprocess import Preprocess
from regard.study.plan import DEFAULTS, FORMS, build
from regard.study.trial import CHECKS, POINTS, held_out, measured, read_pictures
from regard.training.optimizers import build_optimizers


def calls(form: str, device: str) -> dict[str, common.Call]:
    """A plain step, a measured one and a look at held-out images, of the default study."""
    preprocess = Preprocess(size=(8, 8), channels=1)
    pictures = read_pictures(open_data("digits"), preprocess, DEFAULTS["images"], print)
    arguments = {"num_classes": 10, "image_size": 8, "channels": 1}
    model = build(form, {"name": "simple-vit-nano/4", **arguments}, 0).to(device).train()
    optimizers = build_optimizers(model, "adamw", 1e-3, DEFAULTS["weight_decay"])
    pictures = pictures.to(torch.device(device))
    images = preprocess.normalise(pictures.images[: DEFAULTS["batch_size"]])
    labels = pictures.labels[: DEFAULTS["batch_size"]]

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    def plain() -> None:
        cross_entropy(model(images), labels).backward()
        update()

    def seen() -> None:
        measured(model, images, labels)
        update()

    def look() -> None:
        held_out(model, preprocess, pictures.val_images, pictures.val_labels)

    return {"plain": plain, "measured": seen, "look": look}


def main() -> None:
    options = common.parser(__doc__)
    options.set_defaults(threads=1)
    given = options.parse_args()
    common.prepare(given)
    steps, rows = DEFAULTS["steps"], []
    for form in FORMS:
        times = common.interleaved(calls(form, given.device), given.seconds, given.device)
        more = POINTS * (times["measured"] - times["plain"])
        run = steps * times["plain"]
        rows.append([
            form,
            *(common.milliseconds(times[name]) for name in ("plain", "measured", "look")),
            f"{more / run:.1%}",
            f"{(more + CHECKS * times['look']) / run:.1%}",
        ])  # fmt: skip
    common.store("study_cost", given.device, {row[0]: row[1:] for row in rows})
    print(common.machine(given.device))
    header = ["form", "step, ms", "measured step, ms", "held-out images, ms"]
    print(common.table([*header, f"measuring, of {steps} steps", "with held-out images"], rows))


if __name__ == "__main__":
    main()
