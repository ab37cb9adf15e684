"""Tests of runs that start from a model: their initial weights, frozen weights, and resuming without the model's
file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.make import make_bundle
from tests.training.jobs import AtStep, Initial, Make, Outcome, crash, train_until
from vitrail.errors import ConfigError, RunError
from vitrail.tasks.classification import Classification
from vitrail.tasks.detection import Detection
from vitrail.training.config import StartConfig
from vitrail.training.job import prepare
from vitrail.training.log import Log
from vitrail.training.run import resume, train
from vitrail.training.start import Origin, choose_weights, fitted, network_from
from vitrail.training.state import make_bundle as make_bundle_of
from vitrail.training.state import make_network, make_state
from vitrail.weights.load import load

COLOURS = ("blue", "green", "red")


def test_a_run_says_if_its_model_learned_from_the_validation_images(
    initial: Initial, from_model: Make, colour_folder: Path
) -> None:
    config = from_model(initial(classes=COLOURS), colour_folder, validation_share=0.5)
    known = {"data": str(colour_folder), "cut_method": "stratified", "validation_share": 0.25}
    model = replace(load(config.start.init, device="cpu"), provenance=known)
    job = prepare(config, model=model)
    assert any("9 of the 18" in note and note.startswith(str(config.start.init)) for note in job.splits.notes)
    assert not any(
        "have trained" in note for note in prepare(config.override(validation_share=0.25), model=model).splits.notes
    )
    network, job, _ = make_network(job, model)
    assert job.origin is not None and job.origin == Origin.from_plain(job.origin.to_plain())
    assert make_bundle_of(job, make_state(job, network).objective).provenance["initial"] == known


@pytest.mark.parametrize(
    ("classes", "names", "fields", "kept", "note"),
    [
        (COLOURS, COLOURS, {}, True, "is kept, because its outputs are the same"),
        (COLOURS, COLOURS, {"new_head": True}, False, "the new head has 3 classes; its weights start at zero"),
        (COLOURS, COLOURS, {"linear_head": True}, True, "kept unless a linear model"),
        (("0", "1", "2"), ("0", "1", "2"), {}, False, "because the classes have numbers instead of names"),
        (("1", "2", "3"), ("1", "2", "3"), {}, True, "is kept, because its outputs are the same"),
        (("blue", "red", "green"), COLOURS, {}, False, "the new head has 3 classes"),
    ],
)
def test_a_head_is_kept_for_named_classes_alone(
    initial: Initial, classes: tuple[str, ...], names: tuple[str, ...], fields: dict[str, bool], kept: bool, note: str
) -> None:
    bundle = load(initial(classes=classes), device="cpu")
    start = StartConfig(init="given", **fields)
    network, found, notes = network_from(bundle, start, bundle.preprocess, {}, Classification(), names)
    assert found == kept and note in notes[-1]
    assert bool(network.state_dict()["head.weight"].any()) == kept


@pytest.mark.parametrize("classes", [COLOURS, ()])
def test_only_a_head_that_there_was_is_said_to_be_removed(initial: Initial, classes: tuple[str, ...]) -> None:
    bundle = load(initial(classes=classes), device="cpu")
    _, _, notes = network_from(bundle, StartConfig(init="given"), bundle.preprocess, {}, Classification(), ())
    assert any("is removed" in note for note in notes) == bool(classes)


def test_other_pixels_than_those_of_the_model_are_noted(initial: Initial) -> None:
    bundle = load(initial(classes=COLOURS), device="cpu")
    for mean, is_noted in ((bundle.preprocess.mean * 3, False), ((0.4, 0.4, 0.5), True)):
        images = replace(bundle.preprocess, mean=mean)
        _, _, notes = network_from(bundle, StartConfig(init="given"), images, {}, Classification(), COLOURS)
        assert any("mean=" in note for note in notes) == is_noted


@pytest.mark.parametrize("fields", [{}, {"pool": "gap"}], ids=str)
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_another_pooling_keeps_the_tokens_of_the_model(initial: Initial, fields: dict[str, Any], pool: str) -> None:
    bundle, overrides = load(initial(**fields), device="cpu"), {"pool": pool}
    if fields and pool == "cls":  # there is no token to read
        with pytest.raises(ConfigError, match="pool='cls' needs a class token"):
            fitted(bundle.network.config, "given", bundle.preprocess, overrides, 3, Classification())
        return
    network, _, _ = network_from(
        bundle, StartConfig(init="given"), bundle.preprocess, overrides, Classification(), COLOURS
    )
    assert network.config == fitted(bundle.network.config, "given", bundle.preprocess, overrides, 3, Classification())
    assert network.config.has_class_token == (not fields) and network.config.pool == pool
    images = torch.rand(2, 3, *network.config.image_size)
    features = bundle.network.features(images)
    expected = features.cls if pool == "cls" else features.patches.mean(1)
    torch.testing.assert_close(network.embed(images), expected)


@pytest.mark.parametrize(
    ("fields", "overrides"),
    [
        ({}, {}),
        ({"registers": 2, "positions_cover": "patches"}, {"registers": 5}),
        ({"positions": "sincos-2d", "width": 16}, {}),
        ({}, {"positions_at": "every-layer", "registers": 3}),
    ],
)
def test_detection_tokens_are_drawn_beside_the_weights_of_a_model(
    initial: Initial, fields: dict[str, Any], overrides: dict[str, Any]
) -> None:
    bundle = load(initial(**fields), device="cpu")
    old = bundle.network.config
    overrides = {"head_kind": "detection-tokens", **overrides}
    start = StartConfig(init="given")
    network, kept, _ = network_from(bundle, start, bundle.preprocess, overrides, Detection(), COLOURS)
    config = network.config
    assert not kept and config.registers == overrides.get("registers", 100)
    expected = fitted(old, "given", bundle.preprocess, overrides, 3, Detection())
    assert config == expected and network.head is not None
    before, begun = bundle.network.state_dict(), network.state_dict()
    for name, tensor in before.items():
        if not name.startswith(("head", "positions", "prefix.registers", "prefix.cls")):
            assert torch.equal(begun[name], tensor), name
    drawn = [begun["prefix.registers"][:, old.registers :]]
    if config.positions == "learned":
        positions, patches = begun["positions.embedding"], before["positions.embedding"][:, old.covered :]
        assert torch.equal(positions[:1, -patches.shape[1] :], patches)
        assert positions.shape == (config.depth if "positions_at" in overrides else 1, config.tokens, config.width)
        drawn += [positions[:, old.prefix : config.prefix], positions[1:]]
    values = torch.cat([one.flatten() for one in drawn])
    assert 0.015 < float(values.std()) < 0.025


def test_a_detector_keeps_what_does_not_depend_on_its_classes() -> None:
    bundle = make_bundle(head_kind="detection-tokens", registers=3, output="boxes")
    arguments = bundle.preprocess, {}, Detection(), COLOURS
    network, kept, notes = network_from(bundle, StartConfig(init="given"), *arguments)
    before, begun = bundle.network.state_dict(), network.state_dict()
    assert not kept and "do not depend on the classes" in notes[-1]
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, begun[name])}
    assert changed == {"head.classes.layers.2.weight", "head.classes.layers.2.bias"}
    anew, *_ = network_from(bundle, StartConfig(init="given", new_head=True), *arguments)
    assert not torch.equal(anew.state_dict()["head.boxes.layers.0.weight"], before["head.boxes.layers.0.weight"])


@pytest.mark.parametrize("choice", [{"train_blocks": 0}, {"lora_rank": 1}])
def test_detection_tokens_are_trained_with_the_head(choice: dict[str, Any]) -> None:
    network: Any = make_bundle(head_kind="detection-tokens", registers=3, output="boxes").network
    choose_weights(network, StartConfig(init="given", **choice))
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert "prefix.registers" in trained and "prefix.cls" not in trained
    network(torch.zeros(1, 3, 12, 10)).sum().backward()
    assert network.prefix.registers.grad.any()


def test_fewer_tokens_than_those_of_a_model_are_refused(initial: Initial) -> None:
    bundle = load(initial(registers=4), device="cpu")
    overrides = {"head_kind": "detection-tokens", "registers": 3}
    with pytest.raises(ConfigError, match="registers=3 is less than the 4 of the model"):
        fitted(bundle.network.config, "given", bundle.preprocess, overrides, 3, Detection())


@pytest.mark.slow
def test_a_loaded_model_is_not_changed(initial: Initial, from_model: Make, colour_folder: Path) -> None:
    bundle = load(initial(), device="cpu")
    before = {name: tensor.clone() for name, tensor in bundle.network.state_dict().items()}
    plain = replace(bundle)
    result = train(from_model(initial(), colour_folder), initial=bundle)
    assert bundle == plain and bundle.network is plain.network
    for name, tensor in bundle.network.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert name.startswith("head") or not torch.equal(tensor, result.bundle.network.state_dict()[name])


def test_a_loaded_model_needs_its_name(initial: Initial, tiny: Make) -> None:
    with pytest.raises(ConfigError, match=r"^initial: a model was passed, but config\.start\.init does not say"):
        train(tiny(), initial=load(initial(), device="cpu"))


def test_an_initial_model_is_a_bundle(
    initial: Initial, from_model: Make, colour_folder: Path, types_unchecked: None
) -> None:
    wrong: Any
    for wrong in (str(initial()), load(initial(), device="cpu").network):
        with pytest.raises(ConfigError, match=r"(?s)^initial=.* is not "):
            train(from_model(initial(), colour_folder), initial=wrong)


def test_a_changed_network_is_no_initial_model(initial: Initial, from_model: Make, colour_folder: Path) -> None:
    bundle = load(initial(), device="cpu")
    bundle.network.blocks[0].register_forward_hook(lambda module, given, found: -found)
    with pytest.raises(ConfigError, match=r"^init=.* network of the initial model was changed"):
        train(from_model(initial(), colour_folder), initial=bundle)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": 1}, "channels=1 does not fit model '{model}', which takes 3; choose channels=3"),
        ({"image_size": (20, 28)}, "image_size=(20, 28) is not a multiple of patch_size=(7, 7)"),
        ({"patience": 2, "evaluations": 0, "keep": "last"}, "patience=2 needs a validation split and evaluations"),
    ],
)
def test_what_does_not_fit_the_model_leaves_nothing_behind(
    fields: dict[str, Any], message: str, initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(from_model(initial(), colour_folder, **fields))
    assert str(caught.value).startswith(message.format(model=initial())) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resnet_has_units_but_no_adapters_and_no_dropout(
    initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path
) -> None:
    model = initial("BiT-R26x1", width=32)
    fields = {"image_size": (32, 48), "steps": 2, "evaluations": 1}
    with pytest.raises(ConfigError, match=r"^dropout=0\.1 is a setting of transformers, but model '.*' is a ResNet$"):
        train(from_model(model, colour_folder, dropout=0.1, **fields))
    with pytest.raises(ConfigError, match=r"^lora_rank=2: LoRA adapts a transformer's blocks, but a ResNet"):
        train(from_model(model, colour_folder, lora_rank=2, **fields))
    with pytest.raises(ConfigError, match=r"^train_blocks=9 is more than the 8 blocks of the model$"):
        train(from_model(model, colour_folder, train_blocks=9, **fields))
    assert not (tmp_path / "run").exists()
    before = load(model).network.state_dict()
    after = train(from_model(model, colour_folder, train_blocks=1, layer_decay=0.5, **fields)).bundle.network
    changed = {name for name, tensor in after.state_dict().items() if not torch.equal(tensor, before[name])}
    last = {name for name in before if name.startswith(("stages.3.1.", "norm.", "head."))}
    assert changed <= last and {"stages.3.1.conv3.weight", "norm.weight", "head.weight"} <= changed


MIXED: dict[str, dict[str, Any]] = {
    "frozen": {"train_blocks": 1, "layer_decay": 0.7, "dropout": 0.2, "stochastic_depth": 0.4},
    "head alone": {"train_blocks": 0, "optimizer": "sgd", "class_weights": "balanced"},
    "adapters, averaged": {"lora_rank": 2, "lora_on": ("value", "down"), "average": 0.9, "dropout": 0.1},
    "all, averaged": {"average": 0.99, "layer_decay": 0.8, "keep": "last", "patch_dropout": 0.4},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXED)
def test_stopping_changes_no_bit_and_the_model_need_not_stay(
    kind: str, initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path,
    outcome: Outcome,
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(initial(), model)
    train(from_model(model, colour_folder, run=str(tmp_path / "straight"), **MIXED[kind]))
    train_until(from_model(model, colour_folder, **MIXED[kind]), 7)
    shutil.rmtree(model)
    torch.manual_seed(99)
    resume(tmp_path / "run")
    found, expected = outcome(tmp_path / "run"), outcome(tmp_path / "straight")
    assert any("average" in name for name in found["tensors"]) == ("average" in MIXED[kind])
    for part in expected:
        assert found[part] == expected[part], f"{part} differs"


@pytest.mark.slow
def test_before_the_first_checkpoint_the_model_is_needed_again(
    initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(initial(), model)
    straight = train(from_model(model, colour_folder, run=str(tmp_path / "straight"), lora_rank=2))
    with pytest.raises(MemoryError):
        train(from_model(model, colour_folder, lora_rank=2), log=Log(AtStep(2, crash)))
    begins = f"run {run} ended before its first checkpoint, so it starts from model '{model}' again, "
    hidden = model.rename(tmp_path / "hidden")
    with pytest.raises(RunError) as caught:
        resume(run)
    assert str(caught.value).startswith(f"{begins}which cannot be loaded: model '{model}' does not exist")
    shutil.copytree(initial(classes=COLOURS), model)
    with pytest.raises(RunError) as caught:
        resume(run)
    assert str(caught.value) == f"{begins}whose weights have changed since the run started"
    shutil.rmtree(model)
    hidden.rename(model)
    again = resume(run).bundle.network.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.bundle.network.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"average": 0.5}], ids=str)
def test_adapters_are_merged_into_what_is_saved(
    fields: dict[str, Any], initial: Initial, from_model: Make, colour_folder: Path
) -> None:
    config = from_model(initial(), colour_folder, lora_rank=2, lora_on=("query", "value", "up"), keep="last", **fields)
    result = train(config)
    before, after = load(initial()).network.state_dict(), load(result.folder).network.state_dict()
    assert after.keys() == before.keys()
    inside = [name for name in before if not name.startswith("head")]
    changed = {name for name in inside if not torch.equal(after[name], before[name])}
    assert changed == {f"blocks.{n}.{part}.weight" for n in range(3) for part in ("attention.qkv", "mlp.up")}
    for name in changed:
        if name.endswith("qkv.weight"):
            assert torch.equal(after[name][16:32], before[name][16:32]), "keys stay"
