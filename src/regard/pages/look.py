"""`regard look`: pictures and a page of what a trained model attends to."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from regard._device import pick_device
from regard._io import write_text
from regard.data.decode import decode
from regard.data.folder import read_file
from regard.data.preprocess import Preprocess
from regard.errors import InputError
from regard.interpret.faithfulness import measure
from regard.interpret.maps import cell_at
from regard.pages.html import GENERATOR, Html, page, picture, tag
from regard.pages.look_data import Look, Picture, look_at
from regard.pages.look_images import write_pictures
from regard.pages.look_page import VIEWS, fitted, look_page
from regard.training.run_folder import RunFolder

# The longest side of a picture in the index, in pixels.
THUMB = 160


@dataclass(frozen=True)
class LookOptions:
    """See what a trained model attends to in pictures: PNGs and a page to point at."""

    run: Path
    """The run folder."""
    images: tuple[Path, ...]
    """Picture files."""
    out: Path | None = None
    """The folder for what is written; look/ in the run folder if not given."""
    class_: str | None = None
    """Open on the relevance for this class; what follows is then where other views begin."""
    at: str | None = None
    """Look from this place: X,Y in pixels of the original picture."""
    layer: str | None = None
    """The layer shown first, by number from 1 or by name; the last if not given."""
    head: int | None = None
    """The head shown first, from 1; the mean over heads if not given."""
    faithfulness: bool = False
    """Measure by deletion and insertion how well relevance points at what the model uses."""
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or mps."""


@dataclass(frozen=True)
class LookResult:
    """What was written: the page to open first, the pictures, and the measurement if asked for."""

    page: Path
    pictures: tuple[Path, ...]
    faithfulness: dict[str, dict[str, float]] | None = None


def look(options: LookOptions) -> LookResult:
    """Write, for each picture, `NAME.png` (original beside overlay), `NAME-heads.png` (all layers
    and heads) and a page; one picture's page is `look.html`, several get `look.html` as index.
    """
    if not options.images:
        raise InputError("no pictures came; give one picture file or more")
    folder = RunFolder.open(options.run)
    out = options.out or folder.path / "look"
    check_apart(out, options.images)
    if options.out is not None:
        check_ours(out)
    config = folder.config()
    model = folder.load_model(pick_device(options.device))
    pictures = [read_picture(path, config.preprocess) for path in options.images]
    wanted = [] if options.class_ is None else [options.class_]
    looks = [look_at(model, one, config.classes, wanted=wanted) for one in pictures]
    starts = [opening(options, found) for found in looks]
    measured = None
    if options.faithfulness:
        measured = measure(model, torch.stack([one.input for one in pictures]))
    out.mkdir(parents=True, exist_ok=True)
    names = distinct(path.stem for path in options.images)
    written: list[Path] = []
    for name, found, start in zip(names, looks, starts, strict=True):
        page_file = out / ("look.html" if len(looks) == 1 else f"{name}.html")
        write_text(page_file, look_page(found, **start))
        written += write_pictures(out, name, found, start)
    if len(looks) > 1:
        write_text(out / "look.html", index(names, looks))
    return LookResult(out / "look.html", tuple(written), measured)


def check_ours(out: Path) -> None:
    """Refuse a folder that holds files, unless a page of ours is among them."""
    if not out.is_dir() or not any(out.iterdir()):
        return
    page_file = out / "look.html"
    if page_file.is_file() and GENERATOR in page_file.read_text("utf-8", errors="replace")[:2000]:
        return
    raise InputError(
        f"{out} holds files that `regard look` did not write; give a new or an empty folder"
    )


def check_apart(out: Path, pictures: tuple[Path, ...]) -> None:
    """Refuse to write into the folder of a picture, whose name one of the files has."""
    for path in pictures:
        if path.resolve().parent == out.resolve():
            raise InputError(
                f"{path} is in {out}, where {path.stem}.png and {path.stem}-heads.png would be "
                "written, perhaps over your own; give another --out"
            )


def read_picture(path: Path, preprocess: Preprocess) -> Picture:
    """A picture file as the model sees it, and as it is."""
    try:
        raw = read_file(path)
    except OSError as error:
        needed = f"pictures, such as {path}/*.jpg" if path.is_dir() else "a picture file"
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); give {needed}"
        ) from None
    original = decode(raw, preprocess.channels, str(path))
    geometry = preprocess.geometry(*original.shape[-2:])
    return Picture(path.name, original, preprocess(original), geometry)


def opening(options: LookOptions, found: Look) -> dict[str, Any]:
    """The view a page opens on, from the options; what is not there is refused."""
    layer = layer_index(options.layer, found)
    maps = found.layers[layer]
    head = None
    if options.head is not None:
        if not 1 <= options.head <= len(maps.weights):
            raise InputError(
                f"head {options.head} is not there: {maps.name} has heads 1 to {len(maps.weights)}"
            )
        head = options.head - 1
    at = (0.5, 0.5)
    if options.at is not None:
        x, y = coordinates(options.at)
        size = (found.picture.input.shape[-2], found.picture.input.shape[-1])
        row, column = cell_at((y, x), found.picture.geometry, size, maps.grid)
        at = ((row + 0.5) / maps.grid[0], (column + 0.5) / maps.grid[1])
    view = VIEWS[0]
    if options.class_ is not None:
        if not found.relevance:
            raise InputError(f"there is no relevance for a class: {found.without}")
        view = "relevance"
    return {"view": view, "layer": layer, "head": head, "at": at}


def coordinates(text: str) -> tuple[float, float]:
    """x and y from "X,Y"."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"at is {text!r}; give X,Y in pixels, such as 120,80") from None
    return x, y


def layer_index(wanted: str | None, found: Look) -> int:
    """The position of a layer given by its number from 1, or by its name."""
    names = [maps.name for maps in found.layers]
    if wanted is None:
        return len(names) - 1
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and 1 <= int(wanted) <= len(names):
        return int(wanted) - 1
    raise InputError(
        f"there is no layer {wanted!r}; give 1 to {len(names)}, or one of {', '.join(names)}"
    )


def index(names: list[str], looks: list[Look]) -> str:
    """A page of links, each with its picture and prediction."""
    entries = []
    for name, found in zip(names, looks, strict=True):
        best, chance = found.chances[0]
        thumb = picture(fitted(found.picture.original, THUMB), found.picture.name)
        words = tag("span", found.picture.name, Html("<br>"), f"{best}, {chance:.1%}")
        entries.append(tag("a", thumb, words, href=quote(f"{name}.html")))
    return page(
        "What the model attends to",
        tag("h1", "What the model attends to"),
        tag("div", *entries, class_="pictures"),
    )


def distinct(stems: Iterable[str]) -> list[str]:
    """File stems made distinct: a second cat is cat-2; `look` is the index's own."""
    taken, result = {"look"}, []
    for stem in stems:
        name, number = stem, 2
        while name in taken:
            name, number = f"{stem}-{number}", number + 1
        taken.add(name)
        result.append(name)
    return result
