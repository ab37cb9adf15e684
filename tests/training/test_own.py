"""Tests of the user's own data and network: training, resuming with the same objects, and broken rules."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitrail
from tests.listening import Display
from tests.make import MemorySource, make_masks_folder, make_voc_folder, wait_for
from tests.training.jobs import Make, train_until
from vitrail.data.batch import Batch
from vitrail.data.objects import Objects
from vitrail.data.source import Sample, soft_target_of, target_kind
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import BundleError, ConfigError, DataError, DestinationError, RunComplete, RunError
from vitrail.tasks.classification import ClassificationObjective
from vitrail.tasks.own_model import OwnModel
from vitrail.tasks.task import LossOutput, Objective
from vitrail.testing import check_source as checked
from vitrail.training.config import TrainConfig
from vitrail.training.folder import summarise
from vitrail.training.job import Probe, check_source
from vitrail.training.log import Log, read_journal
from vitrail.training.run import resume, train
from vitrail.weights.bundle import Bundle


class Stripes(MemorySource):
    """Images of 9 x 14 whose brightness shows the class, or numbers if `numbers` is true."""

    def __init__(self, count: int = 40, *, numbers: bool = False) -> None:
        draws = [np.random.default_rng(index).integers(0, 60, (9, 14, 3), dtype=np.uint8) for index in range(count)]
        labels = [1000.0 + 150 * (index % 2) if numbers else index % 2 for index in range(count)]
        super().__init__(
            [pixels + np.uint8(150 * (index % 2)) for index, pixels in enumerate(draws)],
            labels=[(label,) for label in labels] if numbers else labels,
            keys=[f"stripe {index}" for index in range(count)],
            classes=("brightness",) if numbers else ("dark", "light"),
        )


class Small(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.AvgPool2d(3), nn.Flatten(), nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, outputs))
        self(torch.zeros(1, 3, 9, 12))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


@pytest.fixture
def config(tmp_path: Path) -> Make:
    """Makes configs of short runs on images of 9 x 12; fields can be replaced."""

    def make(**fields: Any) -> TrainConfig:
        defaults = {
            "image_size": (9, 12), "steps": 40, "batch_size": 8, "device": "cpu", "precision": "float32", "threads": 1,
            "evaluations": 4, "checkpoints": 1, "validation_share": 0.2, "learning_rate": 1e-2,
            "run": str(tmp_path / "run"),
        }  # fmt: skip
        return TrainConfig().override(**{**defaults, **fields})

    return make


SIZES = {"variant": "ViT-Pico/3", "width": 16, "depth": 1, "heads": 2, "mlp_width": 16}


def seeded(outputs: int = 2) -> Small:
    torch.manual_seed(3)
    return Small(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("as_splits", [False, True])
def test_an_own_source_is_trained_on_and_cut_as_any_data(as_splits: bool, config: Make) -> None:
    data = Splits(Stripes(), None, Stripes(10), title="my stripes") if as_splits else Stripes()
    result = train(config(**SIZES), data=data)
    assert result.metrics["validation_accuracy"] == 1.0
    assert ("test_accuracy" in result.metrics) is as_splits
    assert result.bundle.provenance["data"] == ("my stripes" if as_splits else "Stripes")
    bundle = vitrail.load(result.folder)
    assert bundle.classes == ("dark", "light")
    assert bundle.predict([Stripes()[1].image])[0].label == "light"


def test_an_own_network_is_trained_and_predicts(config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    display = Display()
    result = train(config(keep="best"), data=Stripes(), network=seeded(), log=Log(display))
    assert any(note.startswith("data 'Stripes' has no validation split") for note in display.notes)
    assert result.metrics["validation_accuracy"] == 1.0
    assert isinstance(result.bundle, OwnModel)
    assert [one.label for one in result.bundle.predict([Stripes()[0].image, Stripes()[1].image])] == ["dark", "light"]
    again = Small()
    again.load_state_dict(load_file(result.folder / "model" / "model.safetensors"))
    images = torch.randn(3, 3, 9, 12)
    assert torch.equal(again(images), result.bundle.network(images))
    with pytest.raises(BundleError, match="unknown layout"):
        vitrail.load(result.folder / "model")
    with pytest.raises(ConfigError, match=r"^embed: Vitrail knows only the outputs of a network of your own class"):
        result.bundle.embed([Stripes()[0].image])
    assert vitrail.with_engine(result.bundle).engine is None
    with pytest.raises(RunComplete):
        resume("~/run", data=Stripes(), network=seeded())
    assert (saved := result.bundle.save("~/copy")) == tmp_path / "copy"
    assert [path.name for path in saved.iterdir()] == ["model.safetensors"]
    result.bundle.save(tmp_path / "copy", overwrite=True)
    save_file({"theirs": torch.zeros(2)}, tmp_path / "copy" / "model.safetensors")
    with pytest.raises(DestinationError, match=r"model\.safetensors"):
        result.bundle.save(tmp_path / "copy", overwrite=True)
    with pytest.raises(ConfigError, match=r"^stored='bfloat16': the weights of a network of your own class"):
        result.bundle.save(tmp_path / "rounded", stored="bfloat16")


@pytest.mark.slow
def test_a_network_of_the_package_is_saved_whole(config: Make) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "variant"}
    network = vitrail.create("ViT-Pico/3", image_size=(9, 12), num_classes=2, **sizes)
    result = train(config(steps=2, evaluations=1), data=Stripes(), network=network)
    assert vitrail.load(result.folder).network.config == network.config


def test_a_changed_network_of_the_package_is_refused_before_the_first_step(config: Make) -> None:
    network: Any = vitrail.create("ViT-Pico/3", num_classes=2, image_size=(9, 12), depth=1)
    network.blocks[0].mlp.activation = nn.ReLU()
    with pytest.raises(BundleError, match="the network cannot be saved, because a new network with its config"):
        train(config(), data=Stripes(), network=network)


@pytest.mark.slow
def test_an_own_network_learns_numbers(config: Make) -> None:
    result = train(config(task="regression", steps=80), data=Stripes(numbers=True), network=seeded(1))
    assert result.metrics["validation_r2"] > 0.9
    (low, high) = result.bundle.predict([Stripes()[0].image, Stripes()[1].image])
    assert low.values[0] == pytest.approx(1000, abs=40) and high.values[0] == pytest.approx(1150, abs=40)
    assert low.names == ("brightness",)


@pytest.mark.slow
def test_a_stopped_run_needs_the_same_objects(config: Make, tmp_path: Path) -> None:
    short = {"steps": 12, "evaluations": 2}
    straight = train(config(run=str(tmp_path / "straight"), **short), data=Stripes(), network=seeded())
    train_until(config(**short), 7, data=Stripes(), network=seeded())
    run = tmp_path / "run"
    rule = r"was started with data=\.\.\. and network=\.\.\. in Python; pass the same "
    with pytest.raises(RunError, match=f"{rule}data and network to vitrail.resume$"):
        resume(run)
    with pytest.raises(RunError, match=f"{rule}network to vitrail.resume$"):
        resume(run, data=Stripes())
    with pytest.raises(RunError, match=r"the data of run .* has changed"):
        resume(run, data=Stripes(42), network=seeded())
    resumed = resume(run, data=Stripes(), network=seeded())
    expected, found = straight.bundle.network.state_dict(), resumed.bundle.network.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.slow
def test_objects_that_the_run_did_not_have_are_refused(config: Make, tiny: Make) -> None:
    train_until(tiny(), 4)
    with pytest.raises(RunError, match=r"was started without data=\.\.\.; resume it without data="):
        resume(Path(tiny().run.folder or ""), data=Stripes())


class Alone(nn.Module):
    """A network with a fault, for images of 9 x 12."""

    def __init__(self, make: Callable[[Tensor], Any], *, trained: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)
        self.make = make

    def forward(self, images: Tensor) -> Any:
        return self.make(images * self.scale)


def two_means(images: Tensor) -> Tensor:
    return images.mean(dim=(2, 3))[:, :2]


@pytest.mark.parametrize(
    ("network", "rule"),
    [
        (lambda: Alone(two_means, trained=False), "a network must have a parameter that requires gradients"),
        (lambda: Alone(lambda images: images @ torch.ones(7)), "Alone breaks a rule .*must take images of"),
        (lambda: Alone(lambda images: images), r"must return floats of \(b, 2\), .* returned a tensor of \(2, 3,"),
        (lambda: Alone(lambda images: [two_means(images)]), r"one for each output, but it returned list$"),
        (lambda: Alone(lambda images: two_means(images).long()), r"must return floats of \(b, 2\)"),
        (lambda: seeded().to("meta"), "has weights that cannot be trained"),
        (torch.inference_mode()(seeded), "has weights that cannot be trained"),
        (lambda: torch.compile(seeded(), backend="eager"), r"is a .*nn\.Module"),
        (lambda: "small", r"is a .*nn\.Module"),
    ],
)
def test_a_network_that_breaks_a_rule_is_refused(
    network: Callable[[], Any], rule: str, config: Make, tmp_path: Path, types_unchecked: None
) -> None:
    with pytest.raises(ConfigError, match=f"^network.*{rule}"):
        train(config(), data=Stripes(), network=network())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), [
    ("init", "m"), ("layer_decay", 0.9), ("compile", "on"), ("precision", "float8"), ("probe", "knn"),
    ("early_image_size", ("6:0.5",)),
])  # fmt: skip
def test_settings_that_need_a_network_of_the_package_are_refused(
    name: str, value: Any, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.training.run.open_initial", lambda start: None)
    monkeypatch.setattr("vitrail.training.job.resolve_precision", lambda precision, device: precision)
    rule = rf"^{name}.* cannot be combined with network=\.\.\.; \w+ works only for networks that are built"
    with pytest.raises(ConfigError, match=rule):
        train(config(**{name: value}), data=Stripes(), network=seeded())


def changed(**members: Any) -> Stripes:
    """A source with some members replaced."""
    source = type("Stripes", (Stripes,), {name: value for name, value in members.items() if callable(value)})()
    vars(source).update({name: value for name, value in members.items() if not callable(value)})
    return source


PICTURE = np.zeros((4, 5, 3), np.uint8)

BROKEN: list[tuple[Any, str]] = [
    (changed(classes=["dark", "light"]), "classes must be a tuple of names, not ['dark', 'light']"),
    (changed(classes=("dark", "dark")), "classes must be different names"),
    (changed(labels=[]), "a source must have at least one sample"),
    (changed(__getitem__=lambda self, index: (PICTURE, 0)), "source[0] must be a Sample(key, image, target)"),
    (changed(has_soft_targets=True), "soft targets need both has_soft_targets"),
    (changed(soft_target=lambda self, index: [0, 1]), "soft targets need both has_soft_targets"),
    (changed(__getitem__=lambda self, index: None), "source[0] must be a Sample(key, image, target), not None"),
    ([1, 2], "a source must have classes"),
    (Stripes, "a source must be an object, not the class Stripes"),
    (changed(key=lambda self, index: index), "key(0) must be a name, not 0"),
    (changed(key=lambda self, index: f"{index // 2}"), "two samples must not have the same key"),
    (changed(target=lambda self, index: 7), "target(0) is 7, but the targets of this source must be None or an index"),
    (changed(target=lambda self, index: (0, 2)), "target(0) is (0, 2), but the targets of this source must be None or"),
    (changed(target=lambda self, index: np.int64(index % 2) if index == 4 else index % 2), "target(4) is np.int64(0)"),
    (changed(target=lambda self, index: 1.5 if index == 31 else index % 2), "target(31) is 1.5, but the targets"),
    *(
        (changed(target=lambda self, index, box=box: Objects.of([0], [box])), "left, top, right, bottom) in [0, 1]")
        for box in ((1, 2, 7, 5), (0.5, 0.5, 0.2, 0.2), (0.1, 0.1, 0.1, 0.3), (0.1, float("nan"), 0.5, 0.6))
    ),
    (changed(__getitem__=lambda self, index: Sample("other", PICTURE, index % 2)), "must have the key and the target"),
    (
        changed(__getitem__=lambda self, index: Sample(self.key(index), PICTURE.astype(np.float32), index % 2)),
        "the image of 'stripe 0' must be bytes or a uint8 array of (height, width, 1 or 3)",
    ),
]


@pytest.mark.parametrize(("source", "rule"), BROKEN, ids=[rule[:30] for _, rule in BROKEN])
def test_a_source_that_breaks_a_rule_is_refused(source: Any, rule: str, types_unchecked: None) -> None:
    message = rf"^data: \w+ breaks a rule of its contract: .*{re.escape(rule)}"
    with pytest.raises(ConfigError, match=message):
        check_source(source)
    with pytest.raises(ConfigError, match=message):
        checked(source)


def test_classes_in_an_array_are_named(config: Make, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match="classes must be a tuple of names"):
        train(config(**SIZES), data=changed(classes=np.array(["dark", "light"])))


def test_settings_of_another_network_are_noted(config: Make) -> None:
    display = Display()
    train(config(steps=1, dropout=0.3), data=Stripes(), network=Small(), log=Log(display))
    assert any("dropout=0.3" in note and "no effect" in note for note in display.notes)


def test_splits_with_the_same_keys_are_noted(config: Make) -> None:
    display = Display()
    train(config(steps=1, **SIZES), data=Splits(Stripes(), Stripes(10), None), log=Log(display))
    assert any("10 samples of the validation split have keys of other splits" in note for note in display.notes)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda loss: (loss, {}), "must return a LossOutput of tensors"),
        (lambda loss: LossOutput(loss, {"x": 1.0}), "must return a LossOutput of tensors"),
        (lambda loss: LossOutput(loss.expand(3), {}), r"single numbers, but one has the shape \(3,\)"),
        (lambda loss: LossOutput(loss, {"x": loss.expand(3)}), r"single numbers, but one has the shape \(3,\)"),
        (lambda loss: LossOutput(loss, {"loss": loss.detach()}), "other names than 'loss'"),
        (lambda loss: LossOutput(loss, {"step": loss}), "other names than 'step'"),
        (lambda loss: LossOutput(loss.detach(), {}), "a weight that requires gradients"),
    ],
)
def test_an_objective_must_return_a_loss_and_metrics(
    change: Callable[[Tensor], Any], rule: str, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(ClassificationObjective):
        counted = Objective.counted

        def forward(self, batch: Batch) -> LossOutput:
            return change(super().forward(batch).loss)

    monkeypatch.setattr("vitrail.tasks.classification.ClassificationObjective", Wrong)
    with pytest.raises(ConfigError, match=rule):
        train(config(steps=3, evaluations=1, **SIZES), data=Stripes())


@pytest.mark.usefixtures("types_unchecked")
def test_losses_of_one_element_and_other_iterables_of_probes_are_accepted(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(ClassificationObjective):
        counted = Objective.counted

        def forward(self, batch: Batch) -> LossOutput:
            return LossOutput(super().forward(batch).loss.reshape(1), {"name": torch.ones(1)})

    monkeypatch.setattr("vitrail.tasks.classification.ClassificationObjective", Own)
    probes = (Probe(name, 1, lambda *given: {}) for name in "ab")
    run = train(config(steps=1, **SIZES), data=Stripes(), probes=probes)  # type: ignore[arg-type]
    assert [event["name"] for event in read_journal(run.folder / "journal.jsonl") if event["event"] == "step"] == [1.0]


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("found", "rule"),
    [
        (None, "must return numbers by name, not None"),
        ([1.0], "must return numbers by name"),
        ({"a": "high"}, "must return numbers by name"),
        ({"a": torch.ones(2)}, "must return numbers by name"),
        ({"event": 1.0}, "cannot be called 'event'"),
        ({"a": np.float32(0.5), "b": torch.tensor(2)}, ""),
    ],
)
def test_what_a_probe_returns_is_checked(found: Any, rule: str, config: Make) -> None:
    def run() -> Any:
        return train(config(steps=1, **SIZES), data=Stripes(), probes=[Probe("mine", 1, lambda *given: found)])

    if rule:
        with pytest.raises(ConfigError, match=f"^mine: .*{rule}"):
            run()
        return
    (event,) = [event for event in read_journal(run().folder / "journal.jsonl") if event["event"] == "probe"]
    assert (event["a"], event["b"]) == (0.5, 2.0)


@pytest.mark.parametrize("amounts", [[0.5], [1, -1], [1.5, 0], [float("nan"), 1], [float("inf"), 0], 1.0])
def test_soft_targets_that_are_no_amounts_are_refused(amounts: Any, config: Make) -> None:
    soft = changed(has_soft_targets=True, soft_target=lambda self, index: amounts)
    with pytest.raises(DataError, match=r"^soft_target\(\d+\) of Stripes"):
        train(config(**SIZES), data=soft)


def test_amounts_can_be_rounded_above_1() -> None:
    soft = changed(has_soft_targets=True, soft_target=lambda self, index: [sum([np.float32(0.1)] * 10), 0])
    assert soft_target_of(soft, 0) is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_run_neither_uses_nor_changes_the_state_of_its_caller(context: Any, config: Make, tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with context():
        result = train(config(steps=2, **SIZES), data=Stripes())
    assert not result.bundle.network.training
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


def test_runs_in_threads_train_one_after_the_other(config: Make, tmp_path: Path) -> None:
    steps = []

    class Noted(Small):
        def forward(self, images: Tensor) -> Tensor:
            if self.training and len(images) == 8:  # not the examples that a check computes
                steps.append(get_ident())
                time.sleep(0.002)  # so that the other thread could compute meanwhile
            return super().forward(images)

    def run(number: int) -> None:
        train(config(steps=5, evaluations=1, run=str(tmp_path / str(number))), data=Stripes(), network=Noted())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (1, 2)))
    assert sum(one != other for one, other in pairwise(steps)) == 1


def test_a_run_that_waits_for_another_says_so(config: Make, tmp_path: Path) -> None:
    display, futures = Display(), list[Any]()

    def wait(event: Any) -> None:  # a listener of a run in this thread, while the other thread begins
        if event["event"] == "started":
            other = config(steps=1, run=str(tmp_path / "b"), **SIZES)
            futures.append(threads.submit(train, other, data=Stripes(), log=Log(display)))
            wait_for(lambda: any("waits until" in note for note in display.notes), 20)

    with ThreadPoolExecutor(1) as threads:
        train(config(steps=1, **SIZES), data=Stripes(), log=Log(wait))
        assert futures[0].result().summary["steps"] == 1


def test_a_signal_after_the_end_leaves_a_complete_run(config: Make) -> None:
    def interrupt(event: Any) -> None:
        if event["event"] == "finished":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config(steps=1, **SIZES), data=Stripes(), log=Log(interrupt))
    assert summarise(Path(str(config().run.folder))).state == "finished"


def test_another_default_number_format_is_refused(config: Make) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"torch\.float64, but weights are trained in float32"):
            train(config(**SIZES), data=Stripes())
    finally:
        torch.set_default_dtype(torch.float32)


def test_arguments_of_other_types_are_refused(config: Make, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match="config is a str; pass a TrainConfig"):
        train("demo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="log is a builtin_function_or_method; pass a Log"):
        train(config(**SIZES), data=Stripes(), log=print)  # type: ignore[arg-type]
    for probes in (dict, [dict]):
        with pytest.raises(ConfigError, match="must be a list of `Probe`"):
            train(config(**SIZES), data=Stripes(), probes=probes)  # type: ignore[arg-type]
    for every in (0, 1.5):
        with pytest.raises(ConfigError, match=f"^every={every} is "):
            Probe("features", every, lambda outputs, known, asked: {})  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="network is a Small without a config"):
        Bundle(Small(), ("a", "b"), config().images)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [(float("inf"),), (1.0, 2.0), ()])
def test_numbers_that_cannot_be_learned_are_refused(wrong: Any, config: Make) -> None:
    source = changed(classes=("brightness",), target=lambda self, index: wrong if index == 3 else (1.5,))
    with pytest.raises((ConfigError, DataError), match=r"target(\(3\)| of row 3) is .*(floats|NaN stands for)"):
        train(config(task="regression", **SIZES), data=source)


def test_splits_of_other_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^data: the validation split has the classes"):
        Splits(Stripes(), changed(classes=("light", "dark")), None)


@pytest.mark.parametrize("make", [make_voc_folder, make_masks_folder])
def test_data_with_boxes_or_masks_is_a_source(make: Callable[[Path], Path], tmp_path: Path) -> None:
    source = open_data(str(make(tmp_path / "data")), validation_share=0.0).train
    check_source(source)
    checked(source)
    other = changed(classes=("one",), target=lambda self, index: source.target(1), target_kind=target_kind(source))
    with pytest.raises(ConfigError, match=r"target\(\d+\) is .* indices from"):
        check_source(other)


def test_a_source_of_broken_images_can_be_checked(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()[:30]
    check_source(changed(__getitem__=lambda self, index: Sample(self.key(index), data, index % 2)))
