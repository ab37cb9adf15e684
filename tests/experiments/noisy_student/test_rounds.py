"""Tests of the rounds of Noisy Student: their data, resuming after kill -9, and settings that cannot work."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.experiments.noisy_student.conftest import MakeTeacher
from tests.listening import Display
from vitrail.data.formats.pseudo_labels import Pool, read_info
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError, RunError
from vitrail.experiments.noisy_student import Labelling, NoisyStudentConfig, Rounds, check_size, run_rounds
from vitrail.recipes.semi_supervised import NOISY_STUDENT_RECIPES
from vitrail.tasks.distillation import teacher_facts
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record, replace_config
from vitrail.training.log import Log, read_journal
from vitrail.training.run import train
from vitrail.weights.load import load

Tiny = Callable[..., TrainConfig]


def config_of(student: TrainConfig, **fields: Any) -> NoisyStudentConfig:
    names = {field.name for field in dataclasses.fields(Labelling)}
    labelling = {name: value for name, value in fields.items() if name in names}
    rounds = {name: value for name, value in fields.items() if name not in names}
    return NoisyStudentConfig(
        student=student,
        rounds=Rounds(**{"rounds": 1, **rounds}),
        labelling=Labelling(**{"confidence": 0.1, **labelling}),
    )


@pytest.fixture
def student(tiny: Tiny, tmp_path: Path) -> TrainConfig:
    """A student that learns from 60 of 180 training images, with dropout as its noise."""
    config = tiny(steps=4, evaluations=1, dropout=0.1)
    return config.override(data=f"{tmp_path / 'data'}[:60]")


def hash_of(folder: Path) -> dict[str, str]:
    """The SHA-256 of the weights of each model and of each label file below a folder."""
    files = [*folder.rglob("model.safetensors"), *folder.rglob("labels.*"), *folder.rglob("probabilities.npy")]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != "labels.json" and ".best" not in str(path)
    }


class Told(Log):
    """Collects what is told about the rounds, such as "label 1"."""

    def __init__(self) -> None:
        super().__init__(self.receive)
        self.calls: list[str] = []

    def receive(self, event: Mapping[str, Any]) -> None:
        text = event.get("text", "")
        for words, call in (("labels images", "label"), ("learns", "train"), ("validation accuracy", "done")):
            if found := re.match(rf"round (\d): .*{words}", text):
                self.calls.append(f"{call} {found[1]}")


@pytest.mark.slow
def test_two_rounds_are_trained_and_not_repeated(student: TrainConfig, tmp_path: Path) -> None:
    folder = tmp_path / "rounds"
    config, log = config_of(student, rounds=2), Told()
    rounds = run_rounds(config, folder, log)
    assert log.calls == ["train 0", "done 0", "label 1", "train 1", "done 1", "label 2", "train 2", "done 2"]
    assert [one.number for one in rounds] == [0, 1, 2]
    assert all(0 <= one.metrics["validation_accuracy"] <= 1 for one in rounds)
    assert ["test_accuracy" in one.metrics for one in rounds] == [False, False, True], "the last round alone"
    for number in (1, 2):
        info = read_info(folder / f"round-{number}" / "labels")
        assert info.teacher == str(folder / f"round-{number - 1}" / "run") and info.images == 200 - 60 - 21
        record = read_record(folder / f"round-{number}" / "run")
        assert record.config.data.mix == (f"0.750000:{folder / f'round-{number}' / 'labels'}",)
        assert record.images == 60 + sum(count.chosen for count in info.counts)
    mixed = open_data(str(folder / "round-2" / "labels"), validation_share=0.0).train
    keys = {mixed.key(index).rpartition("/")[2] for index in range(len(mixed))}
    own = student.data.open()
    for held in (own.train, own.validation):
        assert not keys & {held.key(index) for index in range(len(held))}, "these are not labelled"
    before, again = hash_of(folder), Told()
    assert run_rounds(config, folder, again) == rounds and hash_of(folder) == before
    assert again.calls == ["train 0", "done 0", "train 1", "done 1", "train 2", "done 2"], "no image is labelled again"
    with pytest.raises(RunError, match=r"confidence was 0\.1 and is 0\.2\. Give"):
        run_rounds(config_of(student, rounds=2, confidence=0.2), folder)
    (folder / "round-2" / "labels" / "labels.csv").unlink()
    (folder / "round-2" / "labels" / "labels.json").unlink()
    longer = Told()
    run_rounds(config_of(student, rounds=3), folder, longer)
    assert longer.calls[-2:] == ["train 3", "done 3"] and "label 2" in longer.calls, "lost labels are made again"
    assert {name: value for name, value in hash_of(folder).items() if "round-3" not in name} == before
    last = folder / "round-3" / "run"
    replace_config(last, read_record(last).config.override(steps=99))  # as an extension records it
    display = Display()
    run_rounds(config_of(student, rounds=3), folder, Log(display))
    assert len(display.notes) == 1 and "steps" in display.notes[0] and "99" in display.notes[0]
    shutil.rmtree(folder / "round-0/run/model")
    assert len(run_rounds(config_of(student, rounds=3), folder)) == 4, "models of finished rounds can be deleted"


SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from vitrail.experiments import noisy_student as rounds
from vitrail.experiments.noisy_student import NoisyStudentConfig, Rounds
from vitrail.experiments.noisy_student import Labelling
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log
import torch
torch.set_num_threads(1)

class Killed:
    '''Kills its own process after some events.'''
    left = int(sys.argv[3])
    def happened(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def listen(self, event):
        text = event.get("text", "")
        is_of_round = text.startswith("round ") and not text.endswith("learns")
        if event["event"] == "tick" or "best" in event or is_of_round:
            self.happened()

events = Killed()
student = TrainConfig.from_plain(json.loads(Path(sys.argv[1]).read_text()))
config = NoisyStudentConfig(student=student, rounds=Rounds(rounds=2), labelling=Labelling(confidence=0.1))
rounds.run_rounds(config, Path(sys.argv[2]), Log(events.listen), lambda done, total: events.happened())
"""


