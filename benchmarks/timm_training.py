"""The process of a cell that runs timm's training loop: `PYTHON timm_training.py FOLDER`, or `--check`
to print the versions of the packages and the settings of every entry.

PYTHON belongs to an environment of its own, in which Vitrail need not be installed, so this module imports nothing of
Vitrail. The loop is that of timm's `train.py` without its options for several processes; the model, optimizer,
scheduler, augmentation, mixup, loss and loader are timm's.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

WARMUP_STEPS, TIMED_STEPS = 4, 24
"""Numbers of steps that measure the speed of a run: untimed ones, and timed ones after these."""

TIMED_FRACTION = 0.02
"""Fraction of the budget after which the timed steps end early."""

USED_FRACTION = 0.97
"""Fraction of the budget that a shortened run should take by its measured speed."""

MISSING = 3
"""Exit code if a package is missing."""

OPERATORS = ("nms", "qnms")
"""Compiled operators that torchvision's Python code registers when it is imported. A build for another torch lacks
them, and nothing here calls them."""


@dataclass(frozen=True, kw_only=True)
class TimmSettings:
    """Options of timm's `train.py`, with the defaults of timm 1.0. Cells have them as JSON values."""

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


def main(argument: str) -> int:
    """Run a cell, or check the packages, and return the exit code."""
    try:
        versions = _import_packages()
    except _Missing as missing:
        print(missing)
        return MISSING
    if argument == "--check":
        settings = {name: asdict(entry) for name, entry in TIMM_SETTINGS.items()}
        print(json.dumps({"versions": versions, "settings": settings}))
        return 0
    _end_with_parent()
    folder = Path(argument)
    cell = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
    result = {**_Run(cell, folder).measure(), "versions": versions}
    partial = folder / ".result.json.partial"
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "result.json")
    return 0


class _Missing(Exception):
    """A package cannot be imported. The message states how to install it."""


def _import_packages() -> dict[str, str]:
    """Import timm and torchvision, and return their versions."""
    library: Any = importlib.import_module("torch.library").Library("torchvision", "FRAGMENT")
    for name in ("torchvision", "timm"):
        try:
            importlib.import_module(name)
        except RuntimeError as error:
            # torchvision was built for another torch. Its Python code needs only the declarations of the operators.
            if "torchvision::" not in str(error):
                raise _Missing(f"{name} cannot be imported: {error}") from None
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for module in [module for module in sys.modules if module.partition(".")[0] == name]:
                del sys.modules[module]
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or name).partition(".")[0]
            raise _Missing(
                f"{missing} is not installed for {sys.executable}; install it there, beside the build of torch that is "
                "there, with: pip install --no-deps timm torchvision && pip install pyyaml huggingface_hub safetensors "
                "pillow"
            ) from None
    _KEPT.append(library)
    return {name: str(importlib.import_module(name).__version__) for name in ("torch", "torchvision", "timm")}


_KEPT: list[Any] = []
"""Declarations of operators, which are withdrawn when their library object is deleted."""


