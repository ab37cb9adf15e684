"""Tests of the best model of a run that goes back to a checkpoint."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitrail.training.checkpoint as best_module
from tests.listening import Display
from tests.training.jobs import Make, Outcome
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import create
from vitrail.tasks.masked_patches import MaskedPatches, MaskedPatchesObjective
from vitrail.tasks.own_model import BESIDE
from vitrail.training.checkpoint import BestModel, Checkpoints
from vitrail.training.log import Log
from vitrail.training.run import resume, train
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


def write(run: Path, text: str) -> None:
    """Replace the files of a model, as a run does."""
    for file in (run / "model" / "model.json", run / "beside.safetensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(file)


def read(run: Path) -> set[str]:
    return {file.read_text() for file in (run / "model" / "model.json", run / "beside.safetensors")}


def without_links(source: Path, target: Path) -> None:
    """Fail as a file system without links does."""
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_the_model_of_a_checkpoint_comes_back(has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_links:
        monkeypatch.setattr(best_module.os, "link", without_links)
    best = BestModel(tmp_path)
    write(tmp_path, "of step 3")
    best.keep(3, {3})
    write(tmp_path, "of step 5")
    best.keep(5, {3})
    write(tmp_path, "of step 7")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".best-3", "beside.safetensors", "model"]
    best.put_back(5)
    assert read(tmp_path) == {"of step 7"}
    best.put_back(3)
    assert read(tmp_path) == {"of step 3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.safetensors", "model"]


def test_models_to_which_no_checkpoint_refers_are_deleted(tmp_path: Path) -> None:
    best = BestModel(tmp_path)
    best.keep(-1, {-1})  # there is no model yet
    for step, referenced in ((3, {3}), (5, {3, 5}), (7, {5, 7})):
        write(tmp_path, f"of step {step}")
        best.keep(step, referenced)
    assert sorted(path.name for path in tmp_path.glob(".best-*")) == [".best-5", ".best-7"]
    best.forget()
    assert not list(tmp_path.glob(".best-*"))


def test_a_model_is_saved_with_the_weights_beside_it(tmp_path: Path) -> None:
    sizes = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 16}
    network = create("ViT-Pico/7", image_size=(14, 21), num_classes=0, **sizes)
    preprocess = Preprocess(image_size=(14, 21))
    objective = MaskedPatchesObjective(network, MaskedPatches())
    BestModel(tmp_path).save(Bundle(network, (), preprocess), objective)
    saved = load(str(tmp_path / "model")).network.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in network.state_dict().items())
    assert set(load_file(tmp_path / BESIDE)) == {"mask_embedding", "decoder.weight", "decoder.bias"}


class CrashAtBest(Display):
    """Ends the run at the first best result after a step, before anything else is saved."""

    def __init__(self, after: int) -> None:
        self.after = after

    def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
        if result["best"] and step > self.after:
            raise MemoryError


class AtTheBeginning(Display):
    """Reads the model on the disk when a run is resumed."""

    def __init__(self, model: Path) -> None:
        self.model, self.found = model, list[int]()

    def say(self, text: str) -> None:
        if text.startswith("continuing after step"):
            self.found.append(json.loads((self.model / "model.json").read_text())["provenance"]["step"])


@pytest.mark.slow
def test_a_crash_after_a_new_best_model_leaves_that_of_the_checkpoint(
    small: Make, outcome: Outcome, tmp_path: Path
) -> None:
    fields = {"evaluations": 24, "checkpoints": 8, "learning_rate": 3e-3}
    train(small(tmp_path / "straight", **fields))
    run = tmp_path / "run"
    with pytest.raises(MemoryError):
        train(small(run, **fields), log=Log(CrashAtBest(6)))
    newest = Checkpoints(run / "checkpoints").steps()[0]
    values = json.loads((run / "checkpoints" / f"step-{newest}" / "state.json").read_text())
    provenance = json.loads((run / "model" / "model.json").read_text())["provenance"]
    assert provenance["step"] > newest >= values["best"]["step"] > 0
    beginning = AtTheBeginning(run / "model")
    resume(run, log=Log(beginning))
    assert beginning.found == [values["best"]["step"]]
    assert outcome(run) == outcome(tmp_path / "straight")
    assert not list(run.glob(".best-*"))
