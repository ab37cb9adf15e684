"""Tests of whole runs that train a tokenizer, and of runs that predict its tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tasks.books import make_tokenizer
from tests.training import ranks
from tests.training.curves import events_of, same_weights, values_of
from tests.training.jobs import Make, results_of, train_until
from vitrail.errors import ConfigError, RunError
from vitrail.tasks.tokenizer import load_tokenizer
from vitrail.training.job import prepare
from vitrail.training.run import resume, train
from vitrail.weights.load import load

TOKENIZER: dict[str, Any] = {
    "task": "vqvae", "codes": 24, "code_width": 6, "decoder_width": 8, "decoder_depth": 1, "restart_below": 0.3,
    "code_decay": 0.8, "steps": 8, "evaluations": 4, "checkpoints": 2, "accumulation": 2,
}  # fmt: skip
PREDICTED: dict[str, Any] = {"task": "masked-patches", "patch_target": "tokens", "steps": 8, "evaluations": 4}


@pytest.mark.slow
def test_a_tokenizer_resumes_bitwise_and_keeps_the_best_codes(small: Make, tmp_path: Path) -> None:
    tokenizer = train(small(tmp_path / "straight", **TOKENIZER)).folder
    train_until(small(tmp_path / "stopped", **TOKENIZER), 3)
    stopped = resume(tmp_path / "stopped")
    for name in ("model/model.safetensors", "model/tokenizer.safetensors", "beside.safetensors"):
        assert same_weights(tokenizer / name, stopped.folder / name)
    *during, kept, _ = events_of(tokenizer, "evaluation")
    best = min(during, key=lambda event: event["reconstruction_loss"])
    for name in ("reconstruction_loss", "perplexity", "codes_used"):
        assert kept[name] == best[name] == stopped.metrics[f"validation_{name}"]
    steps = values_of(tokenizer, "perplexity", "commitment_loss")
    assert all(0 < perplexity <= 24.001 and loss >= 0 for perplexity, loss in steps)
    page = (tokenizer / "report.html").read_text(encoding="utf-8")
    assert "<h2>Images restored from tokens</h2>" in page and page.count("<img") == 16
    assert load(tokenizer).classes == () and load_tokenizer(tokenizer).coder.config.codes == 24


@pytest.mark.slow
def test_tokens_are_predicted_and_a_changed_tokenizer_is_refused(small: Make, tmp_path: Path) -> None:
    copied = make_tokenizer(size=(28, 28), channels=1).save(tmp_path / "tokenizer")
    fields = PREDICTED | {"tokenizer": str(copied), "checkpoints": 2}
    straight = train(small(tmp_path / "straight", **fields))
    train_until(small(tmp_path / "stopped", **fields), 3)
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    stopped = resume(tmp_path / "stopped")
    assert same_weights(straight.folder / "model/model.safetensors", stopped.folder / "model/model.safetensors")
    assert same_weights(straight.folder / "beside.safetensors", stopped.folder / "beside.safetensors")
    record = json.loads((straight.folder / "run.json").read_text())
    sha256 = load_tokenizer(copied).sha256
    assert record["models"] == {"tokenizer": sha256} and straight.bundle.provenance["tokenizer_sha256"] == sha256
    assert 0 <= straight.metrics["validation_token_accuracy"] <= 1
    assert "<h2>Restored patches</h2>" in (straight.folder / "report.html").read_text(encoding="utf-8")
    changed = load_tokenizer(copied)
    changed.coder.codebook.codes[0, 0] += 1
    changed.save(copied, overwrite=True)
    with pytest.raises(RunError, match=r"tokenizer='.*tokenizer' has other weights now than when run .*other began"):
        resume(tmp_path / "other")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "tokenizer='.*' has tokens of 4 x 4 patches .* but the network has 2 x 2 patches"),
        ({"variant": "ViT-Pico/7", "early_image_size": ("14:0.5",)}, "but the network has 2 x 2 patches"),
        ({"tokenizer": "nowhere"}, "tokenizer='nowhere' cannot be loaded"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused_before_the_run(
    fields: dict[str, Any], message: str, small: Make, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(size=(28, 28), channels=1).save(tmp_path / "tokenizer")
    chosen = {"tokenizer": str(tokenizer), "variant": "ViT-Pico/14", **PREDICTED, **fields}
    with pytest.raises(ConfigError, match=message):
        prepare(small(tmp_path / "none", **chosen))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"restart_below": 0.4}, {"shard": "full"}, {"accumulation": 2}], ids=str)
def test_a_tokenizer_on_several_processes_is_that_of_one(
    three_splits: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    sizes = {name: TOKENIZER[name] for name in ("task", "codes", "code_width", "decoder_width", "decoder_depth")}
    fields = {**sizes, "code_decay": 0.9, **fields}
    alone = train(ranks.config_of(three_splits, tmp_path / "one", **fields | {"shard": "none"}))
    first, second = results_of(2, ranks.trained, ranks.config_of(three_splits, tmp_path / "two", **fields))
    assert first == second == pytest.approx(alone.metrics, rel=1e-3)
    one, two = (np.array(values_of(tmp_path / run, "loss", "commitment_loss", "perplexity")) for run in ("one", "two"))
    assert len(one) == 12 and one == pytest.approx(two, rel=1e-4)
    ours, theirs = (load_file(tmp_path / name / "model" / "tokenizer.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(ours["codebook.codes"], theirs["codebook.codes"], rtol=1e-3, atol=1e-4)
