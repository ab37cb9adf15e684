"""The loss of queries equals that of EoMT in transformers on the same outputs and the same random points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import vitrail
from tests.tasks.test_segmentation import SIZE, batch_of
from vitrail.data.objects import IGNORED
from vitrail.models.heads.queries import CELLS
from vitrail.tasks.mask_loss import QueryObjective, masking_chances, query_losses
from vitrail.tasks.segmentation import Segmentation
from vitrail.tasks.set_loss import token_amounts

CLASSES, QUERIES, GRID = 4, 6, (3, 5)


def outputs_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(QUERIES, CLASSES + 1 + CELLS**2 * 15, generator=generator) * 3


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_those_of_transformers(seed: int) -> None:
    module = pytest.importorskip("transformers.models.eomt.modeling_eomt")
    config = pytest.importorskip("transformers").EomtConfig(num_labels=CLASSES, num_blocks=1)
    weights = {"loss_cross_entropy": 2.0, "loss_mask": 5.0, "loss_dice": 5.0}
    criterion = module.EomtLoss(config, weights)
    outputs = outputs_of(seed)
    truth = torch.randint(0, CLASSES - 1, (24, 40), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    labels = truth.unique().long()
    masks = torch.stack([truth == label for label in labels]).float()
    torch.manual_seed(seed)
    expected = criterion(
        masks_queries_logits=outputs[None, :, CLASSES + 1 :].unflatten(2, (CELLS * 3, CELLS * 5)),
        class_queries_logits=outputs[None, :, : CLASSES + 1], mask_labels=[masks], class_labels=[labels],
    )  # fmt: skip
    torch.manual_seed(seed)
    found = torch.stack(query_losses(outputs, truth, GRID)) / token_amounts(torch.tensor([len(labels)]), QUERIES)[0]
    total = [weights["loss_cross_entropy"] * expected["loss_cross_entropy"]]
    total.append(5.0 * (expected["loss_mask"] + expected["loss_dice"]))
    torch.testing.assert_close(found, torch.stack(total), rtol=1e-5, atol=1e-5)


def test_pixels_without_a_class_do_not_count() -> None:
    outputs, truth = outputs_of(0), torch.zeros(24, 40, dtype=torch.uint8)
    truth[:, 20:] = 1
    truth[12:] = IGNORED
    changed = outputs.clone()
    changed[:, CLASSES + 1 :].unflatten(1, (12, 20))[:, 7:] += 20  # beyond the cells between known pixels

    def losses(values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return query_losses(values, truth, GRID).masks

    assert losses(changed).item() == pytest.approx(losses(outputs).item(), rel=0.1)
    truth[12:] = 0
    assert losses(changed).item() != pytest.approx(losses(outputs).item(), rel=0.1)
    nothing = query_losses(outputs, torch.full_like(truth, IGNORED), GRID)
    assert nothing.masks == 0 and nothing.classes > 0


def test_all_outputs_of_a_batch_are_learned() -> None:
    torch.manual_seed(0)
    network: Any = vitrail.create(
        "ViT-Pico/8", num_classes=3, image_size=SIZE, head_kind="queries", depth=3, queries=QUERIES, query_blocks=2
    )
    objective = QueryObjective(network, Segmentation())
    batch = batch_of(4)
    batch = replace(batch, images=batch.images.float())
    counted = objective.counted(batch)
    assert counted.tolist() == [[QUERIES, 0], [0, 0], [QUERIES + 9 * 3, 3], [QUERIES + 9 * 3, 3]]
    output = objective(batch)
    assert output.loss.shape == (2,) and output.loss.isfinite().all()
    output.loss.sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_masked_attention_ends_block_by_block() -> None:
    assert masking_chances(0.0, 3) == masking_chances(2 / 12, 3) == (1, 1, 1)
    assert masking_chances(1.0, 3) == (0, 0, 0) and masking_chances(4 / 12, 3) == (0, 1, 1)
    assert masking_chances(6 / 12, 3) == pytest.approx((0, 0.5**0.9, 1))
