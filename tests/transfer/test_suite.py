"""Tests of suites: files of tasks, the result of each task, and the means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.make import idx_bytes, keys_of, make_colour_folder, targets_of
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluators import evaluators_of, measure
from vitrail.evaluation.outputs import Outputs
from vitrail.models.variants import create
from vitrail.transfer.suite import SuiteResult, TaskResult, open_task, read_suite, run_suite, suite_as_plain, suites
from vitrail.weights.bundle import Bundle

TASKS = """
name = "colours"

[evaluators.knn]
k = [1]

[[tasks]]
name = "near"
group = "here"
data = "near"
held_out_fraction = 0.3

[[tasks]]
name = "drawn"
group = "fractals"
data = "fractals:3:12:0:16"
train = "[:18]"
held_out_fraction = 0.4
evaluators.linear.penalties = [0.1, 1]

[[tasks]]
name = "far"
group = "here"
where = "ask the one who took the pictures"

[[tasks]]
name = "gone"
group = "fractals"
data = "no/such/folder"
"""


@pytest.fixture
def bundle() -> Bundle:
    """A model without a head."""
    torch.manual_seed(0)
    network = create(
        "ViT-Pico/7", image_size=(14, 21), num_classes=0, width=16, depth=1, heads=2, mlp_width=32, position_std=0.5
    )
    return Bundle(network, (), Preprocess(image_size=(14, 21)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A suite of four tasks. The data of two tasks exists, for one of them beside the file."""
    make_colour_folder(tmp_path / "suite" / "near")
    path = tmp_path / "suite" / "colours.toml"
    path.write_text(TASKS)
    return path