def _end_with_parent() -> None:
    """End this process at once when the process that started it closes this process's standard input, or dies."""

    def watch() -> None:
        while os.read(0, 1):  # sys.stdin has a lock, which would be held when Python ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Run:
    """One run of timm's training loop."""

    def __init__(self, cell: dict[str, Any], folder: Path) -> None:
        self.cell = cell
        self.settings = cell["settings"]
        self.device = torch.device(cell["device"])
        self.images = folder / self.settings["images"]
        self.classes = self.settings["num_classes"]
        self.batch_size = min(self.settings["batch_size"], self.settings["train_images"])
        self.bf16 = self.settings["amp"] and self.settings["bf16_units"]

    def measure(self) -> dict[str, Any]:
        """Train for the epochs of the settings, or for as many as fit into the budget, and return the measurements."""
        own = self.settings["epochs"]
        epochs, budget = own, self.cell["budget"]
        per_epoch = max(1, self.settings["train_images"] // self.batch_size)
        if budget is not None:
            seconds = self._seconds_per_step()
            epochs = min(own, max(1, int(USED_FRACTION * budget / (seconds * per_epoch))))
        self._make(epochs, per_epoch)
        flops = self._step_flops()
        points = self._train(epochs, epochs * per_epoch, flops)
        test = self.images / "test"
        return {
            "points": points,
            "validation_accuracy": points[-1]["accuracy"],
            "test_accuracy": self._accuracy("test") if test.exists() else None,
            "steps": epochs * per_epoch,
            "own_steps": own * per_epoch,
            "epochs": float(epochs),
            "batch_size": self.batch_size,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "precision": "bf16" if self.bf16 else "float32",
            "threads": torch.get_num_threads(),
        }

    def _make(self, epochs: int, per_epoch: int) -> None:
        """Make the model, optimizer, scheduler, loss and loaders, as train.py does."""
        timm, data = importlib.import_module("timm"), importlib.import_module("timm.data")
        settings, size = self.settings, tuple(self.settings["image_size"])
        importlib.import_module("timm.utils").random_seed(self.cell["seed"], 0)
        options = dict(settings["model_options"] or {}) | ({"img_size": size} if settings["sized"] else {})
        if settings["drop_path"]:
            options["drop_path_rate"] = settings["drop_path"]
        self.model = timm.create_model(settings["model"], num_classes=self.classes, **options).to(self.device)
        self.optimizer = importlib.import_module("timm.optim").create_optimizer_v2(
            self.model, opt=settings["optimizer"], lr=settings["learning_rate"],
            weight_decay=settings["weight_decay"], momentum=settings["momentum"],
        )  # fmt: skip
        warmup = settings["warmup_epochs"] * epochs / settings["epochs"]
        on_updates = settings["schedule_updates"]
        self.scheduler, _ = importlib.import_module("timm.scheduler").create_scheduler_v2(
            self.optimizer, sched="cosine", num_epochs=epochs, warmup_lr=settings["warmup_learning_rate"],
            warmup_epochs=int(warmup * per_epoch) / per_epoch if on_updates else round(warmup),
            step_on_epochs=not on_updates, updates_per_epoch=per_epoch,
        )  # fmt: skip
        losses = importlib.import_module("timm.loss")
        mixing, collate = settings["mixup"] > 0 or settings["cutmix"] > 0, None
        if mixing:
            collate = data.FastCollateMixup(
                mixup_alpha=settings["mixup"], cutmix_alpha=settings["cutmix"], prob=settings["mixup_probability"],
                switch_prob=0.5, mode="batch", label_smoothing=settings["smoothing"], num_classes=self.classes,
            )  # fmt: skip
        self.loss = (
            losses.SoftTargetCrossEntropy() if mixing else losses.LabelSmoothingCrossEntropy(settings["smoothing"])
        )
        self.normalisation = {key: settings[key] for key in ("mean", "std")} if settings["own_statistics"] else {}
        self.loader = data.create_loader(
            self._dataset("train"), input_size=(3, *size), batch_size=self.batch_size, is_training=True,
            re_prob=settings["random_erasing"], re_mode="pixel", color_jitter=settings["colour_jitter"],
            interpolation="random", num_workers=settings["workers"], collate_fn=collate, device=self.device,
            **self.normalisation,
        )  # fmt: skip
        self._change_augmentation(size)

    def _change_augmentation(self, size: tuple[int, ...]) -> None:
        """Replace timm's random resized crop by a padded crop at the images' own size, and add AutoAugment."""
        transforms = importlib.import_module("torchvision.transforms")
        pad, dataset = self.settings["pad_crop"], self.loader.dataset
        if pad is not None:
            first = [
                transforms.Resize(size),
                transforms.RandomCrop(size, padding=pad),
                *dataset.transform.transforms[1:2],
            ]
            if self.settings["auto_augment"]:
                first.append(transforms.AutoAugment(transforms.AutoAugmentPolicy.CIFAR10))
            dataset.transform = transforms.Compose([*first, *dataset.transform.transforms[2:]])

    def _dataset(self, split: str) -> Any:
        dataset = importlib.import_module("timm.data").create_dataset
        names = {f"{index:05d}": index for index in range(self.classes)}
        return dataset("", root=str(self.images / split), class_map=names, is_training=split == "train")

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def _step(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        with self._autocast():
            loss = self.loss(self.model(images), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _train(self, epochs: int, steps: int, flops: float) -> list[dict[str, float]]:
        """Train, and return the points of the curve. Evaluations are spread evenly over the steps."""
        count = min(self.cell["evaluations"], steps)
        due = {steps * (number + 1) // count for number in range(count)}
        points: list[dict[str, float]] = []
        clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
        spent, step = [0.0, 0.0], 0
        since = [clock() for clock in clocks]
        for epoch in range(epochs):
            self.model.train()
            for images, targets in self.loader:
                self._step(images, targets)
                step += 1
                self.scheduler.step_update(num_updates=step)
                if step in due:
                    self._wait()
                    spent = [done + clock() - start for done, clock, start in zip(spent, clocks, since)]  # noqa: B905
                    accuracy = self._accuracy("validation")
                    points.append({
                        "step": step, "seconds": spent[0], "cpu_seconds": spent[1], "flops": step * flops,
                        "accuracy": accuracy,
                    })  # fmt: skip
                    print(f"step {step:,} of {steps:,}: {accuracy:.4f} after {spent[0]:,.0f} s")
                    self.model.train()
                    since = [clock() for clock in clocks]
            self.scheduler.step(epoch + 1)
        return points

    def _seconds_per_step(self) -> float:
        """Return the seconds of a training step, from the first steps of a run that is thrown away."""
        per_epoch = max(1, self.settings["train_images"] // self.batch_size)
        self._make(self.settings["epochs"], per_epoch)
        self.model.train()
        most = TIMED_FRACTION * self.cell["budget"]
        begun = taken = 0.0
        for step, (images, targets) in enumerate(self._batches(), start=1 - WARMUP_STEPS):
            self._step(images, targets)
            self._wait()
            taken = time.perf_counter() - begun
            if step == 0:
                begun = time.perf_counter()
            elif step > 0 and (step == TIMED_STEPS or taken > most):
                break
        return taken / step

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.loader

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _accuracy(self, split: str) -> float:
        """Return the accuracy on a split, as train.py's `validate` does."""
        loader = importlib.import_module("timm.data").create_loader(
            self._dataset(split), input_size=(3, *self.settings["image_size"]), batch_size=256, is_training=False,
            num_workers=self.settings["workers"], device=self.device, persistent_workers=False,
            crop_pct=1.0 if self.settings["own_statistics"] else None, **self.normalisation,
        )  # fmt: skip
        self.model.eval()
        right = total = 0
        for images, targets in loader:
            with self._autocast():
                logits = self.model(images)
            right += int((logits.argmax(1) == targets).sum())
            total += len(targets)
        return right / total

    def _step_flops(self) -> float:
        """Return the operations of the products and convolutions of a training step, by PyTorch's own counter.

        The fused attention kernels are not used while they are counted, so that each product is counted once.
        """
        counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
        attention = importlib.import_module("torch.nn.attention")
        images = torch.zeros(2, 3, *self.settings["image_size"], device=self.device)
        model = copy.deepcopy(self.model).train()  # a forward pass changes the statistics of batch norms
        with torch.random.fork_rng([]), attention.sdpa_kernel(attention.SDPBackend.MATH), counter:
            model(images).sum().backward()
        return float(counter.get_total_flops()) * self.batch_size / len(images)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
