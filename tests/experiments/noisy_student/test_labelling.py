"""Tests of pseudo labels from a teacher: the chosen images, their probabilities and counts, and unfit teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.experiments.noisy_student.conftest import MakeTeacher
from vitrail.data.formats.pseudo_labels import Pool, read_info
from vitrail.data.pipeline import Readers
from vitrail.data.source import has_soft_targets, soft_target_of
from vitrail.data.sources import open_data
from vitrail.errors import BundleError, ConfigError
from vitrail.experiments.noisy_student import Labelling, choose_rows, label_images
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load


def label(teacher: str, data: Path, out: Path, **settings: Any) -> Any:
    labelling = Labelling(**{"confidence": 0.34, **settings})
    return label_images(teacher, Pool(spec=str(data)), labelling, out, device="cpu", precision="float32",
                        readers=Readers(0))  # fmt: skip


@pytest.mark.slow
def test_labels_are_the_probabilities_of_the_teacher(teacher: MakeTeacher, colour_folder: Path, tmp_path: Path) -> None:
    """Computed again one image at a time, with the teacher's own preprocessing and without dropout."""
    (colour_folder / "red" / "broken.png").write_bytes(b"no image")
    model = teacher(dropout=0.5)
    info = label(model, colour_folder, tmp_path / "labels", balance=False)
    bundle, source = load(model, device="cpu"), open_data(str(tmp_path / "labels"), validation_share=0.0).train
    assert has_soft_targets(source)
    bundle.network.eval()
    found: dict[str, np.ndarray] = {}
    for path in sorted(colour_folder.rglob("*.png")):
        if path.name != "broken.png":
            pixels = torch.from_numpy(bundle.preprocess.pixels(path.read_bytes()))[None]
            with torch.no_grad():
                logits = bundle.network(bundle.preprocess.normalise(pixels))
            found[path.relative_to(colour_folder).as_posix()] = torch.softmax(logits.double(), 1)[0].numpy()
    confident = {key: row for key, row in found.items() if row.max() >= 0.34}
    assert 0 < len(confident) <= 36
    assert [source.key(index) for index in range(len(source))] == list(confident)
    for index, row in enumerate(confident.values()):
        np.testing.assert_allclose(soft_target_of(source, index), row, atol=1e-5)
        assert source.target(index) == row.argmax()
    likeliest = [row.argmax() for row in found.values()]
    assert [count.predicted for count in info.counts] == [likeliest.count(number) for number in range(3)]
    assert sum(count.confident for count in info.counts) == len(confident) == sum(c.chosen for c in info.counts)
    assert (info.images, info.unreadable, info.classes) == (37, 1, ("blue", "green", "red"))
    assert info.teacher_sha256 == weights_sha256(bundle.network) and info.teacher == model
    assert read_info(tmp_path / "labels") == info


def test_labels_are_balanced(teacher: MakeTeacher, colour_folder: Path, tmp_path: Path) -> None:
    info = label(teacher(), colour_folder, tmp_path / "labels", images_per_class=7, pseudo_labels="hard")
    source: Any = open_data(str(tmp_path / "labels"), validation_share=0.0).train
    targets = [source.target(index) for index in range(len(source))]
    for number, count in enumerate(info.counts):
        assert targets.count(number) == count.chosen == (7 if count.confident else 0)
        assert count.different == min(7, count.confident) and count.confident <= count.predicted
    assert not source.has_soft_targets and info.labels == "hard"


def test_the_choice_is_filtered_then_balanced() -> None:
    probabilities = np.array([[0.6, 0.4], [0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], np.float32)
    rows = choose_rows(np.array([3, 5, 8, 9]), probabilities, Labelling(images_per_class=2), 0)
    assert rows.positions.tolist() == [5, 8, 9] and rows.copies.tolist() == [1, 2, 1]
    assert rows.labels.tolist() == [0, 1, 0] and rows.probabilities is not None
    np.testing.assert_array_equal(rows.probabilities, probabilities[1:])
    everything = choose_rows(np.arange(4), probabilities, Labelling(balance=False, pseudo_labels="hard"), 0)
    assert everything.copies.tolist() == [1] * 4 and everything.probabilities is None


def test_a_flat_folder_without_labels_is_labelled(teacher: MakeTeacher, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(5):
        Image.new("RGB", (20 + number, 15), (40 * number, 90, 10)).save(tmp_path / "photos" / f"{number}.png")
    info = label(teacher(), tmp_path / "photos", tmp_path / "labels", confidence=0.0)
    assert info.images == 5 and len(open_data(str(tmp_path / "labels"), validation_share=0.0).train) >= 2


def test_unfit_teachers_are_refused(teacher: MakeTeacher, colour_folder: Path, tmp_path: Path) -> None:
    bundle = load(teacher(), device="cpu")
    headless = Bundle(bundle.network.with_head(0), (), bundle.preprocess).save(tmp_path / "headless")
    with pytest.raises(ConfigError, match="has no classes, so it cannot be a teacher; name a model that was trained"):
        label(str(headless), colour_folder, tmp_path / "labels")
    with pytest.raises(ConfigError, match="has the outputs 'sigmoid', but a teacher needs probabilities that add up"):
        label(teacher(output="sigmoid"), colour_folder, tmp_path / "labels")
    bundle.network.head.bias.data[1] = float("nan")
    damaged = bundle.save(tmp_path / "damaged")
    with pytest.raises(BundleError, match=r"has outputs that are not finite, such as for 'blue/00\.png'; its weights"):
        label(str(damaged), colour_folder, tmp_path / "labels")
