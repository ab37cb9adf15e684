"""Checks that an extension fulfils the contracts of the package. They work in any test framework.

from vitrail.testing import check_network, check_source
check_network(lambda num_classes: MyNetwork(num_classes), image_sizes=[(32, 48), (48, 32)])
check_source(MySource("a/small/folder"))
"""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, Rows
from vitrail.data.pipeline import Readers, Stage, TrainingBatches
from vitrail.data.pixels.decode import decode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.models.network import Features
from vitrail.models.variants import build, variant_config
from vitrail.processes.group import Processes
from vitrail.settings import from_plain, to_plain
from vitrail.tasks.task import BatchObjective, Objective, Position, Task
from vitrail.training.job import check_source as check_before_training
from vitrail.training.loop import check_output
from vitrail.training.start import head_fields
from vitrail.weights.bundle import Bundle, weights_sha256

if not __debug__:
    raise ConfigError("vitrail.testing checks by assertions, which python -O removes; run the checks without -O")


@torch.random.fork_rng([])
def check_network(make: Callable[[int], Any], *, image_sizes: Sequence[tuple[int, int]]) -> None:
    """Check that a network fulfils the contract of `vitrail.models.network.Network`.

    `make(num_classes)` returns a new network, without a head if there are 0 classes. `image_sizes` are heights and
    widths in pixels that the network must accept. At least one size must not be square. Raises `AssertionError` with
    the broken rule.
    """
    assert any(height != width for height, width in image_sizes), "give at least one size that is not square"
    torch.manual_seed(0)
    network = _randomised(make(7))
    for size in image_sizes:
        _check_shapes(network, size)
    height, width = image_sizes[0]
    images = torch.rand(2, network.config.channels, height, width) * 2 - 1
    _check_no_head(_randomised(make(0)), images)
    _check_wrong_images(network, images)
    _check_independence(network, images)
    _check_bf16(network, images)
    _check_gradients(network, images)
    _check_state(network, make(7), images)
    for size in image_sizes:
        _check_cost(network, size)
    _check_attention_weights(network, images)


def _randomised(network: Any) -> Any:
    """Add small random numbers to the initial weights. Weights of zero would hide errors in parts of the network."""
    assert isinstance(network, nn.Module), f"the network must be an nn.Module, not {type(network).__name__}"
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network.eval()


@torch.no_grad()
def _check_shapes(network: Any, size: tuple[int, int]) -> None:
    config = network.config
    images = torch.rand(3, config.channels, *size) * 2 - 1
    features = network.features(images)
    assert isinstance(features, Features), f"features() must return Features, not {type(features).__name__}"
    grid = config.grid_of(*size)
    assert features.grid == grid, (
        f"features().grid is {features.grid} for images of {size}, but grid_of() returns {grid}"
    )
    width = features.patches.shape[-1]
    expected = (3, math.prod(grid), width)
    assert features.patches.shape == expected, (
        f"features().patches has the shape {tuple(features.patches.shape)}, not {expected}"
    )
    assert features.registers.shape[::2] == (3, width), (
        f"features().registers has the shape {tuple(features.registers.shape)}, not (3, registers, {width})"
    )
    assert features.cls is None or features.cls.shape == (3, width), f"the class token must have the shape (3, {width})"
    for name, tensor, length in (
        ("embed", network.embed(images), config.embed_width),
        ("logits", network(images), config.num_classes),
    ):
        assert tensor.shape == (3, length), (
            f"{name} has the shape {tuple(tensor.shape)}, not {(3, length)}, for images of {size}"
        )
        assert tensor.isfinite().all(), f"{name} has numbers that are not finite, for images of {size}"


@torch.no_grad()
def _check_no_head(network: Any, images: Tensor) -> None:
    assert network.head is None and network.config.num_classes == 0, "the head of a network with 0 classes must be None"
    if getattr(network.config, "head_hidden", 0) == 0:
        assert torch.equal(network(images), network.embed(images)), (
            "without a head, the network must return the same as embed()"
        )


