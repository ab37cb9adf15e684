"""Tests of the overview of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.analysis.summaries.test_comparison import BIT, bundle_of, source_of
from tests.conftest import make_colour_folder
from vitrail.analysis.cka import layer_similarity
from vitrail.analysis.features import probe_layers
from vitrail.analysis.statistics import attention_distance
from vitrail.analysis.summaries.overview import Overview, overview
from vitrail.analysis.summaries.samples import evenly, images_at, inputs_of
from vitrail.data.source import Subset
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colour_folder(tmp_path_factory.mktemp("data") / "colours", images=9)


def seen(folder: Path, bundle: Bundle, **fields: Any) -> Overview:
    source, train = source_of(folder, bundle), source_of(folder, bundle)
    return overview(Outputs(bundle), source, train, "it", **{"bootstrap": 0, "images": 10, **fields})


def test_it_holds_what_each_analysis_measures(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    found, source = seen(colours, bundle, probe_images=20), source_of(colours, bundle)
    inputs = inputs_of(bundle, images_at(source, evenly(27, 10)))
    assert found.looked_at == 10 and found.report.images == 27
    assert np.array_equal(found.reach.mean, attention_distance(bundle.network, inputs).pixels.mean)  # type: ignore[union-attr]
    assert found.similarity is not None and found.colours is not None
    assert np.allclose(found.similarity.values, layer_similarity(bundle.network, [inputs]).values)
    labels = np.array([source.target(int(index)) for index in evenly(27, 20)])
    some = inputs_of(bundle, images_at(source, evenly(27, 20)))
    assert list(found.probes) == probe_layers(bundle.network, some, labels, some, labels)
    assert found.filters is not None and found.positions is not None and found.norms is not None and not found.notes
    assert len(found.colour_pictures) == len(found.colours.values) == 8


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
    assert wrong and [one.key for one in found.errors] == sorted(wrong, key=lambda key: -wrong[key])
    assert [one.answer.probability for one in found.errors] == pytest.approx([wrong[one.key] for one in found.errors])
    assert [one.key for one in seen(colours, bundle, examples=1, probe_images=0).errors] == [found.errors[0].key]


def test_embeddings_lie_along_their_principal_components(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    mapped = seen(colours, bundle, probe_images=0).embedding
    assert mapped is not None
    features = Outputs(bundle).features(source_of(colours, bundle)).features.astype(np.float64)
    centred = features - features.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    wanted = centred @ vectors[:, :-3:-1]
    assert np.allclose(np.abs(mapped.points), np.abs(wanted), atol=1e-6)
    assert mapped.explained == pytest.approx(tuple(values[:-3:-1] / values.sum()), abs=1e-6)
    assert [key.split("/")[0] for key in mapped.keys] == list(mapped.labels)


def test_what_a_resnet_does_not_have_is_named(colours: Path) -> None:
    found = seen(colours, bundle_of(size=(16, 16), **BIT), probe_images=12)
    assert found.reach.name == "effective receptive field"
    assert (found.filters, found.positions, found.norms, found.entropy) == (None, None, None, None)
    assert found.notes == (
        "a network of the architecture 'BiT' has no attention to look into; choose a Vision Transformer or a hybrid",
    )
    assert [one.layer for one in found.probes] == list(range(len(found.probes))) and found.probes
    assert all(one.answer.relevance is None for one in found.errors)


def test_linear_models_are_not_measured_on_images_that_they_learned_from(colours: Path) -> None:
    bundle = bundle_of()
    found = overview(Outputs(bundle), source_of(colours, bundle), None, "it", images=4, bootstrap=0)
    assert not found.probes
    assert found.notes == ("a linear model of each layer, which would be measured on images that it learned from",)


@pytest.mark.parametrize("images", [1, 3])
def test_few_images_have_no_similarity_of_layers(colours: Path, images: int) -> None:
    bundle = bundle_of(seed=3)
    source = source_of(colours, bundle)
    found = overview(Outputs(bundle), Subset(source, range(images)), source, "it", bootstrap=0)
    assert found.similarity is None and found.looked_at == images
    notes = ["the similarity of layers, which needs at least 4 images"]
    if images == 1:
        notes.append("a map of the embeddings, which needs at least two images and two features")
    assert list(found.notes) == notes and (found.embedding is None) == (images == 1)
    assert found.colours is not None and found.probes


def test_one_image_of_one_patch_has_no_colours(colours: Path) -> None:
    bundle = bundle_of(size=(4, 4))
    found = overview(Outputs(bundle), Subset(source_of(colours, bundle), [0]), None, "it", bootstrap=0)
    assert found.colours is None and any("the number of directions of these tokens" in note for note in found.notes)


def test_images_that_cannot_be_decoded_are_skipped_and_listed(tmp_path: Path) -> None:
    folder = make_colour_folder(tmp_path / "colours", images=6)
    bundle = bundle_of(seed=3)
    source = source_of(folder, bundle)
    files = {index: folder / source.key(index) for index in (1, 17)}
    for file in files.values():
        file.write_bytes(file.read_bytes()[:60])
    measured, learned = Subset(source, range(9)), Subset(source, range(9, 18))
    found = overview(Outputs(bundle), measured, learned, "it", images=4, bootstrap=0)
    assert found.report.images == 8 and found.embedding is not None and len(found.embedding.keys) == 8
    assert [item.key for item in found.skipped] == [source.key(1), source.key(17)]
    others = inputs_of(bundle, images_at(learned, range(8)))
    labels = np.array([learned.target(index) for index in range(8)])
    tested = [index for index in range(9) if index != 1]
    truth = np.array([measured.target(index) for index in tested])
    expected = probe_layers(bundle.network, others, labels, inputs_of(bundle, images_at(measured, tested)), truth)
    assert list(found.probes) == expected


def test_without_a_training_image_there_are_no_linear_models(colours: Path) -> None:
    bundle = bundle_of(seed=3)
    source = source_of(colours, bundle)
    found = overview(Outputs(bundle), source, Subset(source, []), "it", images=4, bootstrap=0)
    assert not found.probes
    assert found.notes == ("no training image has a label and can be decoded, so no layer has a linear model",)


def test_what_cannot_be_reported_on(colours: Path) -> None:
    bundle = bundle_of()
    with pytest.raises(ConfigError, match=r"^images=3 is too small to compare layers; choose at least 4"):
        seen(colours, bundle, images=3)
    with pytest.raises(ConfigError, match=r"^this model has no classes to report on"):
        overview(Outputs(bundle_of(output="numbers")), source_of(colours, bundle), source_of(colours, bundle), "it")
