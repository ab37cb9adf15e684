"""Tests of the cost of a training step that tasks state, against the profiler and a counter of FLOPs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.tasks.images import Pictures, batch_of, images_of
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.models.cost import tensor_bytes
from vitrail.models.variants import AnyConfig, build, variant_config
from vitrail.tasks.contrast import MoCo, SimClr
from vitrail.tasks.dino import Dino
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.tasks.task import Task
from vitrail.tasks.vqvae import VqVae

Precision = Literal["float32", "bf16"]

NETWORK = variant_config(
    "ViT-Ti/8", image_size=(64, 48), width=96, heads=3, mlp_width=384, depth=2, num_classes=0, registers=1
)
TASKS: dict[str, Task] = {
    "mean-colour": MaskedPatches(),
    "colours": MaskedPatches(patch_target="colours", corrupt_fraction=0.4),
    "pixels": MaskedPatches(patch_target="pixels"),
    "mae": Mae(),
    "simclr": SimClr(projection_hidden=64),
    "moco": MoCo(projection_hidden=160, projection_width=48, fixed_patches=False),
    "dino": Dino(local_views=4, local_size=(32, 24), prototypes=3000, projection_hidden=160),
    "dino, no local views": Dino(local_views=0, prototypes=500, projection_hidden=64, unit_prototypes=False),
    "ibot": Dino(local_views=2, local_size=(32, 24), prototypes=700, projection_hidden=160, patch_weight=1.0),
    "dinov2": Dino(
        local_views=0,
        prototypes=900,
        projection_hidden=100,
        patch_weight=1.0,
        separate_patch_head=True,
        centring="sinkhorn",
        koleo_weight=0.1,
    ),
    "vqvae": VqVae(codes=300, code_width=24),
    "vqvae, other decoder": VqVae(
        codes=1000, code_width=8, restart_below=0.2, decoder_width=64, decoder_depth=1, decoder_heads=4
    ),
    "mae, deep decoder": Mae(remove_fraction=0.6, decoder_width=64, decoder_depth=3, decoder_heads=4),
}


def make(task: Task, network: AnyConfig, count: int) -> tuple[Any, Batch]:
    """Return the objective of a task, and a batch of this many images."""
    torch.manual_seed(0)
    objective = task.objective(build(network), Splits(Pictures(3), None, None))
    objective.begin(Preprocess(image_size=network.image_size), seed=0)
    batch = batch_of(images_of(count, size=network.image_size))
    batch = replace(batch, samples=batch.samples // task.views, views=batch.samples % task.views)
    if (local := task.local_views_of(Preprocess(image_size=network.image_size), Augment(), 0)) is not None:
        rows = count // task.views * local.count
        batch = replace(batch, local=batch_of(images_of(rows, size=local.preprocess.image_size)))
    return objective, batch


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_flops_of_a_step(name: str) -> None:
    objective, batch = make(TASKS[name], NETWORK, 4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(batch).loss.backward()
    assert 4 * TASKS[name].step_cost(NETWORK, "float32").all_flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_flops_of_a_step_with_tokens(tmp_path: Path) -> None:
    """The tokenizer sees images of half the size."""
    encoder = variant_config("ViT-Ti/4", image_size=(32, 24), width=48, heads=3, mlp_width=96, depth=1, num_classes=0)
    objective, _ = make(VqVae(codes=200, code_width=16), encoder, 1)
    folder = objective.task.bundle(objective, (), Preprocess(image_size=(32, 24)), {}).save(tmp_path / "model")
    task = MaskedPatches(patch_target="tokens", tokenizer=str(folder))
    objective, batch = make(task, NETWORK, 4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(batch).loss.backward()
    assert 4 * task.step_cost(NETWORK, "float32").all_flops == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", TASKS)
def test_tensors_of_a_step(name: str, precision: Precision) -> None:
    count = 12
    objective, batch = make(TASKS[name], NETWORK, count)
    optimizer = torch.optim.AdamW(objective.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = objective(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = max(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    weights = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
    held += 12 * weights + 4 * batch.images.numel()
    held += sum(parameter.nbytes for parameter in objective.parameters() if not parameter.requires_grad)
    if batch.local is not None:
        held += 4 * batch.local.images.numel()
    cost = TASKS[name].step_cost(NETWORK, precision)
    assert weights == NETWORK.parameters() + cost.parameters
    stated = tensor_bytes(cost.network, count, precision=precision) + 16 * cost.parameters + cost.fixed_bytes
    stated += count * (cost.image_bytes + cost.batch_bytes)
    assert 0.75 * stated < held < 1.06 * stated, "kernels of some processors keep less"
