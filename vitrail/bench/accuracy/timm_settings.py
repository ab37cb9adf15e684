"""Settings of timm's training loop that `--against timm` measures, by the name of the entry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TIMM_SETTINGS", "TimmSettings"]


@dataclass(frozen=True, kw_only=True)
class TimmSettings:
    """Options of timm's `train.py`, with the defaults of timm 1.0. `timm_run.py` reads them as JSON values."""

    model: str = "resnet50"
    model_options: dict[str, Any] | None = None
    """Arguments of the model's class, beside `img_size`."""
    sized: bool = False
    """True if the model is made for one image size, as Vision Transformers are."""
    optimizer: str = "sgd"
    momentum: float = 0.9
    learning_rate: float = 0.05
    """The default of train.py: 0.1 for 256 images, which is 0.05 for batches of 128."""
    weight_decay: float = 2e-5
    batch_size: int = 128
    epochs: int = 300
    warmup_epochs: int = 5
    warmup_learning_rate: float = 1e-5
    schedule_updates: bool = False
    """Change the learning rate after every step instead of every epoch (--sched-on-updates)."""
    drop_path: float = 0.0
    pad_crop: int | None = None
    """Pixels of padding of a random crop at the images' own size, in place of a random resized crop."""
    auto_augment: bool = False
    """Use the AutoAugment policy for CIFAR-10 of torchvision."""
    colour_jitter: float = 0.4
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_probability: float = 1.0
    smoothing: float = 0.1
    own_statistics: bool = False
    """Normalise with the mean and deviation of the data in place of those of ImageNet."""
    amp: bool = False
    """Use mixed precision in bfloat16 where the processor has units for it (--amp --amp-dtype bfloat16)."""
    workers: int = 4
    """Processes that read images."""


DEFAULTS = TimmSettings()

SMALL_IMAGES = TimmSettings(
    model="vit_tiny_patch16_224", model_options={"patch_size": 4, "depth": 9, "num_heads": 12, "mlp_ratio": 2.0},
    sized=True, optimizer="adamw", learning_rate=1e-3, weight_decay=0.05, epochs=100, warmup_epochs=10,
    schedule_updates=True, drop_path=0.1, pad_crop=4, auto_augment=True, colour_jitter=0.0, random_erasing=0.25,
    mixup=1.0, cutmix=1.0, mixup_probability=0.5, own_statistics=True, amp=True,
)  # fmt: skip
"""Settings of "Vision Transformer for Small-Size Datasets" (2112.13492) for images of 32 pixels: a ViT of width 192
with 9 blocks and patches of 4 pixels. timm publishes no settings for such images. Repeated augmentation is left out,
because train.py has it for several processes only."""

TIMM_SETTINGS: dict[str, TimmSettings] = {"timm-defaults": DEFAULTS, "timm-small": SMALL_IMAGES}
"""timm's defaults, and the best published settings for small images."""


def plain_settings(name: str, **data: Any) -> dict[str, Any]:
    """Return settings as JSON values, with values that depend on the data."""
    return {**asdict(TIMM_SETTINGS[name]), **data}
