"""Tests of distillation: both losses against their formulas, the two heads, the teacher's view, and bad teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import SMALL, small_network
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.cost import prediction_bytes
from vitrail.models.variants import create, variant_config
from vitrail.tasks.distillation import Distillation, DistillationObjective, Teacher, teacher_facts
from vitrail.testing import check_task
from vitrail.weights.bundle import Bundle

CLASSES = ("ant", "bee", "cat")
TOKEN: dict[str, Any] = {"pool": "cls+dist", "registers": 1, "positions_cover": "all"}


DATA = Splits(Pictures(9, CLASSES, range(3)), Pictures(5, CLASSES, range(3)), None)


@pytest.fixture
def teacher(tmp_path: Path) -> Callable[..., str]:
    """Return a function that saves a teacher with random weights, and returns its path."""

    def make(
        classes: tuple[str, ...] = CLASSES, output: Any = "softmax", preprocess: Preprocess | None = None, **fields: Any
    ) -> str:
        preprocess = preprocess or Preprocess(image_size=(21, 28))
        torch.manual_seed(5)
        sizes: dict[str, Any] = {"image_size": preprocess.image_size, "channels": preprocess.channels}
        network = create("ViT-Pico/7", num_classes=len(classes), **SMALL, **sizes, **fields)
        torch.nn.init.normal_(network.head.weight)
        path = tmp_path / f"teacher-{len(list(tmp_path.iterdir()))}"
        return str(Bundle(network, classes, preprocess, output=output).save(path))

    return make


def make_objective(task: Distillation, **fields: Any) -> Any:
    network = small_network(num_classes=3, **fields)
    objective = task.objective(network, DATA)
    assert isinstance(objective, DistillationObjective)
    with torch.no_grad():
        for parameter in (network.head.weight, network.head.bias, *([objective.bias_difference] if fields else [])):
            parameter.normal_()
    objective.begin(Preprocess(image_size=(21, 28)), seed=0)
    return objective


def labelled(count: int) -> Batch:
    batch = batch_of(images_of(count))
    return replace(batch, labels=torch.arange(count) % 3, target_kind="class")


def softmax(row: Tensor) -> Tensor:
    return (row.double() - row.double().max()).exp() / (row.double() - row.double().max()).exp().sum()


@pytest.mark.parametrize("fields", [{}, TOKEN])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"teacher_weight": 0.25, "label_smoothing": 0.1},
        {"teacher_labels": "soft", "teacher_temperature": 2.5, "teacher_weight": 0.9},
        {"teacher_labels": "soft", "teacher_weight": 1.0},
    ],
)
def test_the_loss_is_the_formula(settings: dict[str, Any], fields: dict[str, Any], teacher: Callable[..., str]) -> None:
    task = Distillation(teacher=teacher(), **settings)
    objective = make_objective(task, **fields)
    batch = replace(labelled(4), valid=torch.tensor([True, False, True, True]))
    output = objective(batch)
    with torch.no_grad():
        own, distilled = objective.two_logits(batch.images)
        taught = objective.teacher.network(batch.images)
    losses = []
    for image in (0, 2, 3):
        truth = torch.full((3,), task.label_smoothing / 3, dtype=torch.float64)
        truth[image % 3] += 1 - task.label_smoothing
        label_loss = -(truth * softmax(own[image]).log()).sum()
        if task.teacher_labels == "hard":
            teacher_loss = -softmax(distilled[image]).log()[taught[image].argmax()]
        else:
            one, other = (softmax(row[image] / task.teacher_temperature) for row in (taught, distilled))
            teacher_loss = task.teacher_temperature**2 * (one * (one.log() - other.log())).sum()
        losses.append((1 - task.teacher_weight) * label_loss + task.teacher_weight * teacher_loss)
    assert output.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    same = (distilled.argmax(1) == taught.argmax(1)).float()
    assert output.metrics["teacher_agreement"].item() == pytest.approx(same[[0, 2, 3]].mean().item())


def test_the_network_predicts_the_mean_of_both_heads(teacher: Callable[..., str]) -> None:
    objective = make_objective(Distillation(teacher=teacher()), **TOKEN).eval()
    images, network = images_of(4), objective.network
    features = network.features(images)
    own, distilled = objective.two_logits(images)
    first, second = network.head.weight.chunk(2, dim=1)
    bias, difference = network.head.bias, objective.bias_difference
    torch.testing.assert_close(own, features.cls @ first.T + bias + difference)
    torch.testing.assert_close(distilled, features.registers[:, 0] @ second.T + bias - difference)
    torch.testing.assert_close(network(images), (own + distilled) / 2)
    assert (own - distilled).abs().max() > 0.1


def test_the_teacher_is_not_trained_and_no_part_of_the_objective(teacher: Callable[..., str]) -> None:
    objective = make_objective(Distillation(teacher=teacher(dropout=0.5)), **TOKEN).train()
    before = {name: tensor.clone() for name, tensor in objective.teacher.network.state_dict().items()}
    images = images_of(3)
    assert torch.equal(objective.teacher.logits(images), objective.teacher.logits(images)), "no dropout"
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1)
    objective(labelled(4)).loss.backward()
    optimizer.step()
    for name, tensor in objective.teacher.network.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert not objective.teacher.logits(images).requires_grad
    assert {name for name in objective.state_dict() if not name.startswith("network.")} == {"bias_difference"}


@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess(image_size=(21, 28), mean=(0.4, 0.5, 0.3), std=(0.2, 0.25, 0.3)),
        Preprocess(image_size=(14, 21)),
        Preprocess(image_size=(21, 28), channels=1, mean=(0.3,), std=(0.4,)),
    ],
)
def test_the_teacher_sees_the_view_with_its_own_preprocessing(
    preprocess: Preprocess, teacher: Callable[..., str]
) -> None:
    model = Teacher(teacher(("cat", "ant", "bee"), preprocess=preprocess), CLASSES)
    usual = Preprocess(image_size=(21, 28), mean=(0.45,), std=(0.25,))
    model.begin(usual, torch.device("cpu"))
    levels = torch.randint(0, 256, (3, 3, 21, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    found = model.logits(usual.normalise(levels))
    pixels = levels.double() / 255
    if preprocess.channels == 1:
        pixels = 0.299 * pixels[:, :1] + 0.587 * pixels[:, 1:2] + 0.114 * pixels[:, 2:]
    if preprocess.image_size != (21, 28):
        pixels = F.interpolate(pixels, preprocess.image_size, mode="bilinear", antialias=True)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (preprocess.mean, preprocess.std)
    )
    with torch.no_grad():
        expected = model.network(((pixels - mean) / std).float())
    torch.testing.assert_close(found, expected[:, [1, 2, 0]], atol=1e-4, rtol=1e-4)


def test_grey_views_are_shown_to_a_teacher_of_colours(teacher: Callable[..., str]) -> None:
    model = Teacher(teacher(), CLASSES)
    model.begin(Preprocess(image_size=(21, 28), channels=1), torch.device("cpu"))
    grey = images_of(2, channels=1)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(grey), model.network(grey.expand(-1, 3, -1, -1)))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"teacher_labels": "soft"}])
def test_it_fulfils_the_contract_of_a_task(settings: dict[str, Any], teacher: Callable[..., str]) -> None:
    check_task(Distillation(teacher=teacher(), **settings), DATA)


def test_the_cost_of_a_step_counts_the_teacher(teacher: Callable[..., str]) -> None:
    task = Distillation(teacher=teacher(preprocess=Preprocess(image_size=(14, 21))))
    network = variant_config("ViT-Ti/16")
    cost = task.step_cost(network, "float32")
    facts = teacher_facts(task.teacher or "")
    assert cost.all_flops == network.training_flops() + facts.network.inference_flops((14, 21))
    whole = prediction_bytes(facts.network, 7, (14, 21), "float32")
    assert cost.fixed_bytes + 7 * cost.image_bytes == whole and cost.parameters == 0


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"classes": ("ant", "bee", "dog")}, r"it lacks cat, and it also has dog; choose a teacher"),
        ({"classes": (*CLASSES, "dog")}, r"classes than .*: it also has dog; choose"),
    ],
)
def test_unfit_teachers_are_refused(made: dict[str, Any], message: str, teacher: Callable[..., str]) -> None:
    task = Distillation(teacher=teacher(**made))
    with pytest.raises(ConfigError, match=message):
        task.check_data(DATA)