@pytest.mark.slow
def test_a_killed_command_continues_with_the_same_bits(student: TrainConfig, tmp_path: Path) -> None:
    """Every process is killed after some more events than the last one, until one reaches the end."""
    student = student.override(checkpoints=4)
    (tmp_path / "student.json").write_text(json.dumps(student.to_plain()))
    run_rounds(config_of(student, rounds=2), tmp_path / "whole")
    ended = []
    for events in (3, 11, 9, 0):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "student.json"), str(tmp_path / "killed"), str(events)]
        ended.append(subprocess.run(command, capture_output=True, text=True))
    assert [one.returncode for one in ended] == [-signal.SIGKILL] * 3 + [0], [one.stderr for one in ended]
    whole, killed = hash_of(tmp_path / "whole"), hash_of(tmp_path / "killed")
    assert len(whole) == 7 and killed == whole
    resumed = [event["event"] for path in sorted((tmp_path / "killed").rglob("journal.jsonl"))
               for event in read_journal(path) if event["event"] == "resumed"]  # fmt: skip
    assert resumed, "at least one run was stopped in the middle"


@pytest.mark.slow
def test_a_named_teacher_is_measured_and_its_labels_are_learned(
    student: TrainConfig, tmp_path: Path, tiny: Tiny
) -> None:
    teacher = train(tiny(run=str(tmp_path / "teacher"), steps=2, evaluations=1, dropout=0.1))
    log = Told()
    rounds = run_rounds(config_of(student, teacher=str(teacher.folder)), tmp_path / "rounds", log)
    assert log.calls == ["done 0", "label 1", "train 1", "done 1"] and not (tmp_path / "rounds" / "round-0").exists()
    assert rounds[0].metrics["validation_accuracy"] == pytest.approx(teacher.metrics["validation_accuracy"])
    assert load(rounds[1].model).classes == teacher.bundle.classes
    with torch.no_grad():
        teacher.bundle.network.head.bias[0] += 1
    teacher.bundle.save(teacher.folder / "model", overwrite=True)
    with pytest.raises(RunError, match="with other settings: the weights of the teacher have changed"):
        run_rounds(config_of(student, teacher=str(teacher.folder)), tmp_path / "rounds")


