"""Loading of models from disk or the hub in any known layout, their names, and conversion between layouts."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.targets import distinct_names
from vitrail.errors import BundleError, ConfigError, check_known, listed
from vitrail.files import check_new_file, check_new_folder, expanded
from vitrail.hub import Repository, cached_folder, fetch, from_cache, keep_branch, listing, parse
from vitrail.machine import pick_device
from vitrail.models.variants import is_variant
from vitrail.registry import Registry
from vitrail.settings import typed
from vitrail.weights.adapt import adapted
from vitrail.weights.answers import DENSE
from vitrail.weights.bundle import Bundle, load_bundle, write_bundle
from vitrail.weights.exported import exported_file, load_exported
from vitrail.weights.layouts.layout import (
    Checkpoint,
    Description,
    Hints,
    Layout,
    StoresTexts,
    assemble,
    check_heads,
)
from vitrail.weights.saved import (
    DESCRIPTION,
    NAMES,
    PRODUCER,
    WEIGHTS,
    check_model_folder,
    is_bundle,
    read_object,
    tokenizer_file,
)
from vitrail.weights.tensors import SUFFIXES, open_tensors
from vitrail.weights.words import Words

LAYOUTS = Registry[Layout](
    {
        "big-vision-pair": "vitrail.weights.layouts.google:BIG_VISION_PAIR",
        "google": "vitrail.weights.layouts.google:GOOGLE",
        "big-vision": "vitrail.weights.layouts.google:BIG_VISION",
        "bit": "vitrail.weights.layouts.google:BIT",
        "bit-torch": "vitrail.weights.layouts.google:BIT_TORCH",
        "huggingface-clip": "vitrail.weights.layouts.huggingface_pair:HUGGINGFACE_CLIP",
        "huggingface-siglip": "vitrail.weights.layouts.huggingface_pair:HUGGINGFACE_SIGLIP",
        "open-clip": "vitrail.weights.layouts.open_clip:OPEN_CLIP",
        "huggingface": "vitrail.weights.layouts.huggingface:HUGGINGFACE",
        "torchvision": "vitrail.weights.layouts.torchvision:TORCHVISION",
        "timm": "vitrail.weights.layouts.timm:TIMM",
    }
)
"""Layouts of other libraries, in the order in which `load` tries them."""


@torch.inference_mode(False)
def load(
    path: str | Path,
    *,
    device: str = "auto",
    layout: str | None = None,
    heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    drop_head_hidden: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    tokenizer: str | Path | None = None,
) -> Bundle:
    """Load a model from a folder that `Bundle.save` wrote, a run's folder, an exported file (.onnx, .pt2), another
    library's file or folder, or the hub. The name "small" is a model that is part of the package.

    - `layout` is a name in `LAYOUTS`. By default the layout is recognised from the names of the tensors.
    - `heads` and `image_size` are needed if the file does not contain them. If the grid of patches for `image_size`
      differs from the file's grid, learned positions are resized. If the file's preprocessing makes images of another
      size than the positions are for, that size is the default.
    - If `num_classes` or the length of `classes` differs from the file's, a new head of zeros replaces the old head.
      `drop_head_hidden` removes the hidden layer before the head.
    - `mean` and `std` replace the mean and standard deviation of pixels in [0, 1], for all channels or for each. They
      are needed if the file does not contain its preprocessing, and the assumed values are wrong.
    - `tokenizer` is the file (`tokenizer.json`, a model of sentencepiece whose name ends in .model, or the vocabulary
      of BERT) or the folder of the text tower's tokenizer. It is needed if it is not beside the weights.

    The bundle's `notes` name everything that was assumed, resized or replaced. Raise `BundleError` for a model that is
    missing, damaged or does not fit, and `SaveError` if a download cannot be written to the cache.
    """
    heads, image_size = typed(int | None, heads, "heads"), typed(tuple[int, int] | None, image_size, "image_size")
    mean, std = typed(tuple[float, ...], mean, "mean"), typed(tuple[float, ...], std, "std")
    layout, drop_head_hidden = typed(str | None, layout, "layout"), typed(bool, drop_head_hidden, "drop_head_hidden")
    target, hints = pick_device(device), Hints(heads=heads, image_size=image_size)
    source, told = find(path)
    exported = exported_file(source) if layout is None else None
    if exported is not None:
        if device != "auto" and target.type != "cpu":
            raise BundleError(f"device={device!r} does not fit {exported}: exported models run on the CPU here")
        bundle, target = load_exported(exported), torch.device("cpu")
        changes = {
            "num_classes": num_classes, "classes": classes, "mean": mean, "std": std, "tokenizer": tokenizer,
            "heads": heads, "drop_head_hidden": drop_head_hidden or None,
            "image_size": None if image_size == bundle.preprocess.image_size else image_size,
        }  # fmt: skip
        for name, value in changes.items():
            if value not in (None, ()):
                raise BundleError(
                    f"{name}={value!r} cannot change {exported}, because it is an exported model. Use the model that "
                    "it was exported from"
                )
    elif layout is None and is_bundle(source):
        if tokenizer is not None:
            raise BundleError(
                f"tokenizer={str(tokenizer)!r} does not fit {source}: a model that Vitrail saved has its own tokenizer"
            )
        bundle = load_bundle(source)
        check_heads(hints, bundle.network.config, source)
    else:
        bundle = _read(source, layout, hints, None if tokenizer is None else expanded(tokenizer))
    if drop_head_hidden and not getattr(bundle.network.config, "head_hidden", 0):
        raise BundleError(f"drop_head_hidden=True does not fit {source}, which has no hidden layer before its head")
    colours: dict[str, Any] = {name: values for name, values in (("mean", mean), ("std", std)) if values}
    preprocess = replace(bundle.preprocess, **colours)
    if preprocess != bundle.preprocess:
        bundle = replace(bundle, preprocess=preprocess, metrics={})  # they were measured with the old preprocessing
    bundle = adapted(
        bundle, image_size=image_size, num_classes=num_classes, classes=classes, drop_head_hidden=drop_head_hidden
    )
    names = distinct_names(bundle.classes)
    if renamed := [name for name, own in zip(names, bundle.classes, strict=True) if name != own]:
        note = f"classes with the name of an earlier one have their numbers in their names: {listed(renamed)}"
        bundle = replace(bundle, classes=names, notes=(*bundle.notes, note))
    bundle.notes = (*told, *bundle.notes)
    bundle.network.to(target)
    if bundle.words is not None:
        bundle.words.tower.to(target)
    return bundle


def model_name(path: str | Path) -> str:
    """Return a short name for the model at a path: the run's name for `runs/NAME/model`, the name of a file without its
    suffix, and the last part of other paths and of names on the hub."""
    place = Path(path)
    place = place.parent if place.name == "model" and place.parent.name else place
    return (place.stem if place.is_file() else place.resolve().name) or "model"


def convert(
    source: str | Path, destination: str | Path, to: str, *, overwrite: bool = False, **options: Any
) -> tuple[str, ...]:
    """Write a model in another layout. Return notes on assumptions, and on options that the written file does not
    store.

    The destination is a new path or an empty folder. With `overwrite`, the destination may also be an earlier output.
    `options` are the options of `load`, except `device`. Raises `DestinationError` if the destination is taken, and
    `BundleError` if the layout cannot store an option that changes what the model computes.
    """
    destination, overwrite, to = expanded(destination), typed(bool, overwrite, "overwrite"), typed(str, to, "to")
    check_known(to, ["vitrail", *LAYOUTS], f"to={to!r} is not a layout", BundleError)
    if to == "vitrail":
        check_model_folder(destination, overwrite=overwrite)
    elif LAYOUTS[to].folder_files and destination.suffix != ".safetensors":
        check_new_folder(destination, LAYOUTS[to].folder_files, overwrite=overwrite, recognise=_is_ours)
    else:
        check_new_file(destination, overwrite=overwrite)
    place, told = find(source)
    bundle = load(place, device="cpu", **options)
    lost: tuple[str, ...] = () if tokenizer_file(place) is None else ("the codebook and the decoder of the tokenizer",)
    if to == "vitrail":
        write_bundle(bundle, destination)
    elif bundle.precision != "float32":
        raise BundleError(
            f"the layout {to} cannot store precision={bundle.precision!r}, which only vitrail, our own layout, has; "
            "convert a model that predicts in float32"
        )
    else:
        lost = (*lost, *LAYOUTS[to].write(bundle, destination))
        if bundle.words is not None and not isinstance(LAYOUTS[to], StoresTexts):
            lost = (*lost, "the text tower and its tokenizer")
    return (*told, *bundle.notes, *(f"not carried: {item}" for item in lost))


def _is_ours(folder: Path) -> bool:
    """Return True if the config of a folder names `convert` as its producer."""
    return any(_json(folder / name).get("producer") == PRODUCER for name in ("config.json", "open_clip_config.json"))


def _read(path: Path, name: str | None, hints: Hints, tokenizer: Path | None) -> Bundle:
    """Return the model in a file or folder of another library, whose layout has this name."""
    if name is not None:
        check_known(name, LAYOUTS, f"layout={name!r} does not exist", BundleError)
    if tokenizer is not None and not tokenizer.exists():
        raise BundleError(f"tokenizer={str(tokenizer)!r} does not exist: there is no such file or folder")
    checkpoint = replace(open_checkpoint(path), tokenizer=tokenizer)
    known = (layout for layout in LAYOUTS.values() if layout.recognises(checkpoint))
    layout = next(known, None) if name is None else LAYOUTS[name]
    if layout is None and "patches.projection.weight" in checkpoint.tensors:
        raise BundleError(
            f"{checkpoint.tensors.path} holds the weights of a Vitrail network without its config: patch size, heads, "
            "pooling and activation are in no tensor. Load the state dict into the network that you created "
            "(network.load_state_dict), and save it with its config: Bundle(network, classes, preprocess).save(folder)"
        )
    if layout is None:
        some = ", ".join(list(checkpoint.tensors.shapes)[:3])
        raise BundleError(
            f"{checkpoint.tensors.path} has an unknown layout: its tensors are called {some}, ...; known layouts are "
            f"vitrail, {', '.join(LAYOUTS)}"
        )
    description = _described(checkpoint, layout, hints)
    network, words = assemble(description), None
    if description.tokenizer is not None:
        network, words = network.image, Words.of(network, description.tokenizer)
    elif tokenizer is not None:
        raise BundleError(f"tokenizer={str(tokenizer)!r}: {checkpoint.tensors.path} has no text tower; leave it out")
    check_heads(hints, network.config, path)
    notes = (*checkpoint.tensors.notes, *description.notes)
    classes = description.classes
    if classes is None:
        classes = tuple(map(str, range(network.config.num_classes)))
        if classes:
            notes = (*notes, "the file has no class names, so the classes are numbered")
    provenance: dict[str, Any] = {"layout": layout.name, "file": checkpoint.tensors.path.name}
    if description.class_ids is not None:
        provenance["class_ids"] = list(description.class_ids)
    elif description.output in DENSE:  # such files number the classes as the data did
        provenance["class_ids"] = list(range(network.config.num_classes))
    bundle = Bundle(
        network,
        classes,
        description.preprocess,
        output=description.output,
        provenance=provenance,
        notes=notes,
        words=words,
    )
    return replace(adapted(bundle, image_size=description.image_size), notes=notes)


def _described(checkpoint: Checkpoint, layout: Layout, hints: Hints) -> Description:
    path = checkpoint.tensors.path
    try:
        return layout.describe(checkpoint, hints)
    except BundleError:
        raise
    except KeyError as error:
        raise BundleError(
            f"{path} lacks the tensor {error.args[0]}, whose shape gives the sizes of a {layout.name} model"
        ) from None
    except ConfigError as error:
        raise BundleError(f"{path}: {error}") from None
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise BundleError(f"{path} does not have the shapes of a {layout.name} model: {error}") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file of weights, or a folder with `config.json` and a file of weights. Raise `BundleError`."""
    if not path.exists():
        run = f" (but a run runs/{path})" if ("runs" / path).is_dir() else ""
        raise BundleError(
            f"model {str(path)!r} does not exist: there is no such file or folder{run}, and names on the hub have the "
            f"form ORG/NAME. Vitrail itself contains {', '.join(SHIPPED)}, which needs no file"
        )
    if not path.is_dir():
        return Checkpoint(open_tensors(path))
    if (path / "adapter_config.json").is_file():
        raise BundleError(
            f"{path} holds an adapter of PEFT (adapter_config.json), which is not applied; merge it into the model "
            "(merge_and_unload), and save that in a folder of its own"
        )
    newer = _json(path / "processor_config.json").get("image_processor")  # transformers 5 prefers it
    if not isinstance(newer, dict | None):
        raise BundleError(f"{path / 'processor_config.json'}: image_processor={newer!r:.60} must be an object")
    return Checkpoint(
        open_tensors(_weights_file(path)),
        config=_json(path / "config.json"),
        preprocessor=_json(path / "preprocessor_config.json") if newer is None else newer,
    )