def _check_wrong_images(network: Any, images: Tensor) -> None:
    for wrong, what in (
        (images[:, :1].repeat(1, network.config.channels + 1, 1, 1), "another number of channels"),
        (images[:, :, :0], "a height of 0"),
    ):
        for call in (network, network.embed, network.features):
            try:
                call(wrong)
            except ConfigError:
                continue
            except Exception as error:
                name = type(error).__name__
                raise AssertionError(
                    f"images with {what} must be refused with ConfigError, but {name} was raised"
                ) from error
            raise AssertionError(f"images with {what} must be refused with ConfigError")


@torch.no_grad()
def _check_independence(network: Any, images: Tensor) -> None:
    both = network(images)
    assert torch.equal(both, network(images)), "the same images must give the same logits in every call"
    difference = (both[1:] - network(images[1:])).abs().max()
    assert difference < 1e-4, f"the logits of an image change by {difference:.2g} with the other images in its batch"


@torch.no_grad()
def _check_bf16(network: Any, images: Tensor) -> None:
    exact = network(images)
    with torch.autocast(images.device.type, torch.bfloat16):
        coarse = network(images).float()
    difference = (exact - coarse).norm() / exact.norm()
    assert difference < 0.1, f"the logits in bfloat16 differ from those in float32 by {difference:.1%} of their norm"


@torch.no_grad()
def _check_cost(network: Any, size: tuple[int, int]) -> None:
    """Check the closed forms of the config against the network and PyTorch's count of matrix products."""
    config, images = network.config, torch.zeros(1, network.config.channels, *size)
    weights = sum(parameter.numel() for parameter in network.parameters())
    assert config.parameters() == weights, (
        f"config.parameters() is {config.parameters():,}, but the network has {weights:,} weights"
    )
    counts = []
    for call in (network, network.features):
        # PyTorch has no count for the fused attention of a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call(images)
        counts.append(counter.get_total_flops())
    of_logits, of_features = counts
    stated = config.inference_flops(size)
    assert math.isclose(stated, of_logits, rel_tol=0.01), (
        f"config.inference_flops({size}) is {stated:,}, but the network computes {of_logits:,} FLOPs for an image"
    )
    stated = 2 * config.macs(size)
    assert 0.99 * of_features <= stated <= 1.01 * (of_features + of_logits), (
        f"config.macs({size}) is {stated // 2:,}, but the features of all tokens take {of_features // 2:,} "
        "multiply-accumulates"
    )


@torch.no_grad()
def _check_attention_weights(network: Any, images: Tensor) -> None:
    for layer, weights in enumerate(getattr(network, "attention_weights", lambda images: ())(images)):
        sums = weights.sum(dim=-1)
        assert weights.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-4), (
            f"the attention weights of block {layer} must be positive and add up to 1 for each token, but their sums "
            f"go from {sums.min():.3g} to {sums.max():.3g}"
        )


def _check_gradients(network: Any, images: Tensor) -> None:
    network.train()
    network.zero_grad()
    network(images).square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, f"no gradient reaches {name}"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
        assert parameter.grad.abs().max() > 0, f"the gradient of {name} is zero"
    network.zero_grad()
    network.eval()


@torch.no_grad()
def _check_state(network: Any, other: Any, images: Tensor) -> None:
    """Check that the state is complete: a new network with the saved weights returns the same logits."""
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(network(images), other.eval()(images)), "a network loaded from the state gives other logits"