@pytest.mark.slow
def test_a_stopped_round_continues_in_a_moved_folder_with_its_own_labels(
    student: TrainConfig, teacher: MakeTeacher, tmp_path: Path
) -> None:
    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            raise KeyboardInterrupt

    config = config_of(student, teacher=teacher(tuple("0123456789"), depth=1), confidence=0.0)
    with pytest.raises(KeyboardInterrupt):
        run_rounds(config, tmp_path / "rounds", Log(stop))
    moved = (tmp_path / "rounds").rename(tmp_path / "moved")
    about = moved / "round-1/labels/labels.json"
    written = about.read_text()
    about.write_text(written.replace(read_info(about.parent).teacher_sha256, "0" * 64))
    with pytest.raises(RunError, match=r"labels of another teacher: .*; delete .*round-1 to begin"):
        run_rounds(config, moved)
    about.write_text(written)
    assert len(run_rounds(config, moved)) == 2


def test_changed_images_are_not_answered_by_earlier_rounds(
    student: TrainConfig, colour_folder: Path, tmp_path: Path
) -> None:
    def begin(event: Mapping[str, Any]) -> None:
        if "the first teacher learns" in event.get("text", ""):
            raise KeyboardInterrupt

    config = config_of(student, unlabelled=str(colour_folder))
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds" / ".noisy-student.json.vitrail-partial").touch()  # by a command that was killed
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_rounds(config, tmp_path / "rounds", Log(begin))
    picture = next(colour_folder.rglob("*.png"))
    picture.rename(picture.with_name("other.png"))
    with pytest.raises(RunError, match="the images, labels or splits have changed"):
        run_rounds(config, tmp_path / "rounds", Log(begin))


@pytest.mark.parametrize(
    ("changes", "fields", "error", "message"),
    [
        ({}, {"pseudo_ratio": 0.0}, ConfigError, r"pseudo_ratio=0\.0"),
        ({"dropout": 0.0, "flip": False, "erase": 0.0}, {}, ConfigError, "the student learns without noise, so it"),
        ({"validation_share": 0.0, "keep": "last"}, {}, ConfigError, r"validation_share=0\.0: Noisy Student compares"),
        ({}, {"unlabelled": "nowhere"}, DataError, "data 'nowhere' does not exist"),
    ],
)
def test_settings_that_cannot_work_leave_nothing_behind(
    changes: dict[str, Any], fields: dict[str, Any], error: type[Exception], message: str,
    student: TrainConfig, tmp_path: Path,
) -> None:  # fmt: skip
    with pytest.raises(error, match=message):
        run_rounds(config_of(student.override(**changes), **fields), tmp_path / "rounds")
    assert not (tmp_path / "rounds").exists()


def test_a_smaller_student_is_refused_but_not_one_of_smaller_images(
    student: TrainConfig, teacher: MakeTeacher, tmp_path: Path
) -> None:
    names = tuple(str(number) for number in range(10))
    model, equal = teacher(names, depth=3), teacher(names)
    with pytest.raises(ConfigError, match=rf"teacher='{model}' has [\d,]+ weights .* the student has only [\d,]+"):
        run_rounds(config_of(student, teacher=model), tmp_path / "rounds")
    small = student.override(channels=3, image_size=(7, 7), mean=(0.5,), std=(0.5,)).model
    check_size(small.resolve(num_classes=10, image_size=(7, 7), channels=3), teacher_facts(equal), equal)


