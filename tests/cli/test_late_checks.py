"""Tests that options are checked before a model or data is read: the model and the data of these calls do not exist."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from vitrail.cli import main

FINETUNE = "finetune no/model --data no/data"
TRAIN = "train --init no/model --data no/data"

WRONG = {
    f"{FINETUNE} --learning-rates -1": "--learning-rates: -1.0 must be one or more numbers above 0",
    f"{FINETUNE} --learning-rate 1 --learning-rates 1 2": "--learning-rate: 1.0 and --learning-rates 1.0 2.0 exclude",
    f"{FINETUNE} --protocol bit --learning-rates 1 2": "BiT's rule has one learning rate",
    f"{FINETUNE} --table-row vtab": "--table-row: 'vtab' is a row of the paper's Table 4; choose --protocol 'paper'",
    f"{FINETUNE} --batch-size 0": "--batch-size: 0 is less than 1",
    f"{FINETUNE} --device nope": "--device: 'nope' cannot be used here",
    f"{FINETUNE} --run taken": "run folder 'taken' exists",
    f"{FINETUNE} --probe-every 5": "--probe-every: it has an effect only with --probe; change that, or leave",
    f"{FINETUNE} --subset-seed 5": "--subset-seed: it has an effect only with --per-class or an amount such as [:1000]",
    "finetune no/model --suite offline --data . --learning-rates 0": "--learning-rates: 0.0 must be one or more",
    "finetune no/model --suite offline --data . --device nope": "--device: 'nope' cannot be used here",
    f"{TRAIN} --learning-rate -1": "--learning-rate: -1.0 is not above 0",
    f"{TRAIN} --train-blocks -1": "--train-blocks: -1 is less than 0",
    f"{TRAIN} --device nope": "--device: 'nope' cannot be used here",
    f"{TRAIN} --run taken": "run folder 'taken' exists",
    "train --data no/data --probe-every 5": "--probe-every: it has an effect only with --probe",
    "train --data no/data --momentum 0.5": "--momentum: it has an effect only with --optimizer sgd, lars",
    "train --data no/data --optimizer sgd --beta2 0.5": "--beta2: it has an effect only with --optimizer adamw, lamb",
    "train --data no/data --rsqrt-timescale 0.5": "--rsqrt-timescale: it has an effect only with --schedule rsqrt",
    "train --data no/data --average-start capped": "--average-start: it has an effect only with --average",
    "train --data no/data --mixup-per batch": "--mixup-per: it has an effect only with --mixup",
    "train --data no/data --randaugment-rule big-vision": "it has an effect only with --randaugment-layers",
    "train --data no/data --crop-rule tensorflow": "--crop-rule: it has an effect only with --crop-area",
    "train --data no/data --validation train[9:] --validation-share 0.2": "it has an effect unless --validation is",
    "train --data no/data --steps 5 --epochs 1": "--steps and --epochs exclude each other; give only one of them",
    "evaluate no/model --suite offline --data no/data": "--data: 'no/data' is not a folder; with --suite, name",
    "evaluate no/model --data no/data --class-names nope.txt": "cannot read nope.txt",
    "evaluate no/model --data no/data --real nope.json": "cannot read nope.json",
    "evaluate no/model --data no/data --shots 5": "--shots: only fewshot uses it, but --by is accuracy",
    "evaluate no/model --data no/data --by knn --k 0": "evaluator knn: --k 0 must be whole numbers of neighbours",
    "evaluate no/model --data no/data --batch-size 0": "--batch-size: 0 is less than 1",
    "train --data no/data --overwrite": "--overwrite: it has an effect only with --run, which names the folder",
    "data check no/data --validation train[9:] --validation-share 0.2": "--validation-share: 0.2 has no effect",
    "bench load --batch-size 8": "--batch-size: bench load does not use it; leave --batch-size out",
    "bench load --precision bf16": "--precision: bench load does not use it",
    "bench train --largest-batch --batch-size 8": "--batch-size: --largest-batch does not use it",
    "bench train --scaling batch --no-profile": "--profile: --scaling does not use it",
    "models --image-size 0 0": "--image-size: 0 0 is less than 1",
    "models --layers --num-classes 5": "--num-classes: --layers compares single layers, which do not have it",
    "bench data --entries 5000 --batch-size 3": "--entries: it measures only the opening of a folder; leave --batch",
    "bench data --entries 1": "--entries: 1 is less than 2",
}


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_or_useless_option_is_refused_before_anything_is_read(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main(shlex.split(command)) == 2
    assert WRONG[command] in capsys.readouterr().err


def test_an_option_without_effect_is_accepted_if_another_option_gives_it_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--preset light2 --mixup-per batch --average 0.9 --average-start initial --probe knn --probe-every 5"
    assert main(["train", "--data", "no/data", *words.split()]) == 2
    assert "no/data' does not exist" in capsys.readouterr().err
