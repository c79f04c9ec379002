"""Models in folders and on the Hugging Face Hub: model.safetensors beside config.json."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard._io import atomic_folder, read_json, read_weights, write_json, write_weights
from regard.errors import InputError, MissingExtraError, brief, first, listing, nearest

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

# Class to the module that defines it; a class takes the entries of its config as arguments.
CLASSES = {
    "PixelAttention": "regard.layers.pixel_attention",
    "PixelResNet": "regard.models.pixel_resnet",
    "SimpleViT": "regard.models.simple_vit",
}


def write_model(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write weights and config into an existing folder."""
    write_weights(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / CONFIG, {"library": "regard", **config})


def model_config(model: nn.Module) -> dict[str, Any]:
    """The class and arguments that rebuild a model of ours."""
    name = type(model).__name__
    if name not in CLASSES or not isinstance(model, model_class(name)):
        raise InputError(
            f"a {name} is no model of regard; give one of {', '.join(CLASSES)}. "
            "Other modules are saved by their own library"
        )
    if name == "PixelAttention":
        facts = ("channels", "num_heads", "num_groups", "eps")
        return {"class": name, **{fact: getattr(model, fact) for fact in facts}}
    return {"class": name, **model.config}  # type: ignore[dict-item]


def model_class(name: str) -> Any:
    """The class of that name, or a refusal."""
    if name not in CLASSES:
        raise InputError(f"there is no class {name!r}; {nearest(name, CLASSES)}")
    return getattr(importlib.import_module(CLASSES[name]), name)


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Write a model of ours to a new folder: model.safetensors and config.json.

    The folder appears whole or not at all. Its files are what `from_pretrained` and the Hub take.
    """
    config = {"layout": "regard", "models": {"": model_config(model)}}
    with atomic_folder(folder) as part:
        write_model(part, model.state_dict(), config)


def from_pretrained(
    where: str | Path, *, block: str | None = None, revision: str | None = None
) -> nn.Module:
    """The model in a folder, or in a repository "owner/name" of the Hugging Face Hub (extra hf).

    A folder that exists is preferred. `block` names one of several attention blocks by the path
    at which it stood ("mid_block.attentions.0"). Returns the model in eval mode, with the dtype
    of its weights.
    """
    folder = Path(where)
    if not folder.is_dir():
        folder = download(str(where), revision)
    config = read_json(folder / CONFIG)
    models = config.get("models") if isinstance(config, dict) else None
    if isinstance(config, dict) and "recipe" in config:
        raise InputError(f"{folder} is a training run; regard.load({str(folder)!r}).model opens it")
    if not isinstance(models, dict) or not models or config.get("layout") != "regard":
        raise InputError(
            f"{folder / CONFIG} describes no model of regard; convert other layouts with "
            "`regard convert`"
        )
    prefix = choose_block(models, block, folder)
    tensors = {
        key.removeprefix(prefix): tensor
        for key, tensor in read_weights(folder / WEIGHTS).items()
        if key.startswith(prefix)
    }
    if not isinstance(models[prefix], dict):
        raise InputError(
            f"{folder / CONFIG} says {brief(repr(models[prefix]))} of the model {prefix!r}; give "
            "its class and arguments, as save_pretrained writes them"
        )
    return build(dict(models[prefix]), tensors, folder)


def choose_block(models: Mapping[str, Any], block: str | None, folder: Path) -> str:
    """The prefix of the one model, or of the block that was named."""
    paths = {prefix.rstrip("."): prefix for prefix in models}
    if block is not None and (not isinstance(block, str) or block not in paths):
        raise InputError(f"{folder} has no block {block!r}; {nearest(str(block), paths)}")
    if block is None and len(paths) > 1:
        raise InputError(f"{folder} holds {len(paths)} blocks, {first(paths)}: give block=")
    return paths[block] if block is not None else next(iter(models))


def build(config: dict[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> nn.Module:
    """The module that a config describes, holding the tensors."""
    cls = model_class(str(config.pop("class", None)))
    try:
        model = cls(**config, device="meta")
    except (TypeError, RuntimeError, OverflowError) as error:
        raise InputError(f"{folder / CONFIG} does not fit {cls.__name__}: {error}") from None
    wanted = {key: tensor.shape for key, tensor in model.state_dict().items()}
    held = {key: tensor.shape for key, tensor in tensors.items() if key in wanted}
    wrong = sorted(key for key in wanted if held.get(key) != wanted[key])
    if wrong:
        raise InputError(
            f"{folder / WEIGHTS} does not fit its {CONFIG}: missing or misshapen {listing(wrong)}"
        )
    model.load_state_dict({key: tensors[key] for key in wanted}, assign=True)
    return model.eval()


def download(repository: str, revision: str | None) -> Path:
    """A snapshot of a Hub repository: its weights and config."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise MissingExtraError(
            "huggingface-hub", "hf", f"{repository} is no folder here; loading it from the Hub"
        ) from None
    try:
        files = [CONFIG, WEIGHTS]
        return Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except (HFValidationError, HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"{repository} is no folder here and could not be had from the Hub ({error})"
        ) from None


def push_to_hub(folder: str | Path, repository: str, *, private: bool = False) -> str:
    """Upload a folder of `save_pretrained` or `regard convert`; the address of the commit."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} lacks {CONFIG} or {WEIGHTS}; write it with save_pretrained")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingExtraError("huggingface-hub", "hf", "uploading to the Hub") from None
    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=folder, repo_id=repository))