def check_evaluator(evaluator: Any, bundle: Bundle, train: Source, held_out: Source) -> dict[str, float]:
    """Check that an evaluator fulfils the contract of `vitrail.evaluation.evaluators.Evaluator`. Return its metrics.

    The evaluator is called three times with the model of `bundle`, so the sources should be small. Raises
    `AssertionError` with the broken rule.
    """
    assert isinstance(evaluator, Evaluator), f"{type(evaluator).__name__} must be callable"
    before, was_training = weights_sha256(bundle.network), bundle.network.training
    outputs = Outputs(bundle, batch_size=8)
    metrics = evaluator(outputs, train, held_out)
    assert isinstance(metrics, dict), f"an evaluator must return a dict of metrics, not {type(metrics).__name__}"
    for name, value in metrics.items():
        assert isinstance(name, str) and name, f"names of metrics must be str, not {name!r}"
        assert type(value) is float, f"metric {name!r} is {value!r}, not a float"
    for name in ("images", "skipped"):
        assert name in metrics, f"the metrics lack {name!r}"
    counted = metrics["images"] + metrics["skipped"]
    assert 0 <= counted <= len(held_out), (
        f"images and skipped add up to {counted:g}, but there are {len(held_out)} samples"
    )
    for name in metrics:
        low, high = metrics.get(f"{name}_low", metrics[name]), metrics.get(f"{name}_high", metrics[name])
        rounding = 1e-9 * abs(metrics[name])
        assert low - rounding <= metrics[name] <= high + rounding, (
            f"{name}={metrics[name]} is outside of its interval, {low} to {high}"
        )
    assert weights_sha256(bundle.network) == before, "the evaluator must not change the model's weights"
    assert bundle.network.training is was_training, (
        "the evaluator must not change the mode of the network (train or eval)"
    )
    for how, again in (("a second time", outputs), ("with new outputs", Outputs(bundle, batch_size=5))):
        repeated = evaluator(again, train, held_out)
        assert repeated.keys() == metrics.keys(), f"called {how}, it returns other metrics"
        for name, value in metrics.items():
            same = math.isclose(repeated[name], value, rel_tol=1e-4, abs_tol=1e-6)
            assert same or (math.isnan(value) and math.isnan(repeated[name])), f"called {how}, it gives another {name}"
    return metrics


@torch.random.fork_rng([])
def check_task(task: Any, splits: Splits) -> None:
    """Check that a task fulfils the contract of `vitrail.tasks.task.Task`.

    Every method that training uses is called with a small network for images of 28 x 42 pixels. The splits should be
    small and must include a validation split. Raises `AssertionError` with the broken rule, or the error with which
    `vitrail.train` refuses the task.
    """
    assert isinstance(task, Task), f"{type(task).__name__} must be a Task"
    assert isinstance(getattr(task, "targets", None), tuple) and hasattr(task, "name"), (
        "a task must state its name and, as a tuple, the kinds of targets"
    )
    names = [metric.name for metric in task.metrics]
    assert task.loss_metric in names, f"loss_metric={task.loss_metric!r} is not one of the task's metrics: {names}"
    settings = json.loads(json.dumps(to_plain(task)))
    assert from_plain(type(task), settings) == task, "the settings change when they are written as JSON and read again"
    assert len(splits.train) and splits.validation is not None and len(splits.validation), (
        "the splits must include training samples and a validation split"
    )
    task.check_data(splits)
    main = task.main_metric(splits)
    assert main in names, f"main_metric() returns {main!r}, which is not one of the task's metrics: {names}"
    selection = task.selection(splits).name
    outputs = task.output_names(splits)
    preprocess = Preprocess(image_size=(28, 42))
    torch.manual_seed(0)
    config = variant_config(
        "ViT-Pico/7", image_size=(28, 42), width=16, depth=1, heads=2, mlp_width=16, num_classes=len(outputs)
    )
    network = build(replace(config, **head_fields(config, {}, task)))
    task.check_network(network.config)
    objective = task.objective(network, splits)
    assert isinstance(objective, Objective), f"objective() must return an Objective, not {type(objective).__name__}"
    objective.begin(preprocess, seed=0)
    batches = TrainingBatches(
        splits.train,
        [Stage(preprocess, batch_size=4, local=task.local_views_of(preprocess, Augment(), 0))],
        seed=0,
        readers=Readers(threads=0),
        rows=Rows(views=task.views),
    )
    batch = next(batches)
    batches.close()
    _check_objective(objective, batch.with_images(preprocess.normalise))
    objective.eval()
    bundle = task.bundle(objective, outputs, preprocess, {})
    assert bundle.classes == outputs, f"bundle() has the outputs {bundle.classes}, but output_names() returns {outputs}"
    metrics = check_evaluator(task.evaluator(objective), bundle, splits.train, splits.validation)
    for name in (task.loss_metric, selection):
        assert name in metrics, f"the evaluator does not measure {name!r}"


