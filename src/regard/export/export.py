"""A run opened for export: its model, and the images to prove a file on."""

import dataclasses
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regard._io import write_json, write_text
from regard._version import __version__
from regard.data.dataset import Split, readable
from regard.data.open import open_data
from regard.errors import InputError
from regard.export.formats import (
    SUFFIXES,
    FileFacts,
    Runner,
    check_exporter,
    digest,
    dynamic_axes,
    onnxruntime,
    open_file,
    patch_of,
    quantise,
    quantiser,
    rewrite_metadata,
    trace,
    write,
)
from regard.export.model_card import as_text, export_figures, model_card, title
from regard.export.parity import Reference, check, interleaved, prove
from regard.training.config import RunConfig
from regard.training.evaluate import open_model, relabelled
from regard.training.run_folder import RunFolder


@dataclass(frozen=True)
class Source:
    """What an export starts from; the model is in eval mode, on the CPU."""

    folder: RunFolder
    config: RunConfig
    model: torch.nn.Module
    sha256: str
    split: Split
    proven_on: str

    def about(self) -> dict[str, Any]:
        """What the run folder says that a model card repeats."""
        folder = self.folder
        held = folder.evaluation() if folder.evaluation_file.is_file() else None
        steps = [line["step"] for line in folder.metrics()]
        return {
            "data": self.config.recipe.data,
            "evaluation": held,
            "step": max(steps, default=self.config.recipe.steps),
        }

    def example(self) -> Tensor:
        """The first validation image that can be read, uint8 (c, H, W)."""
        for _, picture in readable(self.split, range(len(self.split))):
            return picture
        raise InputError(f"no image of {self.proven_on} can be read; restore them, or give --data")


def open_source(run: Path, data: str | None) -> Source:
    """The run's model and its validation images, or those of `data`, classes matched by name."""
    folder = RunFolder.open(run)
    config, model = open_model(folder)
    if data is None:
        opened, title = folder.data(), "val"
    else:
        opened = open_data(data, channels=config.preprocess.channels)
        title = "test" if "test" in opened.splits else "val"
    split = relabelled(opened.splits[title], opened.classes, config.classes, opened.name)
    return Source(
        folder=folder,
        config=config,
        model=model,
        sha256=digest(folder.weights_file),
        split=split,
        proven_on=f"the {title} split of {opened.name}",
    )


# Files proven and timed beside their model.


TIMED = (1, 32)


