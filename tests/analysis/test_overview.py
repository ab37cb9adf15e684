"""Tests of the overview of one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.analysis.test_comparison import BIT, bundle_of, source_of
from tests.make import encode, make_colour_folder
from vitrail.analysis.faithfulness import randomised_weights, saliency_curves
from vitrail.analysis.features import probe_layers
from vitrail.analysis.heads import attention_distance
from vitrail.analysis.overview import Overview, answer_about, images_at, in_batches, inputs_of, overview, picture_of
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.analysis.similarity import layer_similarity
from vitrail.data.source import evenly, samples_of, subset
from vitrail.data.sources import open_whole
from vitrail.data.targets import Targets
from vitrail.evaluation.metrics.classes import per_sample
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.bundle import Bundle


def seen(folder: Path, bundle: Bundle, **fields: Any) -> Overview:
    source, train = source_of(folder, bundle), source_of(folder, bundle)
    return overview(
        Outputs(bundle), source, train, "it", **{"bootstrap": 0, "images": 10, "saliency_images": 0, **fields}
    )


@pytest.mark.slow
def test_it_holds_what_each_analysis_measures(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    found, source = seen(colours, bundle, probe_images=20), source_of(colours, bundle)
    inputs = inputs_of(bundle, images_at(source, evenly(27, 10)))
    assert found.layers.images == 10 and found.images == found.answers.report.images == 27
    assert np.array_equal(found.layers.reach.mean, attention_distance(bundle.network, inputs).mean)
    assert np.allclose(found.layers.similarity.values, layer_similarity(bundle.network, [inputs]).values)
    labels = np.array([source.target(int(index)) for index in evenly(27, 20)])
    some = inputs_of(bundle, images_at(source, evenly(27, 20)))
    assert list(found.probes) == probe_layers(bundle.network, some, labels, some, labels)
    layers = found.layers
    assert layers.filters is not None and layers.positions is not None and layers.norms is not None and not found.notes
    assert len(found.patches.pictures) == len(found.patches.colours.values) == 8


@pytest.mark.slow
def test_errors_are_the_most_certain_ones(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    found = seen(colours, bundle, examples=100, probe_images=0)
    predictions = Outputs(bundle).predictions(source_of(colours, bundle))
    chances = torch.from_numpy(predictions.logits).softmax(dim=1)
    wrong = {
        key: float(chances[row].max())
        for row, key in enumerate(predictions.keys)
        if int(chances[row].argmax()) != predictions.truth.plain(row)
    }
    errors = found.answers.errors
    assert wrong and [one.key for one in errors] == sorted(wrong, key=lambda key: -wrong[key])
    assert [one.answer.probability for one in errors] == pytest.approx([wrong[one.key] for one in errors])
    few = seen(colours, bundle, examples=1, probe_images=0).answers
    assert [one.key for one in few.errors] == [errors[0].key]


@pytest.mark.slow
def test_embeddings_lie_along_their_principal_components(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    mapped = seen(colours, bundle, probe_images=0).embedding
    features = Outputs(bundle).features(source_of(colours, bundle)).features.astype(np.float64)
    centred = features - features.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    wanted = centred @ vectors[:, :-3:-1]
    assert np.allclose(np.abs(mapped.points), np.abs(wanted), atol=1e-6)
    assert mapped.explained == pytest.approx(tuple(values[:-3:-1] / values.sum()), abs=1e-6)
    assert [key.split("/")[0] for key in mapped.keys] == list(mapped.labels)


@pytest.mark.slow
def test_what_a_resnet_does_not_have_is_named(colours: Path) -> None:
    found = seen(colours, bundle_of(size=(16, 16), **BIT), probe_images=12, saliency_images=4)
    layers = found.layers
    assert layers.reach.name == "effective receptive field"
    assert (layers.filters, layers.positions, layers.norms, layers.entropy) == (None, None, None, None)
    assert found.saliency is None
    assert found.notes == (
        "a network of the architecture 'BiT' has no attention to look into; choose a Vision Transformer or a hybrid",
    )
    assert [one.layer for one in found.probes] == list(range(len(found.probes))) and found.probes
    assert all(one.answer.relevance is None for one in found.answers.errors)


@pytest.mark.slow
def test_linear_models_need_training_images(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    source = source_of(colours, bundle)
    found = overview(Outputs(bundle), source, subset(source, []), "it", images=4, saliency_images=0, bootstrap=0)
    note = "no training image has a label and can be decoded, so no layer has a linear model"
    assert not found.probes and found.notes == (note,)


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 3])
def test_few_images_have_no_similarity_of_layers(colours: Path, images: int) -> None:
    bundle = bundle_of(seed=3)
    source = source_of(colours, bundle)
    found = overview(Outputs(bundle), subset(source, range(images)), source, "it", saliency_images=0, bootstrap=0)
    assert found.layers.similarity is None and found.layers.images == images
    notes = ["the similarity of layers, which needs at least 4 images"]
    if images == 1:
        notes.append("a map of the embeddings, which needs at least two images and two features")
    assert list(found.notes) == notes and (found.embedding is None) == (images == 1)
    assert found.patches is not None and found.probes


def test_one_image_of_one_patch_has_no_colours(colours: Path) -> None:
    bundle = bundle_of(size=(4, 4))
    found = overview(
        Outputs(bundle), subset(source_of(colours, bundle), [0]), None, "it", saliency_images=0, bootstrap=0
    )
    assert found.patches is None and any("the number of directions of these tokens" in note for note in found.notes)


@pytest.mark.slow
def test_images_that_cannot_be_decoded_are_skipped_and_listed(tmp_path: Path) -> None:
    folder = make_colour_folder(tmp_path / "colours", images=6)
    bundle = bundle_of(seed=3)
    source = source_of(folder, bundle)
    files = {index: folder / source.key(index) for index in (1, 17)}
    for file in files.values():
        file.write_bytes(file.read_bytes()[:60])
    measured, learned = subset(source, range(9)), subset(source, range(9, 18))
    found = overview(Outputs(bundle), measured, learned, "it", images=4, saliency_images=0, bootstrap=0)
    assert found.images == 8 and len(found.embedding.keys) == 8
    assert [item.key for item in found.skipped] == [source.key(1), source.key(17)]
    others = inputs_of(bundle, images_at(learned, range(8)))
    labels = np.array([learned.target(index) for index in range(8)])
    tested = [index for index in range(9) if index != 1]
    truth = np.array([measured.target(index) for index in tested])
    expected = probe_layers(bundle.network, others, labels, inputs_of(bundle, images_at(measured, tested)), truth)
    assert list(found.probes) == expected


@pytest.mark.slow
def test_saliency_maps_are_measured_on_images_at_equal_distances(colours: Path) -> None:
    bundle = bundle_of(seed=3, output="sigmoid")
    found, source = seen(colours, bundle, probe_images=0, saliency_images=5).saliency, source_of(colours, bundle)
    inputs = inputs_of(bundle, images_at(source, evenly(27, 5)))
    names = ("rollout", "relevance", "relevance, gradients alone", "random")
    assert found.curves.methods == names and found.curves.deletion.shape[:2] == (4, 5)
    maps = {"rollout": attention_rollout(bundle.network, inputs), "relevance": class_relevance(bundle.network, inputs)}
    expected = saliency_curves(bundle.network, inputs, maps, output="sigmoid")
    methods = {one.name: one for one in found.methods}
    for row, name in enumerate(maps):
        assert methods[name].deletion.value == pytest.approx(expected.deletion_auc()[row].mean())
        assert methods[name].insertion.value == pytest.approx(expected.insertion_auc()[row].mean())
    assert methods["rollout"].random_head == pytest.approx(1.0), "rollout does not read the head"
    check = randomised_weights(bundle.network, inputs[:4], class_relevance).correlation.mean(axis=1)
    assert methods["relevance"].random_head == pytest.approx(check[0])
    assert methods["relevance"].random_all == pytest.approx(check[-1])
    assert methods["random"].random_head is None and methods["random"].random_all is None


@pytest.mark.slow
@pytest.mark.parametrize("has_labels", [True, False])
def test_a_model_without_a_head_has_layers_and_embeddings(colours: Path, has_labels: bool) -> None:
    bundle = bundle_of(seed=3, classes=())
    whole = open_whole(str(colours)).whole.train
    unknown = Targets.unknown("class", whole.classes, len(whole))
    source = whole if has_labels else replace(samples_of(whole), targets=unknown)
    found = overview(Outputs(bundle), source, whole, "it", images=6, probe_images=12, bootstrap=0)
    assert found.answers is None and found.saliency is None and found.images == 27
    assert found.layers.entropy is not None
    assert found.embedding.labels == tuple(whole.key(row).split("/")[0] if has_labels else "" for row in range(27))
    notes = ["measurements of saliency maps, which need the classes of a head"]
    if has_labels:
        labels = np.array([whole.target(int(index)) for index in evenly(27, 12)])
        some = inputs_of(bundle, images_at(whole, evenly(27, 12)))
        assert list(found.probes) == probe_layers(bundle.network, some, labels, some, labels)
    else:
        assert not found.probes
        notes.insert(0, "no measured image has a label, so no layer has a linear model")
    assert list(found.notes) == notes


def test_inputs_are_files_or_pixels_and_can_be_written_to() -> None:
    """PyTorch warns of arrays that are not writable, which is an error in tests."""
    bundle = bundle_of(size=(12, 8))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    pixels.flags.writeable = False
    file = encode(pixels, "PNG")
    alone, both = inputs_of(bundle, [pixels]), inputs_of(bundle, iter([pixels, file]))
    assert alone.shape == (1, 3, 12, 8)
    assert torch.equal(both[0], both[1]) and torch.equal(both[0], alone[0])
    assert np.array_equal(picture_of(file), pixels)


def test_pictures_and_their_relevance_need_little_memory() -> None:
    bundle, photo = bundle_of(), Image.new("RGB", (3000, 1000), "red")
    image = encode(photo, "PNG")
    judged = per_sample(np.array([[0.0, 1.0, 0.0]]), np.array([0]))
    assert picture_of(image).shape == (160, 480, 3)
    relevance = answer_about(bundle, image, judged, 0).relevance
    assert relevance is not None and relevance.shape == (160, 480)


@pytest.mark.parametrize(("images", "sizes"), [(64, [16] * 4), (20, [10, 10]), (19, [10, 9]), (4, [4])])
def test_batches_for_cka_have_every_image_once(images: int, sizes: list[int]) -> None:
    batches = [*in_batches(torch.arange(float(images))[:, None, None, None])]
    assert [len(batch) for batch in batches] == sizes
    assert sorted(torch.cat(batches).ravel().tolist()) == list(range(images))


def test_the_similarity_of_layers_does_not_depend_on_the_order_of_the_data() -> None:
    random = torch.Generator().manual_seed(0)
    colours = torch.randn(4, 3, 1, 1, generator=random)
    images = colours.repeat_interleave(16, dim=0) + 0.3 * torch.randn(64, 3, 12, 8, generator=random)  # class by class
    first, second = bundle_of(seed=3).network, bundle_of(seed=4).network
    expected = layer_similarity(first, [images], second).values
    found = layer_similarity(first, in_batches(images), second).values
    assert np.abs(found - expected).max() < 0.1
