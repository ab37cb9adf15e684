"""Tests of what SimCLR and MoCo v3 share: dense layers with batch norms, and losses that equal the published code's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tasks.images import batch_of, images_of
from tests.tasks.objectives import small_network
from vitrail.processes.group import Processes
from vitrail.tasks.contrast import ContrastObjective, Head, MoCo, MoCoObjective, SimClr, SimClrObjective
from vitrail.tasks.task import Position


def wave(*shape: int, step: float) -> Tensor:
    """Return the sines of the multiples of a number, in float64."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) * step).sin().reshape(shape)


def plain_head(head: Head) -> nn.Sequential:
    """Return the same layers with PyTorch's batch norms."""
    layers: list[Any] = []
    for layer in head:
        if not isinstance(layer, nn.Linear | nn.ReLU):
            own: Any = layer
            layer = nn.BatchNorm1d(layers[-1].out_features, dtype=torch.float64)
            layer.weight, layer.bias = own.weight, own.bias
        layers.append(layer)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("scales_last", [True, False])
def test_a_head_is_that_of_pytorch_on_the_counted_rows(scales_last: bool) -> None:
    torch.manual_seed(0)
    head = Head(5, 7, 3, scales_last=scales_last).double()
    names = ["0.weight", "1.weight", "1.bias", "3.weight", *["4.weight"][: int(scales_last)]]
    assert [name for name, _ in head.named_parameters()] == names
    for weight in head.parameters():
        weight.data.normal_()
    rows = (3 * torch.randn(9, 5, dtype=torch.float64) + 2).requires_grad_()
    counted = torch.tensor([True, False, True, True, True, False, True, True, True])
    results = [head(rows, counted, Processes())[counted], plain_head(head)(rows[counted])]
    ours, theirs = (
        [result, *torch.autograd.grad(result.sin().sum(), [rows, *head.parameters()])] for result in results
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert torch.equal(head(rows[:1], counted[:1], Processes()), torch.zeros(1, 3).double()), "a row alone is its mean"


def official(name: str) -> tuple[ContrastObjective, list[tuple[nn.Module, float]]]:
    """Return an objective with heads of small sizes, and each head with the step of its weights' waves."""
    network: Any = small_network(width=5, heads=1)
    if name == "simclr":
        objective: Any = SimClrObjective(network, SimClr(projection_width=4, contrast_temperature=0.5))
        return objective, [(objective.projection, 0.0)]
    objective = MoCoObjective(network, MoCo(projection_width=4, projection_hidden=6))
    return objective, [(objective.projection, 0.7), (objective.predictor, 0.5), (objective.teacher_projection, 0.9)]


SIMCLR_STEPS = (0.7, 2.0, 0.3, 0.9, 3.0, 0.4, 1.1, 0.5)


@pytest.mark.parametrize(
    ("name", "loss", "lengths"),
    [
        ("simclr", 2.9138841115290353, (6.447195009863639, 2.07550542389804)),
        ("moco", 2.3276925112623754, (9.412197481736863, 3.270708501408972, 8.135315674293377)),
    ],
)
def test_the_loss_of_embeddings_is_that_of_the_published_code(
    name: str, loss: float, lengths: tuple[float, ...]
) -> None:
    """Computed in float64 by `projection_head` and `add_contrastive_loss` of google-research/simclr, commit 383d414
    (each TensorFlow operation by its equivalent in PyTorch), and by `MoCo_ViT` of facebookresearch/moco-v3, commit
    c349e6e. The lengths are those of the gradients of the embeddings and of the first weight of each head."""
    objective, heads = official(name)
    objective.double()
    for head, step in heads:
        for number, weight in enumerate(head.parameters()):
            if name == "simclr":
                values = wave(*weight.shape, step=SIMCLR_STEPS[number])
                weight.data = values.cos() if number % 3 == 1 else values
            else:
                weight.data = wave(*weight.shape, step=step + 0.1 * number) + float(number % 3 == 1)
    objective.after_step(Position(step=-1, steps=10, epoch=0.0), Processes())  # the published code does this first
    embeddings = wave(12, 5, step=1.3).requires_grad_()
    features = {"embeddings": embeddings, "targets": embeddings.detach()}
    output = objective.compare(features, torch.ones(12, dtype=torch.bool), Processes())
    assert output.loss.item() == pytest.approx(loss, rel=1e-9)
    trained = [next(head.parameters()) for head, _ in heads[:2]]
    gradients = torch.autograd.grad(output.loss, [embeddings, *trained])
    assert [gradient.norm().item() for gradient in gradients] == pytest.approx(list(lengths), rel=1e-9)


@pytest.mark.parametrize("name", ["simclr", "moco"])
def test_random_weights_tell_images_apart(name: str) -> None:
    """Without batch norms, the vectors of different images had a cosine of 0.5 on average."""
    network: Any = small_network()
    objective: Any = SimClrObjective(network, SimClr()) if name == "simclr" else MoCoObjective(network, MoCo())
    with torch.no_grad():
        embeddings = network.embed(batch_of(images_of(16)).images)
        vectors = objective.projection(embeddings, torch.ones(16, dtype=torch.bool), Processes())
    cosines = torch.nn.functional.normalize(vectors, dim=1)
    assert abs(float((cosines @ cosines.T - torch.eye(16)).sum() / 240)) < 0.08
