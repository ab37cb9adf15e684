"""A model with a network of the user's own class. Only the weights of such a network can be saved."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn

from vitrail.errors import BundleError, ConfigError
from vitrail.files import check_new_folder, expanded, partial_path, replacing_folder, saving
from vitrail.models.linear.lora import merged
from vitrail.models.variants import ARCHITECTURES, AnyConfig
from vitrail.settings import typed
from vitrail.weights.bundle import Bundle, Images, load_bundle, write_bundle
from vitrail.weights.saved import PRODUCER, WEIGHTS, StoredFormat, save_safetensors
from vitrail.weights.tensors import open_tensors

MARK = {"producer": PRODUCER}
"""Metadata of the file, by which `OwnModel.save` recognises an earlier output."""

BESIDE = "beside.safetensors"
"""Name of the file in a run's folder with the weights that the objective trained beside the best network."""


@dataclass
class OwnModel(Bundle):
    """A model whose network is of the user's own class.

    `predict` works like `Bundle.predict`. `save` writes only the weights, because no file can describe the computation
    of the network's class. To use the weights later, make the network again and load them:
    `network.load_state_dict(safetensors.torch.load_file("model/model.safetensors"))`.
    """

    network: Any

    def __post_init__(self) -> None:
        """Skip the checks of `Bundle`, because the network has no config. Training has checked the network."""

    def embed(self, images: Images, *, batch_size: int | None = None) -> Float[Tensor, "b embed_width"]:
        """Raise `ConfigError`, because a network of the user's own class need not have embeddings."""
        raise ConfigError(
            "embed: Vitrail knows only the outputs of a network of your own class; call a method of the network"
        )

    def save(self, path: str | Path, *, overwrite: bool = False, stored: StoredFormat = "float32") -> Path:
        """Write the weights into a folder as `model.safetensors`, in the number formats that they have. Raises
        `ConfigError` for another `stored`, and the errors of `Bundle.save`."""
        if stored != "float32":
            raise ConfigError(
                f"stored={stored!r}: the weights of a network of your own class are saved in the number formats that "
                "they have; convert the network instead"
            )
        check_new_folder(
            path := expanded(path), (WEIGHTS,), overwrite=typed(bool, overwrite, "overwrite"), recognise=_is_ours
        )
        write_weights(self, path)
        return path


def _is_ours(folder: Path) -> bool:
    """Return True if `write_weights` wrote the weights of a network of the user's own class into a folder."""
    with suppress(BundleError):
        return open_tensors(folder / WEIGHTS).metadata.items() >= MARK.items()
    return False


def has_known_architecture(network: nn.Module) -> bool:
    """Return True if the network's class belongs to this package, so that a bundle can save the network."""
    return getattr(getattr(network, "config", None), "architecture", None) in ARCHITECTURES


def own_config(network: nn.Module | None) -> AnyConfig | None:
    """Return the config of a network that the user made, or None if its class is not one of this package."""
    return network.config if network is not None and has_known_architecture(network) else None  # type: ignore[return-value]


def without_adapters(bundle: Bundle) -> Bundle:
    """Return the model with its adapters merged into the weights. A network of the user's own class has no adapters."""
    return bundle if isinstance(bundle, OwnModel) else replace(bundle, network=merged(bundle.network))


def write_weights(bundle: Bundle, path: Path) -> None:
    """Write a bundle's folder, or the weights of the user's own network, over an earlier version. Raise `SaveError`."""
    if not isinstance(bundle, OwnModel):
        write_bundle(bundle, path)
        return
    state = {name: tensor.detach().cpu().clone() for name, tensor in bundle.network.state_dict().items()}
    with replacing_folder("the weights", path, (WEIGHTS,)) as partial:
        save_safetensors(state, partial / WEIGHTS, MARK)


def write_beside(objective: nn.Module, path: Path) -> None:
    """Write the weights that an objective trains beside its network, such as a decoder, over an earlier file.

    They belong to the weights that `write_weights` saves, and the model can only be measured with them. An objective
    that trains nothing beside its network leaves no file. Raise `SaveError`.
    """
    tensors = beside(objective)
    if not tensors:
        return
    with saving("the weights beside the network", path):
        partial = partial_path(path)
        save_safetensors({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, partial)
        partial.replace(path)


def load_beside(objective: nn.Module, path: Path) -> None:
    """Load the weights that `write_beside` wrote. If there is no file, the weights stay as they are."""
    if path.exists():
        objective.load_state_dict(load_file(path), strict=False)


def beside(objective: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an objective that do not belong to the network that it saves."""
    saved = getattr(objective, "saved_part", "network")
    return {name: tensor for name, tensor in objective.state_dict().items() if not name.startswith(f"{saved}.")}


def load_weights(bundle: Bundle, path: Path) -> None:
    """Load the weights that `write_weights` wrote into the bundle's network. Raise `BundleError`."""
    state = load_file(path / WEIGHTS) if isinstance(bundle, OwnModel) else load_bundle(path).network.state_dict()
    bundle.network.load_state_dict(state)