def _weights_file(folder: Path) -> Path:
    for name in PREFERRED:
        if (folder / name).is_file():
            return folder / name
    found = sorted(file for file in folder.iterdir() if file.name.endswith(SUFFIXES))
    if len(found) == 1:
        return found[0]
    if not found:
        raise BundleError(f"{folder} is not a model: it has no model.json and no weights ({', '.join(SUFFIXES)})")
    raise BundleError(
        f"{folder} has several files of weights, {', '.join(file.name for file in found)}: give the path of one of them"
    )


def _json(path: Path) -> Mapping[str, Any]:
    return read_object(path) if path.is_file() else {}


# --- names of models: those that are part of the package, and those on the Hugging Face hub
#
# A model's files on the hub are downloaded to the hub client's cache. Without a network connection, the files in the
# cache are used.


PREFIXES = ("hf:", "hf-hub:")
DESCRIPTIONS = (
    "config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json",
    "tokenizer_config.json", "adapter_config.json",
)  # fmt: skip
TOKENIZERS = (("spiece.model",), ("tokenizer.json",), ("vocab.json", "merges.txt"))
"""Files of a tokenizer of texts, in order of preference."""
PREFERRED = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights files, in order of preference. A repository may hold the same weights in several formats."""


def looks_like_hub_name(path: str | Path) -> bool:
    """Return True if `path` has the form "org/name" or "org/name@revision" and does not exist on disk.

    A name with the prefix "hf:" or "hf-hub:" is always a hub name, even if "org/name" exists on disk or ends with a
    file suffix.
    """
    text = str(path)
    if os.path.lexists(text):
        return False
    if text.startswith(PREFIXES):
        return True
    model = parse("model", text, text)
    return model is not None and not model.name.lower().endswith((*SUFFIXES, ".json"))


def find(path: str | Path) -> tuple[Path, tuple[str, ...]]:
    """Return the file or folder of a model, and notes: a path on disk, a model of the package, or a name on the hub,
    whose files are downloaded. Raise the errors of `download`."""
    place: str = typed(str, os.fspath(path) if isinstance(path, os.PathLike) else path, "path")
    if is_variant(place) and not os.path.lexists(place):
        raise BundleError(
            f"model {place!r} is the name of a network without weights; name a file, a folder or a name on the hub, "
            f"or train the network: vitrail train --variant {place} --data DIR"
        )
    if looks_like_hub_name(place):
        return download(place)
    file = shipped_folder(place) or expanded(place)
    is_part = file.name in (WEIGHTS, DESCRIPTION) and file.with_name(DESCRIPTION).is_file()
    return (file.parent if is_part else file), ()


def download(name: str) -> tuple[Path, tuple[str, ...]]:
    """Download the model of this name to the cache, and return its folder there, and notes. Files in the cache are not
    downloaded again.

    Only the needed files are downloaded: those of our own models, or another library's JSON descriptions, its tokenizer
    of texts and one set of weights, preferably safetensors. Without a network connection, the files of an earlier call
    are used, and a note says so.

    Raise `BundleError` if the repository or revision does not exist, access is refused, there are no weights, or the
    hub cannot be reached and the cache is incomplete. Raise `SaveError` if the cache cannot be written.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    model = parse("model", name, name.removeprefix(prefix))
    if model is None:
        raise BundleError(f"model {name!r} is not a name on the hub, which has the form org/name or org/name@revision")
    found = listing(model)
    if isinstance(found, str):
        return _cached(model, found), (from_cache(model, found),)
    commit, names = found
    get = functools.partial(fetch, model, commit)
    descriptions, weights = _choose(model, names)
    for file in descriptions:
        get(file)
    path = get(weights)
    for shard in _shards(path):
        if shard not in names:
            raise BundleError(f"model {name!r} is incomplete: {weights} names {shard}, which is not in the repository")
        get(shard)
    keep_branch(model, commit, (*descriptions, weights)[0])
    return path.parent, ()


