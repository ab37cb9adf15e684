"""What a config stands for on this machine: the data, the network and everything that steps need."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

from vitrail.data.augmentation.crop import crop_box
from vitrail.data.pipeline import TrainingBatches, skips_allowed
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import Together, evaluators_of
from vitrail.machine import describe, pick_device, resolve_precision
from vitrail.models.compiled import compile_blocks, resolve_compile
from vitrail.models.float8 import check_float8, use_float8
from vitrail.models.variants import AnyConfig, AnyNetwork, build
from vitrail.training.config import TrainConfig
from vitrail.training.monitoring.examiner import Probe
from vitrail.training.optimization.layers import check_choice, choose_weights
from vitrail.training.optimization.optimizer import make_optimizer
from vitrail.training.optimization.schedule import Schedule
from vitrail.training.plan import Plan
from vitrail.training.record import FORMAT
from vitrail.training.start import Origin, fitted, network_from
from vitrail.training.state.average import Average
from vitrail.training.state.state import TrainState
from vitrail.weights.bundle import Bundle, weights_sha256

__all__ = ["Parts"]


class Parts:
    """Made before anything is written, so that what cannot work leaves nothing behind."""

    def __init__(
        self,
        config: TrainConfig,
        model: Bundle | None = None,
        origin: Origin | None = None,
        *,
        measure_test: bool = True,
    ) -> None:
        """`model` is the one to start from; `origin`, what is known of it where weights come from a checkpoint. Without
        `measure_test` the run has no test split.

        Raises `UserError` for settings and data that cannot work.
        """
        self.device = pick_device(config.run.device)
        # Resolved here and recorded so, or a run resumed on another machine would go on in another number format.
        self.config = config = config.override(precision=resolve_precision(config.run.precision, self.device))
        self.preprocess: Preprocess = config.images
        self.model, self.origin = model, origin
        # The shape of the network is checked before the data is looked at; the number of classes cannot be wrong.
        network_config = self._network_config(num_classes=2)
        self.compile = resolve_compile(config.run.compile, self.device, network_config)
        if config.run.precision == "float8":
            check_float8(network_config)
        check_choice(config.start, network_config)
        self.splits = self._open()
        self._check_choosing()
        self.probes = self._probes()
        self.fingerprint = fingerprint(self.splits.train, self.splits.validation, self.splits.test)
        if not measure_test:
            self.splits = replace(self.splits, test=None)
        self.steps = config.run.total_steps(len(self.splits.train))

    def network(self) -> tuple[AnyNetwork, tuple[str, ...]]:
        """The run's network on its device, ready to be trained, and what to say of its weights.

        With an `origin` and no `model` they are random and wait for a checkpoint's. Call it once: the model that the
        weights were copied from is let go.
        """
        notes: tuple[str, ...] = ()
        if self.model is not None:
            network, notes = network_from(
                self.model,
                self.config.start.init,
                self.preprocess.image_size,
                self.config.model.overrides,
                self.splits.classes,
            )
            if self.origin is None:
                self.origin = Origin(weights_sha256(self.model.network), network.config)
            self.model = None
        else:
            network = build(self._network_config(len(self.splits.classes)))
        choose_weights(network, self.config.start)
        network.to(self.device)
        if self.config.run.precision == "float8":
            use_float8(network)
        compile_blocks(network, self.compile)
        return network, notes

    def state(self, network: AnyNetwork) -> TrainState:
        """The state before the first step."""
        config, optimizer = self.config, self.config.optimizer
        objective = config.task.objective(network, self.splits).to(self.device)
        area = config.augment.settings.crop_area
        batches = TrainingBatches(
            self.splits.train,
            self.preprocess,
            batch_size=config.run.batch_size,
            seed=config.run.seed,
            readers=config.run.readers,
            crop=None if area is None else functools.partial(crop_box, config.run.seed, area=area),
        )
        average = Average(objective, optimizer.average) if optimizer.average else None
        return TrainState(objective, make_optimizer(objective, optimizer), batches, average=average)

    def plan(self) -> Plan:
        """How the run takes its steps."""
        config, optimizer = self.config, self.config.optimizer
        warmup_steps = round(optimizer.warmup * self.steps)
        return Plan(
            steps=self.steps,
            schedule=Schedule(optimizer.schedule, optimizer.learning_rate, self.steps, warmup_steps),
            accumulation=config.run.accumulation,
            clip=optimizer.clip,
            seed=config.run.seed,
            augment=config.augment,
            preprocess=self.preprocess,
            precision=config.run.precision,
            device=self.device,
            classes=len(self.splits.classes),
            patience=config.run.patience,
            most_skipped=skips_allowed(len(self.splits.train), config.data.max_skipped),
        )

    def bundle(self, network: AnyNetwork) -> Bundle:
        """The model that the run makes, of this network."""
        config = self.config
        provenance: dict[str, Any] = {
            "data": config.data.spec,
            "data_fingerprint": self.fingerprint,
            "validation_share": config.data.validation_share if self.splits.validation is not None else 0.0,
            "recipe": config.run.name,
            "seed": config.run.seed,
            "steps": self.steps,
            "kept": config.run.keep,
        }
        if self.origin is not None:
            provenance |= {"init": config.start.init, "init_sha256": self.origin.sha256}
        return Bundle(network, self.splits.classes, self.preprocess, output=config.task.output, provenance=provenance)

    def record(self) -> dict[str, Any]:
        """What `run.json` says: enough to do the run again, and to know what it was done on."""
        splits = {"train": self.splits.train, "validation": self.splits.validation, "test": self.splits.test}
        return {
            "format": FORMAT,
            "config": self.config.to_plain(),
            "steps": self.steps,
            "init": None if self.origin is None else self.origin.to_plain(),
            "data": {
                **{name: 0 if source is None else len(source) for name, source in splits.items()},
                "fingerprint": self.fingerprint,
                "classes": list(self.splits.classes),
                "notes": list(self.splits.notes),
            },
            "machine": describe(self.device),
        }

    def _network_config(self, num_classes: int) -> AnyConfig:
        images = self.preprocess
        if self.model is not None:
            return fitted(
                self.model.network.config, self.config.start.init, images, self.config.model.overrides, num_classes
            )
        if self.origin is not None:
            return self.origin.network
        return self.config.model.resolve(
            num_classes=num_classes, image_size=images.image_size, channels=images.channels
        )

    def _open(self) -> Splits:
        splits = self.config.data.open()
        self.config.task.check_data(splits, self.config.data.spec)
        return splits

    def _probes(self) -> tuple[Probe, ...]:
        """What the config wants to be measured during the run. Few-shot takes what small classes have."""
        config = self.config.run
        if not config.probe:
            return ()
        steps = config.total_steps(len(self.splits.train))
        every = config.probe_every or math.ceil(steps / max(config.evaluations, 1))
        evaluators = evaluators_of(config.probe, {"fewshot": {"allow_fewer": True}})
        return (Probe(config.probe, every, Together(evaluators)),)

    def _check_choosing(self) -> None:
        """What chooses by the validation split needs one, and measurements on it."""
        config = self.config.run
        if self.splits.validation is not None and config.evaluations:
            return
        leave = (
            "needs a validation split and evaluations to choose by; "
            f"validation_share={self.config.data.validation_share} and evaluations={config.evaluations} leave none."
        )
        if config.keep == "best":
            raise ConfigError(f"keep='best' {leave} Choose keep='last'")
        if config.patience is not None:
            raise ConfigError(f"patience={config.patience} {leave} Leave it out")
