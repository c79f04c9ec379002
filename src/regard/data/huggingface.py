"""Hugging Face data sets: a hub name, a saved data set, or local Parquet, Arrow and tar shards."""

from pathlib import Path
from typing import Any

from regard.data.dataset import Source
from regard.data.folder import read_file
from regard.data.splits import ALIASES, Listing
from regard.errors import InputError, MissingExtraError

BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}


class HubSource(Source):
    """Rows of data sets that are read as stored bytes, so the one decoder decodes them."""

    def __init__(self, tables: list[tuple[str, Any]], column: str, channels: int) -> None:
        super().__init__(channels)
        self.tables = tables
        self.column = column

    def _locate(self, item: int) -> tuple[str, Any, int]:
        for title, table in self.tables:
            if item < len(table):
                return title, table, item
            item -= len(table)
        raise IndexError(item)

    def name(self, item: int) -> str:
        title, _, row = self._locate(item)
        return f"{title}/{row}"

    def raw(self, item: int) -> bytes:
        _, table, row = self._locate(item)
        stored = table[row][self.column]
        if stored is None:
            raise OSError("the row holds no picture")
        if stored["bytes"] is not None:
            return bytes(stored["bytes"])
        return read_file(stored["path"])

    def stamp(self, item: int) -> str:
        _, table, row = self._locate(item)
        return f"{table._fingerprint}:{row}"


def list_hub(name: str, channels: int | None) -> Listing:
    """List `hf:name`; the pictures' column is the one of type Image, the labels' the ClassLabel.

    Without a ClassLabel, a column named label or cls is taken.
    """
    tables, notes = _load(name)
    features = tables[0][1].features
    picture, label = columns_of(name, features)
    source_tables, labels, splits, sizes = [], [], [], []
    for title, table in tables:
        kind = table.features[label]
        values = list(table[label])
        names = kind.names if type(kind).__name__ == "ClassLabel" else None
        for row, value in enumerate(values):
            if value is None or (names is not None and value < 0):
                raise InputError(
                    f"{name} has no label in row {row} of {title}; remove the row or label it"
                )
            labels.append(names[value] if names is not None else str(value))
        source_tables.append((title, _undecoded(table, picture)))
        splits += [ALIASES[title.lower()]] * len(values)
        known = (table.info.splits or {}).get(title)
        sizes += [known.num_bytes if known is not None else 0] * len(values)
    return Listing(
        name=f"hf:{name}",
        source=HubSource(source_tables, picture, channels or 3),
        labels=labels,
        splits=splits,
        sizes=sizes,
        notes=notes,
    )


def hub_pictures(name: str, channels: int) -> tuple[HubSource, int]:
    """Every picture of `hf:name`, labelled or not, and how many there are."""
    tables, _ = _load(name)
    column = picture_column(name, tables[0][1].features)
    source = HubSource([(t, _undecoded(table, column)) for t, table in tables], column, channels)
    return source, sum(len(table) for _, table in tables)


def _undecoded(table: Any, column: str) -> Any:
    """The column of pictures alone, as stored bytes."""
    from datasets import Image

    return table.select_columns([column]).cast_column(column, Image(decode=False))


def _load(name: str) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
    """The data set's tables by split, and remarks."""
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "hf", "Hugging Face data") from None
    path = Path(name)
    try:
        if path.is_file():
            builder = BUILDERS.get(path.suffix)
            if builder is None:
                raise InputError(f"{name} is no {', '.join(BUILDERS)} file; give one, or a folder")
            loaded = datasets.load_dataset(builder, data_files=str(path))
        elif (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
        else:
            repository, _, config = name.partition(":") if not path.exists() else (name, "", "")
            loaded = datasets.load_dataset(repository, config or None)
    except InputError:
        raise
    except Exception as error:  # the library raises its own, requests' and fsspec's errors
        raise explained(f"hf:{name}", error) from None
    if not isinstance(loaded, dict):
        return [("train", loaded)], ()
    used = [(title, table) for title, table in loaded.items() if title.lower() in ALIASES]
    notes = [
        f"the split {title!r} is not used: only train, val and test are"
        for title in loaded
        if title.lower() not in ALIASES
    ]
    if not used:
        raise InputError(f"hf:{name} has the splits {', '.join(loaded)}; one must be named train")
    return used, tuple(notes)


def explained(spec: str, error: Exception) -> InputError:
    """What the library's error means to people."""
    return InputError(
        f"{spec} cannot be loaded ({type(error).__name__}: {error}); give a hub name, or the path "
        "of a saved data set or of Parquet, Arrow or tar shards"
    )


def columns_of(name: str, features: Any) -> tuple[str, str]:
    picture = picture_column(name, features)
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    classes = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    classes = classes or [column for column in ("label", "cls") if column in kinds]
    if len(classes) != 1:
        listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        raise InputError(
            f"hf:{name} has {len(classes)} columns of labels among {listed}; one ClassLabel, or "
            "one named label, is needed: rename it with datasets and save_to_disk"
        )
    return picture, classes[0]


def picture_column(name: str, features: Any) -> str:
    kinds = {column: type(feature).__name__ for column, feature in features.items()}
    pictures = [column for column, kind in kinds.items() if kind == "Image"]
    if len(pictures) != 1:
        listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        raise InputError(
            f"hf:{name} has {len(pictures)} columns of pictures among {listed}; one is needed: "
            "select it with datasets and save_to_disk"
        )
    return pictures[0]