def _choose(model: Repository, names: Iterable[str]) -> tuple[list[str], str]:
    """Return the names of the files to download from a repository.

    The first value lists the files beside the weights: descriptions, and what a text tower needs. The second value is
    the weights file, or the index of sharded weights.
    """
    everything = sorted(names)
    names = [name for name in everything if "/" not in name]
    if DESCRIPTION in names and WEIGHTS in names:
        return [name for name in NAMES if name in names and name != WEIGHTS], WEIGHTS
    tokenizer = next((files for files in TOKENIZERS if set(files) <= set(names)), ())
    descriptions = [name for name in (*DESCRIPTIONS, *tokenizer) if name in names]
    for preferred in PREFERRED:
        if preferred in names:
            return descriptions, preferred
    for suffix in SUFFIXES:
        weights = [name for name in names if name.endswith(suffix)]
        if len(weights) > 1:
            raise BundleError(
                f"model {model.given!r} has several files of weights, {', '.join(weights)}: download one of them, "
                "and load it by its path"
            )
        if weights:
            return descriptions, weights[0]
    raise BundleError(
        f"model {model.given!r} has no weights ({', '.join(SUFFIXES)}) outside of subfolders; its files are "
        f"{listed(everything) or 'none'}"
    )


def _shards(path: Path) -> list[str]:
    """Return the weights files that an index names, or an empty list if `path` is not an index."""
    if not path.name.endswith(".index.json"):
        return []
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: it does not name the file of each tensor ({error})") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BundleError(f"{path} points outside its folder: {shard!r}")
    return shards


def _cached(model: Repository, why: str) -> Path:
    """Return the folder of an earlier download. Raise `BundleError` if any file of the model is missing from it."""
    folder = cached_folder(model, why)
    try:
        _, weights = _choose(model, (file.name for file in folder.iterdir() if file.is_file()))
        missing = [shard for shard in _shards(folder / weights) if not (folder / shard).is_file()]
    except BundleError as error:
        raise BundleError(f"model {model.given!r} is incomplete in the cache, and {why}: {error}") from None
    if missing:
        raise BundleError(f"model {model.given!r} is incomplete in the cache, and {why}: {folder} lacks {missing[0]}")
    return folder


FOLDER = Path(__file__).parent / "shipped_models"

SHIPPED = ("small",)
"""Names of the models. docs/train.md says how each was trained, and what it is worth."""


def shipped_folder(name: str | Path) -> Path | None:
    """Return the folder of the model of this name, or None. A file or folder of that name on disk comes first."""
    text = str(name)
    return FOLDER / text if text in SHIPPED and not os.path.lexists(text) else None
