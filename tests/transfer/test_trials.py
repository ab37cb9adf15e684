"""Tests of the trials before a run: what they try, what they keep, and the time that they leave."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vitrail.errors import ConfigError, RunError
from vitrail.training.config import TrainConfig
from vitrail.training.folder import locked
from vitrail.training.log import read_journal
from vitrail.transfer.facts import Candidate, FinetunePlan, Search
from vitrail.transfer.finetune import Method, finetune, plan
from vitrail.transfer.trials import LINEAR, Tried, read_tried, search_settings, trials_folder
from vitrail.weights.bundle import Bundle

FEW = 3
"""Steps of the shortest trials."""

LOW, HIGH, WILD = (
    Candidate(name, {"learning_rate": rate}) for name, rate in (("low", 1e-5), ("high", 3e-3), ("wild", 1e6))
)


@pytest.fixture(autouse=True)
def short_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitrail.transfer.trials.MIN_TRIAL_STEPS", FEW)


Planned = Callable[..., FinetunePlan]


@pytest.fixture
def planned(tiny_bundle: Bundle, model: Path, colours: Path) -> Callable[..., FinetunePlan]:
    """Returns the plan of the rule for the small transformer and plain colours."""

    def make(budget: str | None = None, **explicit: Any) -> FinetunePlan:
        explicit = {"precision": "float32", "flip": True, **explicit}
        base = TrainConfig().override(data=str(colours), init=str(model), device="cpu", **explicit)
        return plan(tiny_bundle, base.data.open_whole(), base, Method(explicit=explicit, budget=budget))

    return make


def searched(
    config: TrainConfig, bundle: Bundle, search: Search, heard: list[str] | None = None, started: float | None = None
) -> tuple[TrainConfig, tuple[Tried, ...]]:
    return search_settings(
        config, config.data.open_whole(), bundle, search, Path("runs/one"),
        started=time.perf_counter() if started is None else started,
        on_trial=[].append if heard is None else heard.append,
    )  # fmt: skip


def search_of(*candidates: Candidate, **fields: Any) -> Search:
    return Search(candidates, 1e6, is_limited=True, may_thin_evaluations=True, **fields)


@pytest.mark.slow
def test_the_better_half_trains_twice_as_long(planned: Planned, tiny_bundle: Bundle) -> None:
    config = planned(validation_share=0.3).config.override(steps=4 * FEW)
    heard: list[str] = []
    candidates = (LOW, HIGH, WILD, Candidate("last block", {"train_blocks": 1, "layer_decay": 1.0}))
    search = search_of(*candidates)
    final, tried = searched(config, tiny_bundle, search, heard)
    names, first = [(one.name, one.steps) for one in tried], tried[1].steps
    assert names[:5] == [(LINEAR, 0), *((one.name, first) for one in candidates)] and first == FEW
    assert [steps for _, steps in names[5:]] == [2 * first, 2 * first]
    assert "wild" not in {name for name, steps in names if steps == 2 * first}
    assert final.run.steps == 4 * FEW and final.run.evaluations == config.run.evaluations
    assert max(one.value or 0 for one in tried[5:]) == next(
        one.value for one in tried[5:] if heard[-1] == f"chosen: {one.name}, {4 * FEW} steps"
    )
    assert any(text.startswith(f"{LINEAR}: validation accuracy") for text in heard)
    for folder in trials_folder(Path("runs/one")).iterdir():
        assert not (folder / "model").exists() and not (folder / "checkpoints").exists()
    journals = trials_folder(Path("runs/one")).glob("*/journal.jsonl")
    splits = {event["split"] for path in journals for event in read_journal(path) if event["event"] == "evaluation"}
    assert splits == {"validation"}, "the test split has no say"

    assert read_tried(Path("runs/one")) == tried
    begin = time.perf_counter()
    assert searched(config, tiny_bundle, search) == (final, tried), "finished trials are not repeated"
    times = [path.stat().st_mtime for path in trials_folder(Path("runs/one")).glob("*/run.json")]
    assert max(times) < time.time() - (time.perf_counter() - begin)


@pytest.mark.slow
@pytest.mark.parametrize(("rising", "climbs"), [((LOW, HIGH, WILD), True), ((HIGH, LOW, WILD), False)])
def test_a_higher_rate_is_tried_if_the_highest_is_the_best(
    rising: tuple[Candidate, ...], climbs: bool, planned: Planned, tiny_bundle: Bundle
) -> None:
    config = planned(validation_share=0.3).config.override(steps=4 * FEW)
    search = search_of(LOW, HIGH, rising=rising)
    final, tried = searched(config, tiny_bundle, search)
    assert [one.name for one in tried[1:]] == ["low", "high", *(["wild"] if climbs else [])]
    assert {one.steps for one in tried[1:]} == {FEW} and final.optimizer.learning_rate == HIGH.settings["learning_rate"]
    assert searched(config, tiny_bundle, search) == (final, tried), "finished trials are not repeated"


def test_the_rates_of_the_rule_rise(planned: Planned) -> None:
    search = planned(budget="1m").search
    rates = [one.settings["learning_rate"] for one in search.rising]
    lowest = sorted(one.settings["learning_rate"] for one in search.candidates if one in search.rising)
    assert rates == sorted(rates) and rates[:3] == lowest and len(rates) == 5
    chosen = planned(budget="1m", learning_rate=1e-3).search
    assert chosen is not None and not chosen.rising


@pytest.mark.slow
def test_one_process_at_a_time_tries_settings_for_a_run(planned: Planned, tiny_bundle: Bundle) -> None:
    config = planned(validation_share=0.3).config.override(steps=4 * FEW)
    trials = trials_folder(Path("runs/one"))
    trials.mkdir(parents=True)
    search = search_of(LOW, HIGH, WILD)
    with locked(trials), pytest.raises(RunError, match=r"run runs/one-trials is in use: process \d+ trains it"):
        searched(config, tiny_bundle, search)


@pytest.mark.slow
def test_no_time_means_no_trials_and_few_steps(planned: Planned, tiny_bundle: Bundle) -> None:
    chosen = planned(budget="1s")
    assert chosen.search is not None and chosen.search.seconds == 1 and chosen.config.run.steps == 135
    final, tried = searched(chosen.config, tiny_bundle, chosen.search, started=time.perf_counter() - 10)
    assert final.run.steps == 50 and [one.steps for one in tried] == [0]
    assert final.optimizer == chosen.config.optimizer


@pytest.mark.slow
def test_a_budget_of_the_user_includes_the_test_images(planned: Planned, tiny_bundle: Bundle) -> None:
    usual, limited = planned(), planned("1s").search
    assert usual.search is not None and not usual.search.includes_test
    assert limited is not None and limited.includes_test
    heard: list[str] = []
    searched(usual.config, tiny_bundle, replace(limited, seconds=1e-6), heard)
    assert any(re.fullmatch(r"measuring \d+ test images takes most of the time: .*", one) for one in heard)


def test_steps_and_rates_of_the_user_are_kept(planned: Planned) -> None:
    chosen = planned(steps=3).search
    assert chosen is not None and not chosen.is_limited and len(chosen.candidates) > 3
    chosen = planned(learning_rate=0.1).search
    assert chosen is not None and chosen.is_limited and len(chosen.candidates) == 1
    chosen = planned(lora_rank=4).search
    assert chosen is not None and all(one.settings.keys() == {"learning_rate"} for one in chosen.candidates)


@pytest.mark.slow
def test_a_rule_that_fails_still_ends_at_the_linear_model(planned: Planned, tiny_bundle: Bundle) -> None:
    """The floor: a learning rate that destroys the network saves the linear model of frozen features."""
    settings = {"learning_rate": 5.0, "clip": 0.0, "warmup": 0.0, "steps": 8, "validation_share": 0.3}
    config = planned(run="runs/bad", **settings).config
    found = finetune(config, config.data.open_whole(), tiny_bundle)
    events = read_journal(Path("runs/bad/journal.jsonl"))
    values = [event["accuracy"] for event in events if event["event"] == "evaluation" and not event.get("kept")]
    assert values[0] > max(values[1:]), "training made the model worse"
    assert found.run.bundle.provenance["step"] == 0 and found.run.metrics["validation_accuracy"] == values[0]
    before, after = tiny_bundle.network.blocks[0].mlp.up.weight, found.run.bundle.network.blocks[0].mlp.up.weight
    assert (before == after).all()
    assert json.loads(Path("runs/bad/run.json").read_text())["config"]["start"]["linear_head"] is True


@pytest.mark.slow
def test_a_run_that_diverges_ends_at_the_linear_model(planned: Planned, tiny_bundle: Bundle) -> None:
    settings = {"learning_rate": 1e30, "clip": 0.0, "warmup": 0.0, "steps": 8, "validation_share": 0.3}
    config = planned(run="runs/wild", **settings).config
    found = finetune(config, config.data.open_whole(), tiny_bundle)
    assert found.run.bundle.provenance["step"] == 0 and found.report is not None
    events = [event["event"] for event in read_journal(Path("runs/wild/journal.jsonl"))]
    assert "failed" in events and events[-1] == "finished"


@pytest.mark.slow
def test_the_report_shows_what_was_tried(planned: Planned, tiny_bundle: Bundle) -> None:
    config = planned(run="runs/one", validation_share=0.3).config.override(steps=2 * FEW)
    search = search_of(LOW, HIGH)
    found = finetune(config, config.data.open_whole(), tiny_bundle, search=search)
    page = found.page.read_text(encoding="utf-8")
    assert "<h2>Trials</h2>" in page and LINEAR in page and "the saved model" in page
    trials = [tried for tried in read_tried(Path("runs/one")) if tried.steps]
    assert len(trials) >= 2
    for tried in trials:
        assert tried.loss is not None and f"loss {tried.loss:.4g}" in page, "the loss decides between equal values"


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"patience": 2, "probe": "knn", "validation": "train[-9:]"},
        {"select": "cross_entropy", "validation_share": 0.3, "average": 0.9},
        {"mix": ("0.5:fractals:2:20",), "validation_share": 0.3, "per_class": 4},
    ],
)
def test_trials_work_with_settings_that_they_do_not_have(
    given: dict[str, Any], planned: Planned, tiny_bundle: Bundle
) -> None:
    config = planned(**given).config.override(steps=2 * FEW)
    search = search_of(LOW, HIGH)
    final, tried = searched(config, tiny_bundle, search)
    assert [one.name for one in tried][-2:] == ["low", "high"] and all(one.value is not None for one in tried)
    assert {name: value for name, value in given.items() if final.settings().get(name) == "data"} == {
        name: getattr(final.data, name) for name in given if hasattr(final.data, name)
    }
    splits = config.data.open()
    record = json.loads((trials_folder(Path("runs/one")) / f"low-{FEW}/run.json").read_text())
    assert (record["data"]["train"], record["data"]["validation"]) == (len(splits.train), len(splits.validation))
    assert (record["config"]["run"]["patience"], record["config"]["run"]["probe"]) == (None, "")


@pytest.mark.slow
def test_trials_of_another_command_are_not_reused(planned: Planned, tiny_bundle: Bundle) -> None:
    config = planned(validation_share=0.3).config.override(steps=2 * FEW)
    search = search_of(LOW, HIGH)
    searched(config, tiny_bundle, search)
    before = (trials_folder(Path("runs/one")) / "trials.json").read_text()
    _, tried = searched(config.override(batch_size=3), tiny_bundle, search)
    assert len(tried) == 3 and (trials_folder(Path("runs/one")) / "trials.json").read_text() != before
    finetune(config.override(run="runs/one", steps=2), config.data.open_whole(), tiny_bundle)
    assert read_tried(Path("runs/one")) == (), "a run without trials does not show those of an earlier command"


def test_an_optimizer_without_a_rate_is_refused_before_images_are_looked_at(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitrail.transfer.finetune.examine", None)
    with pytest.raises(ConfigError, match="optimizer='sgd' also needs a learning_rate"):
        planned(optimizer="sgd")
