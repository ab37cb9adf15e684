"""Tests of masked autoencoders: counts, hidden pixels, the loss against Transformers', gradients, unfit settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.images import batch_of, images_of
from tests.tasks.objectives import check_parts, pixels_of, small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.tasks.mae import Mae, MaeObjective, patch_pixels
from vitrail.tasks.unlabelled import draw_order

SEED = 3


def make_objective(
    task: Mae | None = None, *, size: tuple[int, int] = (21, 28), channels: int = 3, **fields: Any
) -> MaeObjective:
    objective = MaeObjective(small_network(size=size, channels=channels, **fields), task or Mae())
    objective.begin(Preprocess(image_size=size, channels=channels), seed=SEED)
    return objective


def places_of(objective: MaeObjective, count: int, patches: int = 12) -> tuple[Tensor, Tensor]:
    """Return the removed and the visible patches of the images 0 to `count` in epoch 0."""
    order = torch.from_numpy(draw_order(batch_of(torch.zeros(count, 1, 1, 1)), patches, seed=SEED))
    removed = objective.task.hidden_of(patches)
    return order[:, :removed], order[:, removed:]


def test_the_count_of_removed_patches_follows_the_fraction() -> None:
    for patches, fraction, removed in (
        (196, 0.75, 147), (49, 0.75, 37), (64, 0.75, 48), (20, 0.4, 8), (3, 0.5, 2), (196, 0.9, 177), (35, 0.6, 21),
        (49, 0.9, 45),
    ):  # fmt: skip
        assert Mae(remove_fraction=fraction).hidden_of(patches) == removed


def test_the_network_sees_the_visible_patches_alone() -> None:
    objective = make_objective().eval()
    seen: list[torch.Size] = []
    objective.network.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0].shape))
    images = images_of(2)
    objective(batch_of(images))
    assert seen == [(2, 1 + 3, 16)], "a class token, and a quarter of the 12 patches"
    removed, visible = places_of(objective, 2)
    hidden = pixels_of(removed)
    with torch.no_grad():
        one, other = (
            objective.decoder(objective.network.encode(shown, keep=visible), visible, removed)
            for shown in (images, torch.where(hidden, -images, images))
        )
        changed = objective.network.encode(torch.where(hidden, images, -images), keep=visible)
        assert torch.equal(one, other)
        assert not torch.allclose(one, objective.decoder(changed, visible, removed))


@pytest.mark.parametrize("normalise", [True, False])
def test_targets_are_the_pixels_of_patches(normalise: bool) -> None:
    images, places = images_of(2), torch.tensor([[5, 0], [11, 3]])
    found = patch_pixels(images, (7, 7), places, normalise=normalise)
    for image in range(2):
        for number, place in enumerate(places[image].tolist()):
            row, column = divmod(place, 4)
            pixels = images[image, :, 7 * row : 7 * row + 7, 7 * column : 7 * column + 7].flatten()
            if normalise:
                pixels = (pixels - pixels.mean()) / (pixels.var() + 1e-6).sqrt()
            torch.testing.assert_close(found[image, number], pixels)
    constant = patch_pixels(torch.full((1, 3, 7, 7), 0.25), (7, 7), torch.tensor([[0]]), normalise=True)
    assert torch.equal(constant, torch.zeros_like(constant))


def test_the_loss_is_the_mean_of_decoded_images() -> None:
    objective = make_objective()
    images = images_of(3)
    batch = replace(batch_of(images), valid=torch.tensor([True, False, True]))
    removed, visible = places_of(objective, 3)
    predicted = objective.decoder(objective.network.encode(images, keep=visible), visible, removed)
    pixels = patch_pixels(images, (7, 7), removed, normalise=True)
    errors = (predicted - pixels).square().mean(dim=(1, 2))
    assert objective(batch).loss.item() == pytest.approx((errors[0] + errors[2]).item() / 2)


def published(model: Any, ours: MaeObjective) -> dict[str, Tensor]:
    """Return the weights of Transformers' ViTMAEForPreTraining by our names. Its pixels are in the order row, column,
    channel, and ours in the order channel, row, column."""
    theirs, found = model.state_dict(), {}

    def blocks(target: str, source: str, depth: int) -> None:
        names = {
            "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
            "attention.out": "attention.o_proj",
        }  # fmt: skip
        for layer in range(depth):
            for kind in ("weight", "bias"):
                start = f"{source}.{layer}"
                for name, theirs_name in names.items():
                    found[f"{target}.{layer}.{name}.{kind}"] = theirs[f"{start}.{theirs_name}.{kind}"]
                parts = [theirs[f"{start}.attention.{name}_proj.{kind}"] for name in "qkv"]
                found[f"{target}.{layer}.attention.qkv.{kind}"] = torch.cat(parts)

    blocks("network.blocks", "vit.layers", len(ours.network.blocks))
    blocks("decoder.blocks", "decoder.decoder_layers", len(ours.decoder.blocks))
    projection = theirs["vit.embeddings.patch_embeddings.projection.weight"]
    found["network.patches.projection.weight"] = projection.flatten(1)
    found["network.patches.projection.bias"] = theirs["vit.embeddings.patch_embeddings.projection.bias"]
    found["network.prefix.cls"] = theirs["vit.embeddings.cls_token"]
    found["decoder.mask_token"] = theirs["decoder.mask_token"].flatten()
    for kind in ("weight", "bias"):
        found[f"network.norm.{kind}"] = theirs[f"vit.layernorm.{kind}"]
        found[f"decoder.norm.{kind}"] = theirs[f"decoder.decoder_norm.{kind}"]
        found[f"decoder.embedding.{kind}"] = theirs[f"decoder.decoder_embed.{kind}"]
        rows = theirs[f"decoder.decoder_pred.{kind}"]
        found[f"decoder.head.{kind}"] = rows.unflatten(0, (4, 4, 3)).movedim(2, 0).flatten(0, 2)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [True, False])
def test_loss_and_gradients_are_those_of_transformers(normalise: bool) -> None:
    """The same weights, images and removed patches give the same loss, in which Transformers computes all tokens of the
    decoder in the order of the grid."""
    module = pytest.importorskip("transformers.models.vit_mae.modeling_vit_mae")
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    decoder = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 3}
    settings = ViTMAEConfig(
        image_size=24, patch_size=4, layer_norm_eps=1e-6, norm_pix_loss=normalise, mask_ratio=0.75,
        decoder_intermediate_size=96, **sizes, **decoder,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ViTMAEForPreTraining(settings).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        for parameter in (model.vit.embeddings.position_embeddings, model.decoder.decoder_pos_embed):
            table = module.build_2d_sinusoidal_position_embedding(6, 6, parameter.shape[2], cls_token=True)
            halves = table.chunk(2, dim=1)
            parameter.copy_(torch.cat([halves[1], halves[0]], dim=1)[None])  # as in the published weights
    task = Mae(normalise_pixels=normalise, decoder_width=24, decoder_depth=2, decoder_heads=3)
    fields = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 64, "pool": "gap", "class_token": True}
    objective = make_objective(task, size=(24, 24), patch_size=(4, 4), positions="sincos-2d-mae", **fields)
    objective.load_state_dict(published(model, objective))
    images = images_of(3, size=(24, 24))
    removed, visible = places_of(objective, 3, 36)
    noise = torch.empty(3, 36).scatter(1, torch.cat([visible, removed], dim=1), torch.arange(36.0).expand(3, -1))
    expected = model(pixel_values=images, noise=noise).loss
    loss = objective(batch_of(images)).loss
    assert abs(loss - expected) <= 1e-5 * expected
    loss.backward()
    expected.backward()
    for ours, theirs in (
        (objective.network.patches.projection.weight, model.vit.embeddings.patch_embeddings.projection.weight),
        (objective.decoder.mask_token, model.decoder.mask_token),
        (objective.decoder.embedding.weight, model.decoder.decoder_embed.weight),
    ):
        torch.testing.assert_close(ours.grad.flatten(), theirs.grad.flatten(), rtol=1e-3, atol=1e-5)


def test_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    check_parts(make_objective())


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "rotary-2d"}, {"registers": 2, "pool": "gap", "final_norm": "pooled"},
        {"positions": "relative-bias", "pool": "cls+gap"}, {"activation": "swiglu"}, {"positions": "learned-2d"},
    ],
)  # fmt: skip
def test_networks_of_all_kinds_are_trained_at_any_size(fields: dict[str, Any]) -> None:
    objective = make_objective(**fields)
    for size in ((21, 28), (14, 35)):
        objective(batch_of(images_of(2, size=size))).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in objective.decoder.parameters())
    assert objective.network.blocks[0].mlp.up.weight.grad.abs().max() > 0
