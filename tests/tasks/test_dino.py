"""Tests of DINO: the loss against its formula in float64, the teacher, the centre, the schedules, unfit settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tasks.images import batch_of, images_of
from tests.tasks.objectives import measured, shrink, small_network
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.variants import variant_config
from vitrail.processes.group import Processes
from vitrail.recipes import RECIPES
from vitrail.tasks.dino import Dino, DinoHead, DinoObjective, draw_masks
from vitrail.tasks.task import Position
from vitrail.tasks.unlabelled import effective_rank, momentum_at, uniformity
from vitrail.training.config import TrainConfig
from vitrail.training.optimizer import make_optimizer

SMALL: dict[str, Any] = {"prototypes": 24, "projection_hidden": 20, "bottleneck": 12, "local_size": (14, 7)}


def views_of(samples: int, count: int, size: tuple[int, int], *, first: int = 0) -> Batch:
    """Return a batch with `count` random views of each sample, in consecutive rows."""
    rows = torch.arange(samples * count)
    batch = batch_of(images_of(len(rows) + 1, size=size)[1:])
    return replace(batch, samples=rows // count, views=first + rows % count)


def make_batch(samples: int, local: int = 3, invalid: int | None = None) -> Batch:
    batch = views_of(samples, 2, (21, 28))
    if invalid is not None:
        batch.valid[2 * invalid : 2 * invalid + 2] = False
    return replace(batch, local=views_of(samples, local, (14, 7), first=2)) if local else batch


def make_objective(variant: str = "ViT-Pico/7", **settings: Any) -> DinoObjective:
    return DinoObjective(small_network(variant), Dino(**{**SMALL, **settings}))


def outputs_of(head: DinoHead, embeddings: Tensor) -> Tensor:
    """Return the outputs of a projection, computed in float64."""
    x = embeddings.double()
    for number in (0, 2, 4):
        layer: Any = head.layers[number]
        x = x @ layer.weight.double().T + layer.bias.double()
        x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2))) if number < 4 else x
    weight = head.prototypes.weight.double()
    return (x / x.norm(dim=1, keepdim=True)) @ (weight / weight.norm(dim=1, keepdim=True)).T


@torch.no_grad()
def formula(objective: DinoObjective, batch: Batch, samples: list[int], temperature: float) -> dict[str, float]:
    """Return loss, entropy and divergence as the published code computes them, in float64, one view at a time."""
    centre = objective.centre.value.double()
    crossed, entropies = [], []
    for sample in samples:
        own = [outputs_of(objective.head, objective.network.embed(batch.images[2 * sample : 2 * sample + 2]))]
        if batch.local is not None:
            of_sample = batch.local.images[batch.local.samples == sample]
            own.append(outputs_of(objective.head, objective.network.embed(of_sample)))
        students = torch.cat(own)
        taught = outputs_of(objective.teacher_head, objective.teacher.embed(batch.images[2 * sample : 2 * sample + 2]))
        for number, target in enumerate(taught):
            probabilities = torch.exp((target - centre) / temperature)
            probabilities /= probabilities.sum()
            entropies.append(float(-(probabilities * probabilities.log()).sum()))
            for view, student in enumerate(students):
                if view != number:
                    exponents = torch.exp(student / objective.task.student_temperature)
                    crossed.append(float(-(probabilities * (exponents / exponents.sum()).log()).sum()))
    loss, entropy = sum(crossed) / len(crossed), sum(entropies) / len(entropies)
    return {"loss": loss, "teacher_entropy": entropy, "divergence": loss - entropy}


@pytest.mark.parametrize(("local", "projection"), [(0, 0), (3, 0), (1, 7), (3, 5)])
def test_the_loss_is_the_formula(local: int, projection: int) -> None:
    task = Dino(**SMALL, student_temperature=0.2, target_temperature=0.05, local_views=local)
    objective = DinoObjective(small_network(projection=projection), task)
    objective.centre.value.copy_(torch.linspace(-0.3, 0.3, 24))
    shrink(objective.teacher)
    batch = make_batch(4, local, invalid=1)
    output = objective(batch)
    expected = formula(objective, batch, [0, 2, 3], 0.05)
    found = {"loss": output.loss.item(), **{name: value.item() for name, value in output.metrics.items()}}
    assert found == pytest.approx(expected, rel=2e-5)


def test_views_that_are_not_decoded_change_nothing() -> None:
    objective, batch = make_objective(), make_batch(4, invalid=2)
    other = replace(batch, images=batch.images.clone())
    other.images[4:6] = -other.images[4:6]
    found = []
    for each in (batch, other):
        objective.before_step(Position(0, 10, 5.0))
        found.append((objective(each).loss.item(), objective.centre.sums.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1]) and objective.centre.sums[-1] == 6
    empty = replace(batch, valid=torch.zeros_like(batch.valid))
    objective.before_step(Position(0, 10, 5.0))
    objective(empty).loss.backward()
    objective.after_step(Position(0, 10, 5.0), Processes())
    assert not objective.centre.value.any() and not any(weight.grad.any() for weight in objective.head.parameters())


def stepped(objective: DinoObjective, batches: list[Batch], position: Position) -> None:
    """Take a step by hand with a batch in parts."""
    optimizer = torch.optim.SGD([weight for weight in objective.parameters() if weight.requires_grad], lr=0.1)
    objective.before_step(position)
    for part in batches:
        objective(part).loss.backward()
    optimizer.step()
    objective.after_step(position, Processes())


@pytest.mark.parametrize("is_divided", [False, True])
def test_the_teacher_and_the_centre_are_running_means(is_divided: bool) -> None:
    objective, batch = make_objective(teacher_momentum=0.9, centre_momentum=0.8), make_batch(4)
    objective.centre.value.copy_(torch.linspace(0, 1, 24))
    names = {name for name, weight in objective.named_parameters() if weight.requires_grad}
    assert all(name.startswith(("network.", "head.")) for name in names)
    before = {name: tensor.clone() for name, tensor in objective.state_dict().items()}
    with torch.no_grad():
        taught = objective.teacher_head(objective.teacher.embed(batch.images))
    stepped(objective, batch.chunks(3) if is_divided else [batch], Position(step=3, steps=12, epoch=1.0))
    momentum = 1 - 0.1 * (1 + math.cos(math.pi / 4)) / 2
    after = objective.state_dict()
    for name in names:
        assert not torch.equal(before[name], after[name]), f"{name} is trained"
        mean = name.replace("network.", "teacher.") if name.startswith("network.") else f"teacher_{name}"
        torch.testing.assert_close(after[mean], momentum * before[mean] + (1 - momentum) * after[name])
    torch.testing.assert_close(after["centre.value"], 0.8 * before["centre.value"] + 0.2 * taught.mean(dim=0))
    assert momentum_at(Position(0, 12, 0.0), 0.9) == pytest.approx(0.9)
    assert momentum_at(Position(12, 12, 0.0), 0.9) == 1


def test_prototypes_are_frozen_in_the_first_epoch() -> None:
    objective = make_objective(unit_prototypes=False)
    weights = list(objective.head.prototypes.parameters())
    for epoch, expected in ((0.0, weights), (0.99, weights), (1.0, [])):
        found = objective.frozen(Position(0, 10, epoch))
        assert len(weights) == 2 and [id(weight) for weight in found] == [id(weight) for weight in expected]


def test_the_temperature_of_the_teacher_warms_up() -> None:
    """DINO and iBOT have np.linspace(start, end, epochs), one number for each epoch; DINOv2 one for each step."""
    fields: dict[str, Any] = {"target_temperature_start": 0.04, "target_temperature": 0.07}
    for by, length in (("epoch", 30), ("step", 30 * 8)):
        task = Dino(target_temperature_epochs=30.0, target_temperature_by=by, **fields)
        expected = [*np.linspace(0.04, 0.07, length), *[0.07] * length]
        steps = range(0, 60 * 8, 3)
        found = [task.target_temperatures(Position(step, 480, step / 8))[0] for step in steps]
        assert found == pytest.approx([expected[step if by == "step" else step // 8] for step in steps], rel=1e-12)
    assert Dino().target_temperatures(Position(0, 9, 0.0)) == (0.04, 0.04)
    assert Dino(target_temperature_epochs=1.0, **fields).target_temperatures(Position(0, 9, 0.0))[0] == 0.04
    objective, batch = make_objective(target_temperature_start=0.5, target_temperature_epochs=3.0), make_batch(2)
    objective.before_step(Position(0, 10, 1.4))
    assert objective(batch).loss.item() == pytest.approx(formula(objective, batch, [0, 1], 0.27)["loss"], rel=2e-5)


def test_the_teacher_stays_in_evaluation_mode_and_is_what_is_saved() -> None:
    objective = make_objective().train()
    assert objective.network.training and not objective.teacher.training and not objective.teacher_head.training
    assert objective.saved_network() is objective.teacher
    assert not any(weight.requires_grad for weight in objective.teacher.parameters())
    assert {"centre.value"} <= objective.state_dict().keys() and "centre.sums" not in objective.state_dict()


def test_metrics_of_held_out_images_are_the_formulas() -> None:
    objective = make_objective(target_temperature=0.07, target_temperature_start=0.04).eval()
    shrink(objective.teacher)
    found, views, images = measured(objective)
    with torch.no_grad():
        whole = objective.teacher.embed(images)
    expected = formula(objective, replace(make_batch(7, 0), images=views), list(range(7)), 0.07)
    expected["dino_loss"] = expected.pop("loss")
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert found["uniformity"] == pytest.approx(uniformity(whole), rel=1e-3)
    assert found["feature_rank"] == pytest.approx(effective_rank(whole), rel=1e-3)


def test_sizes_follow_the_network_unless_they_are_given() -> None:
    wide, narrow = (variant_config(name, image_size=224) for name in ("ViT-S/16", "ViT-Pico/16"))
    with torch.device("meta"):
        for network, hidden, outputs in ((wide, 2048, 65_536), (narrow, 512, 4_096)):
            head = Dino().head(network)
            assert (head.hidden, head.prototypes.out_features, head.prototypes.in_features) == (hidden, outputs, 256)
    assert Dino().size_of_local((224, 192)) == (112, 96)
    local = Dino(local_size=(96, 80)).local_views_of(Preprocess(image_size=(224, 192)), Augment(), 3)
    assert (local.count, local.preprocess.image_size) == (8, (96, 80))
    assert Dino(local_views=0).local_views_of(Preprocess(image_size=(224, 192)), Augment(), 3) is None


def test_settings_of_a_run_that_do_not_fit_are_refused() -> None:
    given: tuple[tuple[dict[str, Any], str], ...] = (
        ({"flip": False}, "task='dino' compares 2 views of each image, which are all equal without augmentation"),
        ({"average": 0.9}, "average=0.9 keeps a running mean of the weights, but the model that task='dino' saves is"),
        ({"crop_from": (256, 256)}, r"crop_from=\(256, 256\) cuts boxes of the network's image size, but the local"),
    )
    for fields, message in given:
        with pytest.raises(ConfigError, match=message):
            TrainConfig().override(task="dino", **fields)


def test_all_matrices_and_tokens_decay_in_the_published_recipe() -> None:
    """The rule of `get_params_groups` in facebookresearch/dino: biases and tensors with one axis do not decay."""
    objective = make_objective(unit_prototypes=False)
    config = RECIPES["vit-s16-i1k-dino-300"]().optimizer
    groups = make_optimizer(objective, config).param_groups
    decays = {id(weight): group["weight_decay"] for group in groups for weight in group["params"]}
    for name, weight in objective.named_parameters():
        if weight.requires_grad:
            assert (decays[id(weight)] == 0.04) is (weight.ndim > 1 and not name.endswith(".bias")), name


MASKED: dict[str, Any] = {"patch_weight": 0.7, "mask_probability": 0.6, "mask_fraction": (0.2, 0.6)}


@torch.no_grad()
def masked_formula(objective: DinoObjective, batch: Batch, rows: list[int], temperatures: tuple[float, float]) -> float:
    """Return the loss of masked patches in float64, one patch at a time. Its targets have the centre of earlier steps,
    or all masked patches of the batch are divided by Sinkhorn-Knopp."""
    task, masks = objective.task, draw_masks(objective.task, batch, (3, 4), seed=objective.seed)
    head, teacher = objective.head, objective.teacher_head
    if task.separate_patch_head:
        head, teacher = objective.patch_head, objective.teacher_patch_head
    taught, own = [], []
    for row in rows:
        image, places = batch.images[row : row + 1], masks[row].nonzero()[0]

        def replace_masked(embeddings: Tensor, places: Any = places) -> Tensor:
            changed = embeddings.clone()
            changed[:, places] = objective.mask_embedding
            return changed

        taught.append(outputs_of(teacher, objective.teacher.features(image).patches[0, places]))
        encoded = objective.network.encode(image, replace=replace_masked).patches[0, places]
        own.append((outputs_of(head, encoded) / task.student_temperature).log_softmax(dim=1))
    every = torch.cat(taught)
    if task.centring == "sinkhorn":
        targets = torch.exp(every / temperatures[1])
        for _ in range(3):
            targets = targets / targets.sum(dim=0)
            targets = targets / targets.sum(dim=1, keepdim=True)
    else:
        targets = ((every - objective.patch_centre.value.double()) / temperatures[1]).softmax(dim=1)
    losses = [-(part * log).sum(dim=1) for part, log in zip(targets.split([len(log) for log in own]), own, strict=True)]
    return sum(float(loss.mean()) for loss in losses if len(loss)) / len(rows)


@pytest.mark.parametrize(
    "fields",
    [
        {"patch_temperature": 0.07, "patch_temperature_start": 0.03},
        {"centring": "masked-mean"},
        {"centring": "sinkhorn", "separate_patch_head": True, "patch_bottleneck": 10},
    ],
    ids=str,
)
def test_the_loss_of_masked_patches_is_the_formula(fields: dict[str, Any]) -> None:
    task = {"target_temperature": 0.05, "target_temperature_start": 0.05, "local_views": 0, **MASKED, **fields}
    objective, batch = make_objective(**task), make_batch(5, 0, invalid=1)
    torch.nn.init.normal_(objective.mask_embedding, generator=torch.Generator().manual_seed(0))
    shrink(objective.teacher)
    objective.patch_centre.value.copy_(torch.linspace(-0.3, 0.3, 24))
    objective.before_step(Position(0, 10, 5.0))
    output, rows = objective(batch), [0, 1, 4, 5, 6, 7, 8, 9]
    expected = masked_formula(objective, batch, rows, (0.05, fields.get("patch_temperature", 0.05)))
    assert output.metrics["patch_loss"].item() == pytest.approx(expected, rel=2e-5)
    views = output.loss - 0.7 * output.metrics["patch_loss"]
    assert views.item() == pytest.approx(sum(output.metrics[name].item() for name in ("teacher_entropy", "divergence")))
    output.loss.backward()
    assert objective.mask_embedding.grad.any()
    before = objective.patch_centre.value.clone()
    objective.after_step(Position(0, 10, 5.0), Processes())
    tokens = objective.teacher.features(batch.images).patches
    if not fields.get("separate_patch_head"):
        masks = torch.from_numpy(draw_masks(objective.task, batch, (3, 4), seed=0))
        masks = torch.ones_like(masks) if "centring" not in fields else masks
        masks[2:4] = False
        # the teacher has followed its student by 0.4 %
        taught = objective.teacher_head(tokens)[masks].mean(dim=0)
        torch.testing.assert_close(objective.patch_centre.value, 0.9 * before + 0.1 * taught, atol=1e-3, rtol=0)


def test_masks_have_the_sizes_of_the_published_samplers() -> None:
    """The published samplers were run. iBOT's (bytedance/ibot, da316d8) drew masks for 8,000 views of 196 patches, and
    50.6 % of the views had none. The others had 57.3 masked patches on average (standard deviation 23.1). DINOv2's
    (facebookresearch/dinov2, b8931f7) drew masks for 26 of 256 patches, and 94 % of them had exactly 26."""
    batch = batch_of(torch.zeros(3000, 1, 1, 1))
    found = draw_masks(Dino(smallest_block=16), batch, (14, 14), seed=3).sum(axis=1)
    assert (found == 0).mean() == pytest.approx(0.5, abs=0.03) and found.max() <= 98
    assert (found[found > 0].mean(), found.std()) == (pytest.approx(57.3, abs=2), pytest.approx(32.9, abs=1.5))
    of_one_size = Dino(mask_probability=1.0, mask_fraction=(26.5 / 256, 26.5 / 256))
    found = draw_masks(of_one_size, batch, (16, 16), seed=3).sum(axis=1)
    assert found.mean() == pytest.approx(0.9977 * 26, rel=0.003)
    assert (found == 26).mean() == pytest.approx(0.94, abs=0.02)


def test_ranges_that_fall_are_refused() -> None:
    for name in ("mask_fraction", "local_crop_area"):
        with pytest.raises(ConfigError, match=name):
            Dino(**{name: (0.5, 0.1)})