def written(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def test_every_suite_in_the_package_can_be_read() -> None:
    assert set(suites()) == {"fewshot", "offline", "paper-table-5", "vtab-1k"}
    for name, path in suites().items():
        suite = read_suite(name)
        assert suite.name == name and suite.about
        for task in suite.tasks:
            assert task.data or task.where
            assert suite.evaluators_for(task), path


def test_suites_have_the_published_tasks() -> None:
    """VTAB-1k has 19 tasks of 1,000 images, of which 200 choose the settings."""
    suite = read_suite("vtab-1k")
    groups = [task.group for task in suite.tasks]
    assert [groups.count(group) for group in ("natural", "specialised", "structured")] == [7, 4, 8]
    assert {task.train for task in suite.tasks} == {"[:1000]"}
    expected = evaluators_of("linear", {"linear": {"held_out": 0.2}})
    assert suite.evaluators_for(suite.tasks[0])["linear"] == expected["linear"]


@pytest.mark.parametrize(("task", "images", "pool", "measured"), [
    ("uc_merced", 2100, 1000, 1100), ("colorectal_histology", 5000, 2000, 3000)
])  # fmt: skip
def test_shots_are_drawn_from_big_visions_number_of_images_and_all_others_are_measured(
    task: str, images: int, pool: int, measured: int, tmp_path: Path
) -> None:
    """In big_vision's configs/common_fewshot.py, train[:1000] and train[1000:]."""
    (tmp_path / task).mkdir()
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (images, 2, 3), np.uint8), (np.arange(images) % 8).astype(np.uint8)
    (tmp_path / task / "train-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
    (tmp_path / task / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    (found,) = (each for each in read_suite("fewshot").tasks if each.name == task)
    data = open_task(found, tmp_path, lambda note: None)
    learned, others = ({*(keys_of(source) or ())} for source in (data.train, data.held_out))
    assert (len(learned), len(others)) == (pool, measured) and not learned & others
    counts = np.bincount(targets_of(data.train))
    assert counts.max() - counts.min() <= 1, "every class has its fraction of the pool"


@pytest.mark.slow
def test_tasks_are_measured_as_evaluators_do_and_others_left_out(bundle: Bundle, file: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    begun: list[str] = []
    result = run_suite(
        Outputs(bundle, on_note=notes.append), read_suite(file), on_task=lambda task: begun.append(task.name)
    )
    assert begun == ["near", "drawn", "far", "gone"]
    near, drawn, far, gone = result.rows
    for row, spec, share, known in (
        (near, str(file.parent / "near"), 0.3, evaluators_of("knn", {"knn": {"k": [1]}})),
        (drawn, "fractals:3:12:0:16[:18]", 0.4, evaluators_of("linear", {"linear": {"penalties": [1.0, 0.1]}})),
    ):
        splits = open_data(spec, validation_share=share)
        assert row.metrics == measure(known, Outputs(bundle), splits.train, splits.validation)
    assert drawn.metrics["training_images"] == 18 and any(note.startswith("drawn: 18 of ") for note in notes)
    assert far.reason == "ask the one who took the pictures"
    assert gone.reason is not None and "'no/such/folder' does not exist" in gone.reason


def test_means_say_of_how_many_tasks_they_are(file: Path) -> None:
    tasks = read_suite(file).tasks
    rows = (
        TaskResult(tasks[0], {"knn_1": 0.5, "linear": 0.25, "linear_penalty": 1.0, "images": 3.0}),
        TaskResult(tasks[1], {"knn_1": 1.0, "fewshot_1": 0.5, "fewshot_1_deviation": 0.1}),
        TaskResult(tasks[2], {"knn_1": 0.75, "accuracy": 0.5, "accuracy_low": 0.4}),
        TaskResult(tasks[3], reason="gone"),
    )
    result = SuiteResult(read_suite(file), rows)
    assert result.groups() == ("here", "fractals")
    assert result.columns() == ("knn_1", "linear", "fewshot_1", "accuracy")
    assert result.means() == {
        "here": {"knn_1": (0.625, 2), "linear": (0.25, 1), "accuracy": (0.5, 1)},
        "fractals": {"knn_1": (1.0, 1), "fewshot_1": (0.5, 1)},
        None: {"knn_1": (0.75, 3), "linear": (0.25, 1), "fewshot_1": (0.5, 1), "accuracy": (0.5, 1)},
    }
    plain = json.loads(json.dumps(suite_as_plain(result)))
    assert plain["all"]["knn_1"] == {"mean": 0.75, "tasks": 3}
    assert plain["groups"]["here"]["linear"] == {"mean": 0.25, "tasks": 1}
    assert plain["tasks"]["gone"] == {"group": "fractals", "skipped": "gone"}
    assert plain["tasks"]["near"]["metrics"]["images"] == 3


def test_a_task_that_cannot_be_measured_is_left_out_with_the_reason(bundle: Bundle, file: Path) -> None:
    written(file, "[evaluators.knn]\nk = [1]", "[evaluators.fewshot]\nshots = [99]")
    near = run_suite(Outputs(bundle), read_suite(file)).rows[0]
    assert near.reason is not None and "99 shots need 99 training images per class" in near.reason
    written(file, "held_out_fraction = 0.3", 'held_out_fraction = 0.3\nsplit = "test"')
    with pytest.raises(DataError, match="has no test split"):
        open_task(read_suite(file).tasks[0], None, lambda note: None)


def test_a_suite_of_which_nothing_can_be_measured_is_an_error(bundle: Bundle, file: Path) -> None:
    written(file, 'data = "near"', 'data = "nearer"')
    written(file, "fractals:3:12:0:16", "nor/this")
    with pytest.raises(DataError, match=r"suite colours: no task could be measured:\n  near: .*\n  drawn: "):
        run_suite(Outputs(bundle), read_suite(file))


@pytest.mark.slow
def test_a_folder_named_by_data_comes_first(bundle: Bundle, file: Path, tmp_path: Path) -> None:
    make_colour_folder(tmp_path / "data" / "far", images=20)
    far = run_suite(Outputs(bundle), read_suite(file), folder=tmp_path / "data").rows[2]
    assert far.reason is None and far.metrics["images"] + far.metrics["training_images"] == 60


def test_tasks_of_numbers_are_measured_by_r2(bundle: Bundle, brightness: Path, tmp_path: Path) -> None:
    path = tmp_path / "numbers.toml"
    task = f'name = "grey"\ngroup = "numbers"\ndata = "{brightness}"\nnumbers = ["brightness"]'
    path.write_text(f'name = "numbers"\n[evaluators.linear]\n[evaluators.knn]\nk = [1]\n[[tasks]]\n{task}\n')
    result = run_suite(Outputs(bundle), read_suite(path))
    assert result.rows[0].metrics["linear_r2"] > 0.8 and "linear_mean_absolute_error" in result.rows[0].metrics
    assert result.columns() == ("linear_r2", "linear_standardised_error", "knn_1_r2", "knn_1_standardised_error")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('group = "here"', 'gruop = "here"', r"colours.toml: task near: unknown field 'gruop'; nearest: group"),
        ('name = "colours"', 'nam = "colours"', r"colours.toml: unknown field 'nam'; nearest: name"),
        ("k = [1]", "kk = [1]", r"colours.toml: task near: evaluator knn: unknown field 'kk'; nearest: k"),
        ("[evaluators.knn]", "[evaluators.kn]", r"task near: unknown evaluator 'kn'; nearest: knn"),
        ("[evaluators.knn]\nk = [1]", "", r"task near: neither the task nor the suite has evaluators; add a table"),
        ('name = "drawn"', 'name = "near"', r"colours.toml: two tasks have the name 'near'; give each"),
        ('name = "colours"', "name = ", r"colours.toml: the suite is not valid TOML"),
        ('group = "here"', 'group = "here"\nsplit = "tset"', r"colours.toml: task near: split='tset' is not one of"),
        ('name = "near"', 'name = "a/b"', r"colours.toml: task a/b: name='a/b' cannot be the name of a folder; use"),
        ('name = "near"', 'name = ".."', r"task \.\.: name='\.\.' cannot be the name of a folder"),
        ("[evaluators.knn]", "[finetune]\nheld_out = 1.0\n[evaluators.knn]", "finetune.held_out=1.0 is not in"),
        ("[evaluators.knn]", '[finetune]\ntable_row = "x"\n[evaluators.knn]', "finetune.table_row='x' is not"),
    ],
)
def test_a_wrong_file_is_explained(file: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_suite(written(file, old, new))


def test_a_file_may_begin_with_the_mark_of_some_editors(file: Path) -> None:
    read = read_suite(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert read_suite(file) == read


def test_a_suite_without_a_file_or_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: the suite cannot be read: No such file or directory"):
        read_suite(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text('name = "empty"\ntasks = []')
    with pytest.raises(ConfigError, match=r"empty.toml: the suite has no tasks; add tables \[\[tasks\]\]"):
        read_suite(tmp_path / "empty.toml")


@pytest.mark.slow
def test_evaluate_measures_a_suite(
    bundle: Bundle, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    model = bundle.save(tmp_path / "model")
    assert main(["evaluate", str(model), "--suite", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "mean of here" in shown and "(1 of 2)" in shown and "mean of 4 tasks" in shown
    assert "skipped far: ask the one who took the pictures" in shown
    assert main(["evaluate", str(model), "--suite", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == suite_as_plain(run_suite(Outputs(bundle), read_suite(file)))
    assert "read from the cache" in captured.err
    assert main(["evaluate", str(model), "--suite", str(file), "--strict"]) == 2
    assert "task far: ask the one" in capsys.readouterr().err
