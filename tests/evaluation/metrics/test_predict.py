"""Tests of the logits of all samples against the network, called with one image at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.evaluation.memory import MemorySource
from tests.targets import single_labels
from vitrail.data.batch import Skipped
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.targets import Target
from vitrail.errors import BundleError, ConfigError
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle

PREPROCESS = Preprocess(image_size=(14, 21), channels=1, mean=(0.3,), std=(0.4,))


class Pictures(MemorySource):
    """Random grey images."""

    def __init__(self, labels: list[Target], broken: tuple[int, ...] = ()) -> None:
        random = np.random.default_rng(0)
        super().__init__(random.integers(0, 256, (len(labels), 14, 21, 1), dtype=np.uint8), labels, broken)


def make_network(num_classes: int = 3) -> nn.Module:
    torch.manual_seed(3)
    size = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=num_classes, channels=1, **size)
    if network.head is not None:
        nn.init.normal_(network.head.weight)
    return network


def outputs_of(network: nn.Module, **settings: object) -> Outputs:
    names = tuple(f"class {index}" for index in range(network.config.num_classes))
    return Outputs(Bundle(network, names, PREPROCESS, output=settings.pop("output", "softmax")), **settings)


@pytest.mark.parametrize("readers", [Readers(0), Readers(3)])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_every_sample_once_and_in_order(readers: Readers, batch_size: int) -> None:
    network = make_network().train()
    source = Pictures([0, 1, None, 2, 1, 0, None, 2, 1], broken=(1, 6))
    named: list[Skipped] = []
    settings = {"batch_size": batch_size, "readers": readers, "on_skip": named.append, "output": "sigmoid"}
    found = outputs_of(network, **settings).predictions(source)
    assert network.training and found.scores == "sigmoid" and found.classes == ("a", "b", "c")
    assert found.indices.tolist() == [0, 2, 3, 4, 5, 7, 8] and len(found) == 7
    assert found.keys == tuple(f"picture {index}" for index in found.indices)
    assert found.truth.kind == "class" and found.truth.dense.tolist() == [0, -1, 2, 1, 0, 2, 1]
    assert [item.key for item in found.skipped] == ["picture 1", "picture 6"] and tuple(named) == found.skipped
    images = torch.from_numpy(source.images[found.indices].transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        logits = torch.cat([network.eval()(PREPROCESS.normalise(image[None])) for image in images])
    torch.testing.assert_close(torch.from_numpy(found.logits), logits, rtol=0, atol=1e-5)


def test_several_labels_are_targets() -> None:
    found = outputs_of(make_network(), batch_size=2).predictions(Pictures([(0, 2), (), (1,)], broken=(1,)))
    assert found.truth.kind == "classes" and found.truth.dense.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert found.labelled() is found


def test_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has 5 outputs, but the data has 3 classes"):
        outputs_of(make_network(5)).predictions(Pictures([0, 1]))


def test_outputs_that_are_not_finite_are_refused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = make_network().config
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, images: Tensor) -> Tensor:
            return self.bias + (images.mean(dim=(1, 2, 3)) > 0.4).float().log()[:, None]

    source = Pictures([0, 1, 2, 0])
    source.images[:] = 255
    source.images[2] = 0
    with pytest.raises(
        BundleError, match=r"not finite for 1 of 4 images, such as 'picture 2'; its weights are damaged"
    ):
        outputs_of(Broken()).predictions(source)


def test_unlabelled_samples_can_be_left_out() -> None:
    logits, labels = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), np.array([2, -1, 0, -1])
    made = Predictions(logits, single_labels(labels, 4), ("k0", "k1", "k2", "k3"), np.arange(4) * 3, tuple("abcd"))
    kept = made.labelled()
    assert kept.truth.dense.tolist() == [2, 0] and kept.keys == ("k0", "k2") and kept.indices.tolist() == [0, 6]
    assert np.array_equal(kept.logits, logits[[0, 2]]) and kept.labelled() is kept
