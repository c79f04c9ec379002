"""What a study is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class StudyOptions:
    """Does QK norm help on your images? Trains many small models over a grid of learning rates,
    forms of QK norm, seeds and optimizers, and writes study.html, study.csv and study.json."""

    data: str | None = None
    """Images to train on, as for train; the default is digits."""
    out: Path | None = None
    """The folder to write; the default is studies/NAME with the next free number."""
    resume: bool = False
    """Go on with the study in --out, without repeating finished runs; its grid may be extended."""
    like: Path | None = None
    """A run whose model, images and batch size to study."""
    quick: bool = False
    """A smaller grid of shorter runs: three rates, two seeds."""
    rates: str | None = None
    """Peak learning rates, such as 1e-3,1e-2,1e-1."""
    forms: str | None = None
    """Forms of QK norm: some of none,cap,unit,rms,layer (cap: none, with a soft cap on logits)."""
    seeds: int | None = None
    """How many seeds for each form and rate; the spread is over these."""
    optimizer: str | None = None
    """adamw, muon or adamw,muon."""
    steps: int | None = None
    """Optimizer steps in each run."""
    batch_size: int | None = None
    """Images in one step."""
    warmup: float | None = None
    """Share of the steps in which the learning rate rises; a cosine to 0 follows."""
    weight_decay: float | None = None
    """Decoupled weight decay of matrices."""
    model: str | None = None
    """Model name, such as simple-vit-nano/4."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels that images are brought to."""
    images: int | None = None
    """Train on at most so many images; as many at most are held out."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute."""
    workers: int | None = None
    """Runs at a time; the default is one for each core."""
