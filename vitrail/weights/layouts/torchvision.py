"""Files of torchvision's Vision Transformers, such as vit_b_16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitrail.errors import BundleError
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.adapt import moved_positions
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    IMAGENET,
    KEPT,
    SHAPE,
    Checkpoint,
    Description,
    Hints,
    Names,
    Table,
    assumed_preprocess,
    bare_loss,
    carried,
    config_to_write,
    default_preprocess,
    depth_of,
    file_grid,
    heads_of,
    only,
    own,
    patch_filters,
    theirs_of,
)
from vitrail.weights.tensors import save_tensors

CARRIED: Table = {
    **SHAPE, "head_hidden": KEPT, "positions_cover": KEPT, "root": only(None), "pool": only("cls"),
    "class_token": only(True), "registers": only(0), "final_norm": only("tokens"), "positions": only("learned"),
    "positions_at": only("stem"), "activation": only("gelu", "gelu-tanh"), "layer_scale": only(0.0),
    "attention": only("full"),
    "qk_norm": only(False), "qkv_bias": only(True), "dense_bias": only(True), "patch_bias": only(True),
    "norm_eps": own(1e-6), "position_resize": own("bicubic-corners"),
}  # fmt: skip
BLOCK = "encoder.layers.encoder_layer_"


END_TO_END = (384, 512, 518)
"""Image sizes of the SWAG models that were fine-tuned end to end (2201.08371). These models need images that are scaled
to the model's size with bicubic interpolation. SWAG models with a linear head and images of 224 pixels need the same
scaling, but nothing in their files distinguishes them from other models."""


class Torchvision:
    """The layout of torchvision. Its networks have a class token, learned positions and exact GELU.

    The hidden layer before the head is optional.
    """

    name = "torchvision"
    folder_files: tuple[str, ...] = ()

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return "conv_proj.weight" in checkpoint.tensors and "encoder.pos_embedding" in checkpoint.tensors

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors = checkpoint.tensors
        # Before torchvision 0.12, the layers of an MLP were called linear_1 and linear_2.
        tensors = tensors.renamed(lambda n: n.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3."))
        shapes = tensors.shapes
        width, channels, down, across = shapes["conv_proj.weight"]
        cells = down, across
        depth = depth_of(tensors, BLOCK)
        mlp_width = shapes[f"{BLOCK}0.mlp.0.bias"][0] if f"{BLOCK}0.mlp.0.bias" in tensors else 4 * width
        grid = file_grid(shapes["encoder.pos_embedding"][1] - 1, cells, hints, tensors.path)
        config = ViTConfig(
            image_size=(grid[0] * cells[0], grid[1] * cells[1]),
            patch_size=cells,
            channels=channels,
            width=width,
            depth=depth,
            heads=heads_of(width, depth, mlp_width, hints, tensors.path),
            mlp_width=mlp_width,
            num_classes=shapes.get("heads.head.bias", (0,))[0],
            head_hidden=shapes.get("heads.pre_logits.bias", (0,))[0],
            position_resize="bicubic-corners",
        )
        geometry: dict[str, Any] = {"crop_share": 0.875}
        if config.image_size in [(side, side) for side in END_TO_END]:
            geometry = {"crop_share": 1.0, "interpolation": "bicubic"}
        elif (width, cells, config.image_size) == (
            1024,
            (16, 16),
            (224, 224),
        ):
            # The published ViT-L/16 was evaluated in this way.
            geometry = {"crop_share": 224 / 242}
        preprocess = default_preprocess(config, resize="crop", **geometry, **(IMAGENET if channels == 3 else {}))
        return Description(
            tensors=tensors,
            config=config,
            preprocess=preprocess,
            names=names(config),
            notes=(assumed_preprocess(preprocess),),
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config: ViTConfig = config_to_write(self.name, bundle)
        lost = [*bare_loss(self.name, bundle), f"heads={config.heads}", *carried(self.name, config, CARRIED)]
        if config.patch_size[0] != config.patch_size[1] or config.image_size[0] != config.image_size[1]:
            raise BundleError(
                "torchvision takes only square patches and images, but this model has patches of "
                f"{config.patch_size} and images of {config.image_size}"
            )
        state, config = moved_positions(bundle.network.state_dict(), config, "class")
        save_tensors(theirs_of(state, names(config)), path, (".pth", ".pt", ".bin"))
        if config.activation == "gelu-tanh":
            lost.append("the tanh approximation of GELU (its code computes the exact one)")
        return tuple(lost)


NAMES: Names = {
    "patches.projection.bias": "conv_proj.bias",
    "prefix.cls": "class_token",
    "positions.embedding": "encoder.pos_embedding",
    "blocks.*.norm1.*": f"{BLOCK}*.ln_1.*",
    "blocks.*.attention.qkv.*": f"{BLOCK}*.self_attention.in_proj_*",
    "blocks.*.attention.out.*": f"{BLOCK}*.self_attention.out_proj.*",
    "blocks.*.norm2.*": f"{BLOCK}*.ln_2.*",
    "blocks.*.mlp.up.*": f"{BLOCK}*.mlp.0.*",
    "blocks.*.mlp.down.*": f"{BLOCK}*.mlp.3.*",
    "norm.*": "encoder.ln.*",
    "head_hidden.*": "heads.pre_logits.*",
    "head.*": "heads.head.*",
}


def names(config: ViTConfig) -> Names:
    """Return our names of the tensors of a network with this config, and torchvision's."""
    return {"patches.projection.weight": patch_filters("conv_proj.weight", config.patch_size), **NAMES}


TORCHVISION = Torchvision()