def test_a_teacher_with_other_classes_is_refused(student: TrainConfig, teacher: MakeTeacher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has other classes than data .*: it lacks 3, .*, and it also has"):
        run_rounds(config_of(student, teacher=teacher(("0", "1", "2", "x"))), tmp_path / "rounds")


def test_held_out_images_are_not_labelled(student: TrainConfig, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    message = rf"unlabelled='{data}' contains 21 images of the validation split of data '{data}\[:60\]', such as \d+"
    with pytest.raises(DataError, match=message):
        run_rounds(config_of(student, unlabelled=data), tmp_path / "rounds")


@pytest.mark.slow
def test_copies_of_held_out_images_in_the_same_data_are_tolerated_as_in_training(
    tiny: Tiny, colour_folder: Path, tmp_path: Path
) -> None:
    for path in sorted(colour_folder.rglob("*.png")):
        shutil.copy(path, path.with_stem(f"{path.stem}-copy"))
    student = tiny(data=f"{colour_folder}[:20]", steps=2, evaluations=1, dropout=0.1)
    assert len(run_rounds(config_of(student), tmp_path / "rounds")) == 2


def test_several_labels_per_image_are_refused(tiny: Tiny, colour_folder: Path, tmp_path: Path) -> None:
    rows = [
        f"{path.relative_to(colour_folder)},{number % 2},1" for number, path in enumerate(colour_folder.rglob("*.png"))
    ]
    (colour_folder / "labels.csv").write_text("\n".join(["path,rose,daisy", *rows]))
    student = tiny(data=f"{colour_folder / 'labels.csv'}[:20]", loss="sigmoid")
    with pytest.raises(DataError, match="has images with several labels, which Noisy Student cannot learn"):
        run_rounds(config_of(student), tmp_path / "rounds")


def test_other_folders_are_left_alone(student: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="exists and does not hold rounds of Noisy Student: it has no noisy-student"):
        run_rounds(config_of(student), tmp_path / "mine")
    (tmp_path / "mine" / "noisy-student.json").write_text("{}")
    with pytest.raises(RunError, match=r"noisy-student\.json is damaged: KeyError\('format'\); choose another --run"):
        run_rounds(config_of(student), tmp_path / "mine")
    recorded = {"format": 2, "teacher": None, "settings": {}, "fingerprint": ""}
    (tmp_path / "mine" / "noisy-student.json").write_text(json.dumps(recorded))
    with pytest.raises(RunError, match="with other settings: format was 2 and is 1"):
        run_rounds(config_of(student), tmp_path / "mine")


def test_the_pool_and_the_mixture_follow_from_the_settings(tiny: Tiny) -> None:
    student = tiny().override(data="bundled[:500]", mix=("0.2:more",), subset_seed=3)
    config = config_of(student, pseudo_ratio=14.0)
    assert config.pool == Pool(spec="bundled[:500]", rest=True, subset_seed=3, validation_share=0.1,
                               cut_method="threshold")  # fmt: skip
    mixed = config.round_config("runs/x", "labels").data.mix
    assert mixed == ("0.2:more", f"{0.8 * 14 / 15:.6f}:labels"), "14 images with pseudo labels for each labelled one"
    assert config.round_config("runs/x", None).data.mix == ("0.2:more",)
    assert config_of(student, unlabelled="fractals:3:9").pool == Pool(spec="fractals:3:9")


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY_STUDENT_RECIPES)
def test_recipes_take_two_steps(name: str, tmp_path: Path, tiny: Tiny) -> None:
    recipe = NOISY_STUDENT_RECIPES[name]()
    assert recipe == NOISY_STUDENT_RECIPES[name](), "a recipe is the same every time"
    tiny()  # makes the data
    shrunk = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32}
    side = {"demo": 32, "folder": 64, "vit-l16-i1k": 32}[name]
    student = recipe.student.override(
        data=f"{tmp_path / 'data'}[:60]", steps=2, batch_size=6, device="cpu", threads=0, evaluations=1, checkpoints=1,
        image_size=(side, side), validation="auto", validation_share=0.1, **shrunk,
        **({"warmup": "1 steps"} if name == "vit-l16-i1k" else {}),
    )  # fmt: skip
    config = dataclasses.replace(
        recipe, student=student, rounds=dataclasses.replace(recipe.rounds, unlabelled=None, rounds=1),
        labelling=dataclasses.replace(recipe.labelling, confidence=0.0, images_per_class=4),
    )  # fmt: skip
    rounds = run_rounds(config, tmp_path / "rounds")
    assert rounds[1].labels is not None and all(count.chosen in (0, 4) for count in rounds[1].labels.counts)