def _check_objective(objective: Objective, batch: Batch) -> None:
    def loss_of(batch: Batch) -> Any:
        torch.manual_seed(1)  # for objectives that use random numbers
        return objective(batch)

    position = Position(step=0, steps=10, epoch=0.0)
    objective.before_step(position)
    output = loss_of(batch)
    check_output(objective, output)
    amounts = objective.counted(batch).shape[1:]
    for name, value in {"loss": output.loss, **output.metrics}.items():
        assert value.shape == amounts and value.isfinite().all(), (
            f"{name} must be one finite number, or one for each amount of counted(), not {value}"
        )
    if isinstance(objective, BatchObjective):
        with torch.no_grad():
            whole, part = (objective.eval().features(one) for one in (batch, batch.chunks(2)[0]))
        objective.train()
        for name, values in part.items():
            assert torch.allclose(whole[name][: len(values)], values, rtol=1e-4, atol=1e-5), (
                f"features() must compute {name!r} of each row by itself; what depends on several rows is for compare()"
            )
    loss: Tensor = output.loss.sum()
    torch.autograd.backward(loss)
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, f"no gradient reaches {name}; set requires_grad to False"
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
    before = {name: parameter.detach().clone() for name, parameter in objective.network.named_parameters()}
    objective.after_step(position, Processes())
    for name, parameter in objective.network.named_parameters():
        assert torch.equal(before[name], parameter), f"after_step() must leave {name} to the optimizer"
    valid = batch.valid.clone()
    valid[0] = False
    images = batch.images.clone()
    images[0] = -images[0]
    with torch.no_grad():
        first = loss_of(replace(batch, valid=valid)).loss
        second = loss_of(replace(batch, valid=valid, images=images)).loss
    assert torch.allclose(first, second, atol=1e-6), (
        "an image that cannot be decoded must not change the loss; use batch.valid"
    )


def check_source(source: Any, *, decodes: bool = True) -> None:
    """Check that a source fulfils the contract of `vitrail.data.source.Source`.

    A source provides random access, and returns the same samples in every thread and process. With `decodes`, every
    image must be decodable. Each sample is read several times, so the source should be small. Raises `AssertionError`
    with the broken rule, or the `ConfigError` with which `vitrail.train` refuses the source.
    """
    check_before_training(source, sys.maxsize)
    count = len(source)
    keys, labels = [source.key(index) for index in range(count)], [source.target(index) for index in range(count)]
    assert len(set(keys)) == count and all(keys), "keys must be different names, and not empty"
    for key, label in zip(keys, labels, strict=True) if target_kind(source) == "classes" else ():
        values: Any = label or ()
        assert list(values) == sorted(set(values)), f"the labels of {key!r} must be in rising order, not {label!r}"
    first = [source[index] for index in range(count)]
    for sample in first if decodes else ():
        decode(sample.image, 3 if isinstance(sample.image, bytes) else sample.image.shape[2])
    for past in (count, count + 7):
        try:
            source[past]
        except IndexError:
            continue
        raise AssertionError(f"source[{past}] must raise IndexError, because the source has {count} samples")
    backwards = [source[index] for index in reversed(range(count))][::-1]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(source.__getitem__, [*range(count)] * 2))
    elsewhere = pickle.loads(pickle.dumps(source))
    assert [elsewhere.key(index) for index in range(count)] == keys, (
        "after pickling, as for another process, the source has other keys"
    )
    for how, again in (
        ("backwards", backwards), ("by several threads", together[:count]), ("by several threads", together[count:]),
        ("after pickling", [elsewhere[index] for index in range(count)]),
    ):  # fmt: skip
        for one, other in zip(first, again, strict=True):
            assert one.key == other.key and str(one.target) == str(other.target), f"{one.key!r} differs when read {how}"
            assert np.array_equal(_comparable(one.image), _comparable(other.image)), (
                f"the image of {one.key!r} differs when read {how}"
            )


def _comparable(image: bytes | np.ndarray) -> np.ndarray:
    return np.frombuffer(image, np.uint8) if isinstance(image, bytes) else image
