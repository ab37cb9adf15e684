"""Fine-tuning runs of papers: commands of `vitrail finetune` with the published results."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TRANSFERS", "Transfer"]

HUB = {
    "ViT-B/16": "google/vit-base-patch16-224-in21k",
    "ViT-B/32": "google/vit-base-patch32-224-in21k",
    "ViT-L/16": "google/vit-large-patch16-224-in21k",
    "ViT-L/32": "google/vit-large-patch32-224-in21k",
    "ViT-H/14": "google/vit-huge-patch14-224-in21k",
}
"""Names on the hub of the paper's networks, pre-trained on ImageNet-21k."""

DATA = {
    "CIFAR-10": "hf:uoft-cs/cifar10",
    "CIFAR-100": "hf:uoft-cs/cifar100?label=fine_label",
    "ImageNet": "hf:ILSVRC/imagenet-1k",
    "Flowers": "hf:dpdl-benchmark/oxford_flowers102",
    "Pets": "hf:timm/oxford-iiit-pet",
}
"""Data sets on the hub. Their names were looked up, but the data was not downloaded."""

TABLE_5 = {
    "ViT-B/16": (98.95, 91.67, 83.97, 99.38, 94.43),
    "ViT-B/32": (98.79, 91.97, 81.28, 99.11, 93.02),
    "ViT-L/16": (99.16, 93.44, 85.15, 99.61, 94.73),
    "ViT-L/32": (99.13, 93.04, 80.99, 99.19, 93.09),
    "ViT-H/14": (99.27, 93.82, 85.13, 99.51, 94.82),
}
"""Accuracies in percent after pre-training on ImageNet-21k, in the order of `DATA` (2010.11929, Table 5)."""


@dataclass(frozen=True)
class Transfer:
    """A fine-tuning run of a paper."""

    network: str
    data: str
    """Title of the data set."""
    command: str
    result: str
    """The published result."""
    source: str
    """The paper or code, with table and arXiv number."""


def _command(model: str, data: str, options: str) -> str:
    return f"vitrail finetune {model} --data {data} {options}"


TRANSFERS = (
    *(
        Transfer(
            network, title, _command(HUB[network], spec, "--protocol paper"), f"{result:.2f} %", "2010.11929, Table 5"
        )
        for network, results in TABLE_5.items()
        for (title, spec), result in zip(DATA.items(), results, strict=True)
    ),
    Transfer(
        "ViT-L/16",
        "ImageNet",
        _command(HUB["ViT-L/16"], DATA["ImageNet"], "--protocol paper --image-size 512 512 --average 0.9999"),
        "85.30 %",
        "2010.11929, Table 2",
    ),
    Transfer(
        "ViT-L/16",
        "VTAB-1k",
        _command(HUB["ViT-L/16"], "datasets", "--suite vtab-1k --protocol paper"),
        "72.72 %, mean of 19 tasks",
        "2010.11929, Table 2",
    ),
    *(
        Transfer(
            f"BiT-{network}",
            "ImageNet",
            _command(f"BiT-M-{network}.npz", DATA["ImageNet"], "--protocol bit"),
            result,
            "1912.11370, README of google-research/big_transfer",
        )
        for network, result in (("R50x1", "80.68 %"), ("R152x2", "85.15 %"))
    ),
)
"""Rows of Table 5 (five networks and five data sets), of Table 2, and of Big Transfer."""