def measure(
    source: Source,
    facts: FileFacts,
    files: Mapping[str, Path],
    *,
    images: int,
    max_drop: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Prove the files on up to `images` real images and time them beside eager torch.

    The last file is what `facts` says; those before it, by the names to show, are fp32. Returns
    the numbers, JSON-ready; raises `NotEqual` for a file that is too far from its model.
    """
    reference = Reference(source.model, facts.preprocess, facts.takes)
    runners: dict[str, Runner] = {name: open_file(path)[1] for name, path in files.items()}
    say(f"comparing with the model on up to {images:,} images of {source.proven_on}")
    found = prove(reference, runners, facts, source.split, images)
    *others, last = files
    for name in others:
        check(found[name], found["eager"], "fp32", 0)
    check(found[last], found["eager"], facts.precision, max_drop)
    say("timing it beside eager torch")
    example = reference.input([source.example()])
    functions: dict[str, Callable[[Tensor], Tensor]] = {"eager": reference, **runners}
    latency = {}
    for batch in TIMED:
        repeated = example.expand(batch, *example.shape[1:]).contiguous()
        latency[batch] = interleaved(functions, repeated)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return {
        **export_figures(found, latency, sizes, facts.precision),
        "images": found[last].images,
        "proven_on": source.proven_on,
        "machine": machine(),
        "threads": torch.get_num_threads(),
    }


def machine() -> str:
    """The processor, in words."""
    names = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


# `regard export`: a run as one file that is proven equal to it before it is kept.


LEAST_IMAGES = 1000


@dataclass(frozen=True)
class ExportOptions:
    """Write a run as one file, proven on real images to do what the run does."""

    run: Path
    """The run folder."""
    out: Path | None = None
    """The file to write; the default lies in the run's folder export."""
    to: Literal["onnx", "torch"] = "onnx"
    """ONNX, or a torch.export program that loads without regard."""
    input: Literal["tensor", "image"] = "tensor"
    """tensor: normalised images in, logits out; image: uint8 pictures of any size in,
    probabilities out."""
    int8: bool = False
    """Round a SimpleViT's linear layers to 8 bits, and measure what it costs."""
    max_drop: float = 0.5
    """Points of accuracy that int8 may cost; a file that costs more is not kept."""
    half: bool = False
    """Compute in float16, for devices that are faster so."""
    check: Path | None = None
    """Prove and time a file exported earlier, instead of writing one."""
    data: str | None = None
    """Images to prove it on, where the run's own validation images are not at hand."""
    images: int = LEAST_IMAGES
    """How many validation images to prove it on, at least 1000 where there are as many."""
    licence: str = "not stated"
    """The licence of the model, to stand in the file and on its card."""
    force: bool = False
    """Replace a file that exists."""

    def __post_init__(self) -> None:
        if self.int8 and self.half:
            raise InputError("int8 and half are given together; give one of them")
        if self.int8 and self.to != "onnx":
            raise InputError("int8 is ONNX Runtime's; give it with --to onnx")
        if self.images < LEAST_IMAGES:
            raise InputError(f"images is {self.images}; give at least {LEAST_IMAGES}")
        if not 0 <= self.max_drop <= 100:
            raise InputError(f"max_drop is {self.max_drop}; give points of accuracy, 0 to 100")

    @property
    def precision(self) -> str:
        return "int8" if self.int8 else "half" if self.half else "fp32"


@dataclass(frozen=True)
class ExportResult:
    """The file, and everything that was measured."""

    file: Path
    facts: FileFacts
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{title(self.facts, self.file)}\n{as_text(self.numbers)}"


def export(options: ExportOptions, say: Callable[[str], None] | None = None) -> ExportResult:
    """Write `options.run` as one file, prove it, and keep it only if it is equal.

    Beside FILE lie FILE.json, all that was measured, and FILE.md, the model card. With
    `options.check` an earlier file is proven and timed, and nothing is written. `say` is told
    what is being done.

    Raises:
        InputError: for a run without weights, a file that exists, a model that int8 is not for,
            data of other classes.
        NotEqual: the file differs from the model; it was not kept.
        MissingExtraError: a package of the extra `export` is not installed.
    """
    say = say or (lambda line: None)
    if options.check is not None:
        return check_file(options, options.check, say)
    out = destination(options)
    require(options)
    source = open_source(options.run, options.data)
    facts = describe(options, source)
    out.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
    try:
        candidate = workshop / out.name
        files, rewrite = build(options, source, facts, candidate, say)
        numbers = measure(
            source, facts, files, images=options.images, max_drop=options.max_drop, say=say
        )
        facts = dataclasses.replace(facts, figures=numbers)
        seal(source, facts, candidate, rewrite)
        record = {"file": out.name, "sha256": digest(candidate), "run": facts.run, **numbers}
        write_json(workshop / "figures", record)
        write_text(workshop / "card", model_card(facts, out, source.about()))
        os.replace(workshop / "figures", out.with_name(out.name + ".json"))
        os.replace(workshop / "card", out.with_name(out.name + ".md"))
        os.replace(candidate, out)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return ExportResult(out, facts, numbers)


def check_file(options: ExportOptions, path: Path, say: Callable[[str], None]) -> ExportResult:
    """Prove and time a file exported earlier."""
    facts, _ = open_file(path)
    source = open_source(options.run, options.data)
    if facts.run["sha256"] != source.sha256:
        raise InputError(
            f"{path} was exported from other weights (run {facts.run['name']}, "
            f"{facts.run['sha256'][:16]}) than {source.folder} holds ({source.sha256[:16]}); "
            "give its own run"
        )
    numbers = measure(
        source,
        facts,
        {path.name: path},
        images=options.images,
        max_drop=options.max_drop,
        say=say,
    )
    return ExportResult(path, facts, numbers)


def destination(options: ExportOptions) -> Path:
    """Where the file goes, refused where one is."""
    suffix = SUFFIXES[options.to]
    extra = "-image" * (options.input == "image")
    extra += f"-{options.precision}" * (options.precision != "fp32")
    out = options.out or RunFolder.open(options.run).exports / f"model{extra}{suffix}"
    if out.suffix != suffix:
        raise InputError(f"{out} has the ending {out.suffix!r}; --to {options.to} writes {suffix}")
    if out.exists() and not options.force:
        raise InputError(f"{out} exists already; give another --out, or --force")
    return out


def require(options: ExportOptions) -> None:
    """Refuse early where a package that will be needed is missing."""
    if options.to == "onnx":
        check_exporter()
        onnxruntime()
    if options.int8:
        quantiser()


def describe(options: ExportOptions, source: Source) -> FileFacts:
    """The facts of the file to be written."""
    patch = patch_of(source.model)
    if options.int8 and patch is None:
        raise InputError(
            f"int8 is for a SimpleViT; {source.config.model['name']} is mostly convolutions, "
            "which dynamic quantisation slows down: export it without --int8"
        )
    return FileFacts(
        takes=options.input,
        precision=options.precision,
        classes=source.config.classes,
        preprocess=source.config.preprocess,
        model=source.config.model,
        dynamic=dynamic_axes(source.model, options.input),
        multiple=patch if patch and options.input == "tensor" else (1, 1),
        run={"name": source.folder.path.resolve().name, "sha256": source.sha256},
        licence=options.licence,
        versions={"regard": __version__, "torch": torch.__version__},
    )


def build(
    options: ExportOptions,
    source: Source,
    facts: FileFacts,
    candidate: Path,
    say: Callable[[str], None],
) -> tuple[dict[str, Path], Callable[[FileFacts], None]]:
    """Write the candidate.

    Returns the files to measure, the candidate last, by the names to show; and what writes the
    candidate's metadata anew.
    """
    say("tracing the model")
    program = trace(source.model, facts.preprocess, facts.takes, half=options.half)
    say(f"writing {candidate.name}")
    if options.to == "torch":
        write(program, facts, candidate)
        return {candidate.name: candidate}, lambda facts: write(program, facts, candidate)
    if not options.int8:
        write(program, facts, candidate)
        return {candidate.name: candidate}, lambda facts: rewrite_metadata(candidate, facts)
    whole = candidate.with_name("fp32.onnx")
    write(program, dataclasses.replace(facts, precision="fp32"), whole)
    quantise(whole, candidate, facts)
    files = {"fp32 ONNX": whole, candidate.name: candidate}
    return files, lambda facts: rewrite_metadata(candidate, facts)


def seal(
    source: Source, facts: FileFacts, candidate: Path, rewrite: Callable[[FileFacts], None]
) -> None:
    """Write the figures into the proven file, and see that its outputs stay the same."""
    reference = Reference(source.model, facts.preprocess, facts.takes)
    images = reference.input([source.example()])
    before = open_file(candidate)[1](images)
    rewrite(facts)
    sealed, runner = open_file(candidate)
    if sealed != facts or not torch.equal(runner(images), before):
        raise RuntimeError(f"writing the figures into {candidate} changed it")
