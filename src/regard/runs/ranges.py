"""What the settings of a training run may be."""

from typing import Any

from regard.errors import InputError

# field: (smallest, largest, smallest allowed); None of the request is not looked at
RANGES: dict[str, tuple[float, float, bool]] = {
    "epochs": (0, 1e9, False),
    "steps": (1, 1e12, True),
    "minutes": (0, 1e7, False),
    "batch_size": (1, 1e9, True),
    "microbatch": (1, 1e9, True),
    "lr": (0, 1e9, False),
    "seed": (0, 2**63 - 1, True),
    "workers": (0, 512, True),
    "weight_decay": (0, 1e9, True),
    "warmup": (0, 1, True),
    "clip": (0, float("inf"), True),
    "ema": (0, 0.999999, True),
    "label_smoothing": (0, 0.999, True),
    "eval_every": (0, 1e9, False),
    "save_every": (0, 1e9, False),
    "memory": (0, 1e9, True),
    "keep": (1, 1e9, True),
}


def check_values(config: Any) -> None:
    """Refuse a number of a request or recipe outside its range, or another choice, by name."""
    for name, (low, high, closed) in RANGES.items():
        value = getattr(config, name)
        if value is None:
            continue
        if not (low <= value <= high) or (value == low and not closed) or value == float("inf"):
            needed = f"at least {low:g}" if closed else f"above {low:g}"
            upper = "" if high == float("inf") else f" and at most {high:g}"
            raise InputError(f"{name} is {value}; give a number {needed}{upper}")
    for name, choices in CHOICES.items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            raise InputError(f"{name} is {value!r}; give one of {', '.join(choices)}")


CHOICES = {
    "optimizer": ("adamw", "muon", "muon-sgd"),
    "schedule": ("cosine", "linear"),
    "class_weights": ("none", "auto"),
    "test_flips": ("off", "on"),
    "fit": ("stretch", "crop", "letterbox"),
    "device": ("auto", "cpu", "cuda", "mps"),
    "strategy": ("auto", "ddp", "fsdp"),
    "precision": ("auto", "fp32", "bf16"),
}
