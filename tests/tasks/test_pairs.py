"""Tests of the tasks that learn from images with texts: losses, exact batches, runs and refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import vitrail
from tests.make import make_colour_folder
from tests.several import in_processes
from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import small_network
from tests.training import ranks
from tests.words import model_with_words
from vitrail.data.batch import Batch, Rows
from vitrail.data.pipeline import Stage, TrainingBatches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.data.texts import train_tokenizer
from vitrail.errors import ConfigError, DataError
from vitrail.models.text import TextTower
from vitrail.models.variants import ModelConfig
from vitrail.processes.group import Processes
from vitrail.processes.launch import Launch
from vitrail.tasks.pairs import Clip, Embeddings, PairObjective, PairTask, SigLip
from vitrail.tasks.task import Position
from vitrail.training.config import TrainConfig
from vitrail.training.folder import check_place
from vitrail.training.job import prepare
from vitrail.training.log import read_journal
from vitrail.training.run import resume, train
from vitrail.training.state import make_network
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.words import Words

TEXTS = [f"{colour} {shape}" for colour in ("red", "blue", "green") for shape in ("circle", "square", "bar")]


def small_task(kind: type[PairTask], **settings: Any) -> PairTask:
    return kind(**{"text_width": 16, "text_depth": 1, "text_context": 16, **settings})


def make_objective(task: PairTask, **fields: Any) -> PairObjective:
    network = small_network(**fields)
    torch.manual_seed(1)
    tokenizer = train_tokenizer(TEXTS, vocabulary=600, context=16)
    tower = TextTower(task.text_config(network.config.embed_width, tokenizer))
    objective = PairObjective(network, task)
    scale = float(torch.tensor(task.initial_scale).log())
    objective.receive(Words(tower, tokenizer, scale, task.initial_bias))
    return objective


def pairs_batch(count: int, *, without: tuple[int, ...] = ()) -> Batch:
    """Return images with texts. Images `without` have none."""
    tokenizer = train_tokenizer(TEXTS, vocabulary=600, context=16)
    tokens = torch.from_numpy(tokenizer.encode([TEXTS[row % len(TEXTS)] for row in range(count)]).tokens)
    labels = torch.tensor([-1 if row in without else 0 for row in range(count)])
    return replace(batch_of(images_of(count)), texts=tokens, labels=labels, target_kind="texts")


def pairs_of(images: Tensor, texts: Tensor, valid: Tensor | None = None) -> Embeddings:
    valid = torch.ones(len(images), dtype=torch.bool) if valid is None else valid
    return Embeddings(images, texts, images, texts, valid, 0)


@pytest.fixture
def embeddings() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return F.normalize(torch.randn(7, 12), dim=1), F.normalize(torch.randn(7, 12), dim=1)


@pytest.mark.slow
def test_the_softmax_loss_is_that_of_transformers(embeddings: tuple[Tensor, Tensor]) -> None:
    clip = pytest.importorskip("transformers.models.clip.modeling_clip")
    images, texts = embeddings
    scale = torch.tensor(2.5)
    losses = Clip().losses(pairs_of(images, texts), scale, None, Processes())
    expected = clip.image_text_contrastive_loss(scale.exp() * texts @ images.T)
    torch.testing.assert_close(losses.mean(), expected, rtol=1e-5, atol=1e-6)


def test_the_sigmoid_loss_is_that_of_transformers(embeddings: tuple[Tensor, Tensor]) -> None:
    transformers = pytest.importorskip("transformers")
    own = {"hidden_size": 12, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipConfig(
        text_config={**own, "vocab_size": 20, "max_position_embeddings": 4}, vision_config={**own, "image_size": 32}
    )
    torch.manual_seed(0)
    model = transformers.SiglipModel(config).eval()
    tokens, pixels = torch.randint(0, 20, (7, 4)), torch.randn(7, 3, 32, 32)
    expected = model(input_ids=tokens, pixel_values=pixels, return_loss=True)
    found = pairs_of(expected.image_embeds, expected.text_embeds)
    losses = SigLip().losses(found, model.logit_scale[0], model.logit_bias[0], Processes())
    torch.testing.assert_close(losses.mean(), expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", [Clip(), SigLip()])
def test_pairs_that_do_not_count_change_nothing(task: PairTask, embeddings: tuple[Tensor, Tensor]) -> None:
    images, texts = embeddings
    scale, bias = torch.tensor(2.0), None if task.initial_bias is None else torch.tensor(-3.0)
    valid = torch.tensor([True, False, True, True, False, True, True])
    found = task.losses(pairs_of(images, texts, valid), scale, bias, Processes())[valid]
    alone = task.losses(pairs_of(images[valid], texts[valid]), scale, bias, Processes())
    torch.testing.assert_close(found, alone)


def write_pairs(folder: Path, count: int = 24) -> Path:
    folder.mkdir(parents=True)
    lines = ["path,text"]
    colours = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 255, 0)}
    for number in range(count):
        text = TEXTS[number % len(TEXTS)]
        pixels = np.zeros((14, 14, 3), np.uint8)
        pixels[3 : 5 + number % 3 * 3, 2:12] = colours[text.split()[0]]
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines += [f"{number}.png,a {text}", f"{number}.png,one {text} here"]
    (folder / "pairs.csv").write_text("\n".join(lines))
    return folder / "pairs.csv"


SMALL = {
    "variant": "ViT-Pico/7", "image_size": (14, 14), "width": 16, "depth": 1, "heads": 2, "mlp_width": 32,
    "text_width": 16, "text_depth": 1, "text_context": 16, "vocabulary": 560, "steps": 4, "batch_size": 8,
    "flip": False, "shift": 0,
}  # fmt: skip


def config_of(data: Path, run: Path, **more: Any) -> TrainConfig:
    given = {"task": "clip", **SMALL, **more}
    return ranks.config_of(data, run, **{"evaluations": 1, "checkpoints": 2, "validation_share": 0.25, **given})


@pytest.mark.slow
@pytest.mark.parametrize("task", ["clip", "siglip"])
@pytest.mark.parametrize("freeze", ["none", "image"])
def test_all_pairs_of_a_batch_are_compared_in_every_division(tmp_path: Path, task: str, freeze: str) -> None:
    data = write_pairs(tmp_path / "data")
    config = config_of(data, tmp_path / "run", task=task, freeze=freeze, clip=0.0)
    if freeze == "image":
        network: Any = vitrail.create("ViT-Pico/7", image_size=14, channels=1, num_classes=0, width=24, depth=1)
        model = Bundle(network, (), config.images).save(tmp_path / "model")
        config = replace(config, model=ModelConfig()).override(init=str(model))
    loss, gradients = ranks.gradients(config, (1, 2), at_once=True)
    assert ("network.patches.projection.weight" in gradients) == (freeze == "none")
    several = in_processes(2, ranks.gradients, config.override(accumulation=2), (1, 2)) if freeze == "none" else []
    assert [ended.error for ended in several] == [None] * len(several)
    found = [ranks.gradients(config.override(accumulation=8), (1, 2)), *(ended.result for ended in several)]
    for metrics, ours in found:
        assert metrics["loss"] == pytest.approx(loss["loss"], rel=1e-6) and ours.keys() == gradients.keys()
        for name, values in gradients.items():
            np.testing.assert_allclose(ours[name], values, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_is_stopped_continues_bit_by_bit(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data")
    whole = train(config_of(data, tmp_path / "whole"))
    (stopped,) = in_processes(1, ranks.trained_and_stopped, config_of(data, tmp_path / "parts"), 0, 2)
    assert "stopped at step" in stopped.result
    resumed = resume(tmp_path / "parts")
    assert whole.bundle.words is not None and resumed.bundle.words is not None
    for one, other in zip(whole.bundle.words.tower.parameters(), resumed.bundle.words.tower.parameters(), strict=True):
        assert torch.equal(one, other)
    losses = [
        [event["loss"] for event in read_journal(tmp_path / name / "journal.jsonl") if event["event"] == "step"]
        for name in ("whole", "parts")
    ]
    assert losses[0][-1] == losses[1][-1]


@pytest.mark.slow
def test_a_trained_pair_finds_its_texts_and_continues_as_initial_model(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "data", 36)
    more = {"optimizer": "adamw", "learning_rate": 3e-3, "steps": 40, "evaluations": 2, "keep": "best"}
    result = train(config_of(data, tmp_path / "run", task="siglip", initial_bias=-2.0, **more))
    assert result.metrics["validation_mean_recall"] > 0.4
    model = vitrail.load(tmp_path / "run" / "model")
    assert model.words is not None and model.words.bias is not None
    beside = load_file(tmp_path / "run" / "beside.safetensors")
    assert model.words.scale == beside["scale"].item() and model.words.bias == beside["bias"].item()
    assert all(torch.equal(weight, beside[f"text.{name}"]) for name, weight in model.words.tower.named_parameters())
    config = config_of(data, tmp_path / "again", freeze="image", steps=1)
    config = replace(config, model=ModelConfig()).override(init=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"text_width=16, .*: the initial model has a text tower"):
        train(config, initial=model)
    config = replace(config, task=Clip(freeze="image"))
    before = weights_sha256(model.words.tower)
    again = train(config, initial=model)
    assert weights_sha256(model.words.tower) == before, "the initial model stays as it is"
    for one, other in zip(model.network.parameters(), again.bundle.network.parameters(), strict=True):
        assert torch.equal(one, other), "the frozen tower stays"
    check_place(tmp_path / "run", config.override(overwrite=True))
    assert again.bundle.words is not None and again.bundle.words.tokenizer == model.words.tokenizer


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 1}, "batch_size=1: the task clip compares the images of a batch"),
        ({"early_batch_size": ("1:0.5",)}, "early_batch_size=1: the task clip"),
        ({"freeze": "text"}, "freeze='text' needs a model with a text tower"),
        ({"freeze": "image"}, "freeze='image' needs a model"),
        *(
            ({"freeze": "image", **fields}, f"{name}=.* frozen")
            for name, fields in {
                "train_blocks": {"train_blocks": 1, "init": "m"},
                "lora_rank": {"lora_rank": 2, "init": "m"},
                "dropout": {"dropout": 0.2},
                "stochastic_depth": {"stochastic_depth": 0.3},
                "early_patch_dropout": {"early_patch_dropout": ("0.5:0.4",)},
            }.items()
        ),
        ({"task": "siglip", "initial_bias": None}, "the sigmoid loss needs a bias"),
    ],
)
def test_unfit_settings_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    config = config_of(write_pairs(tmp_path / "data"), tmp_path / "run")
    if "init" in fields:
        config = replace(config, model=ModelConfig())
    with pytest.raises(ConfigError, match=message):
        train(config.override(**fields))


@pytest.mark.parametrize(("context", "is_noted"), [(4, True), (40, False)])
def test_texts_that_are_cut_are_noted_at_the_start(tmp_path: Path, context: int, is_noted: bool) -> None:
    config = config_of(write_pairs(tmp_path / "data"), tmp_path / "run", text_context=context)
    _, _, notes = make_network(prepare(config), None)
    assert any(f"{context} tokens" in note for note in notes) == is_noted


def test_a_users_task_can_have_a_text_tower_and_images_without_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = make_colour_folder(tmp_path / "data")
    job = prepare(ranks.config_of(classes, tmp_path / "run"))
    monkeypatch.setattr(type(job.config.task), "words", lambda *_: model_with_words().words)
    _, job, notes = make_network(job, None)
    assert job.words is not None and not any("tokens" in note for note in notes)


def test_a_bias_counts_unless_the_initial_model_has_one() -> None:
    plain, biased, splits = model_with_words(), model_with_words(bias=-3.0), Splits(Pictures(2), None, None)
    assert SigLip(initial_bias=-2.0).words(plain, plain.network, splits).bias == -2.0
    assert SigLip().words(biased, biased.network, splits).bias == -3.0
    assert Clip().words(biased, biased.network, splits).bias is None
    with pytest.raises(ConfigError, match=r"initial_bias=-2.0: .* used as it is"):
        SigLip(initial_bias=-2.0).words(biased, biased.network, splits)
    recipe = SigLip(initial_bias=-2.0, freeze="image")
    assert recipe.of_words(biased.reader_of_texts(), ()) == SigLip(freeze="image")
    assert recipe.of_words(plain.reader_of_texts(), ("initial_bias",)) == recipe
    with pytest.raises(ConfigError, match=r"initial-bias.* used as it is"):
        recipe.of_words(biased.reader_of_texts(), ("initial_bias",))


def test_a_model_without_a_tokenizer_is_named_with_its_setting(tmp_path: Path) -> None:
    model = Bundle(small_network(), (), Preprocess(image_size=(21, 28))).save(tmp_path / "model")
    for name in (str(model), str(tmp_path / "nowhere")):
        with pytest.raises(ConfigError, match=f"^text_tokenizer='{name}': "):
            Clip(text_tokenizer=name).words(None, small_network(), Splits(Pictures(2), None, None))


def test_data_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="clip needs images with texts"):
        train(config_of(Path("bundled"), tmp_path / "run", channels=1))
    data = write_pairs(tmp_path / "data")
    data.write_text("path,text\n0.png,same\n1.png,same\n")
    with pytest.raises(DataError, match="fewer than two different"):
        train(config_of(data, tmp_path / "run", validation_share=0.0))


def test_a_frozen_tower_embeds_each_image_once() -> None:
    objective = make_objective(small_task(Clip, freeze="image")).train()
    batch, calls = pairs_batch(4), []
    embed = objective.network.embed
    objective.network.__dict__["embed"] = lambda images: calls.append(len(images)) or embed(images)
    first, again = objective(batch), objective(batch)
    assert calls == [1, 1, 1, 1] and torch.equal(first.loss, again.loss)
    objective(replace(batch, images=batch.images.flip(3)))
    assert len(calls) == 8
    assert all(weight.grad is None for weight in objective.network.parameters())
    first.loss.backward()
    assert objective.text.projection is not None and objective.text.projection.weight.grad is not None
    assert {name for name, weight in objective.named_parameters() if weight.requires_grad}.isdisjoint(
        f"network.{name}" for name, _ in objective.network.named_parameters()
    )


def test_the_scale_of_clip_is_at_most_100() -> None:
    objective, sigmoid = make_objective(small_task(Clip)), make_objective(small_task(SigLip))
    for one in (objective, sigmoid):
        one.scale.data.fill_(6.0)
        one.after_step(Position(0, 1, 0.0), Processes())
    assert objective.scale.exp().item() == pytest.approx(100, rel=1e-5) and sigmoid.scale.item() == 6.0


@pytest.mark.slow
def test_one_text_of_each_image_is_drawn_by_seed_epoch_and_sample() -> None:
    texts = [("red circle", "blue bar", "green square"), ("red bar",), None]
    source, images = Pictures(6, targets=texts), Preprocess(image_size=(14, 14))
    tokenizer = train_tokenizer(TEXTS, vocabulary=600, context=8)

    def batches(ranks: Launch = Launch(), **state: int) -> dict[tuple[int, int], list[int]]:
        made = TrainingBatches(source, [Stage(images, 6)], seed=3, ranks=ranks, rows=Rows(tokenizer=tokenizer))
        made.restore({"batches": 0, **state})
        found = {}
        for batch in itertools.islice(made, 8 - state.get("batches", 0)):
            assert batch.texts is not None
            for epoch, sample, tokens, counted in zip(
                batch.epochs.tolist(), batch.samples.tolist(), batch.texts.tolist(), batch.counted.tolist(), strict=True
            ):
                found[epoch, sample] = tokens
                assert counted == (sample % 3 < 2)
        return found

    whole = batches()
    parts = batches(Launch(0, 2)) | batches(Launch(1, 2))
    assert whole == parts and batches(batches=5).items() <= whole.items()
    allowed = {text: tokenizer.encode([text]).tokens[0].tolist() for text in (*texts[0], "red bar")}
    assert {tuple(whole[epoch, 0]) for epoch in range(8)} == {tuple(allowed[text]) for text in texts[0]}
    assert all(whole[epoch, 1] == allowed["red bar"] for epoch in range(8))
    assert any(whole[epoch, 0] != whole[epoch, 3] for epoch in range(8)), "images draw independently"
