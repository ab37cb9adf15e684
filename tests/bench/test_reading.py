"""Tests of the times of reading and loading: every row reads the same images, and every way to load is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.bench.conftest import MakeWork
from vitrail.bench import reading
from vitrail.bench.reading import (
    DECODING,
    LOOP,
    measure_loading,
    measure_opening,
    measure_reading,
    write_parquet,
    write_photographs,
)
from vitrail.data.pipeline import Readers
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError

SMALL = Preprocess(image_size=(21, 28))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("photographs") / "folder", 9, classes=2)


@pytest.mark.slow
def test_photographs_are_like_those_of_imagenet(photographs: Path) -> None:
    files = sorted(photographs.rglob("*.jpg"))
    assert len(files) == 9 and len({path.read_bytes() for path in files}) == 9
    assert {image_size_of(path.read_bytes()) for path in files} == {(375, 500)}
    assert all(20_000 < path.stat().st_size < 150_000 for path in files)


def test_photographs_are_repeated_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.bench.reading.MOST_PIXELS", 3 * 8 * 6)
    folder = write_photographs(tmp_path / "folder", 8, classes=2, size=(6, 8))
    files = {path.stem: path for path in folder.rglob("*.jpg")}
    numbers = [f"{number:05}" for number in range(8)]
    assert [files[name].parent.name for name in numbers] == ["class-0", "class-1"] * 4
    written = [files[name].read_bytes() for name in numbers]
    assert written == [written[number % 3] for number in range(8)] and len(set(written)) == 3
    assert written[0] == next(write_photographs(tmp_path / "one", 1, size=(6, 8)).rglob("*.jpg")).read_bytes()


@pytest.mark.slow
def test_every_data_set_and_both_limits_are_timed(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    folder = open_data(str(photographs), validation_share=0.0).train
    parquet = open_data(str(write_parquet(folder, tmp_path / "images.parquet")), validation_share=0.0).train
    images = [folder[index].image for index in range(9)]
    assert [parquet[index].image for index in range(9)] == images
    found = measure_reading(
        {"folder": folder, "Parquet": parquet}, SMALL, images=8, batch_size=3, readers=Readers(2), repetitions=2,
        warmup=1,
    )  # fmt: skip
    assert found["images"] == 6 and found["image_bytes"] == pytest.approx(sum(map(len, images[:6])) / 6)
    assert list(found["seconds"]) == ["folder", "Parquet", DECODING, LOOP]
    assert list(found["grown"]) == ["folder", "Parquet"]
    assert all(len(times) == 2 and min(times) > 0 for times in found["seconds"].values())


def test_loaders_of_other_libraries_take_the_place_of_the_references(photographs: Path) -> None:
    folder = open_data(str(photographs), validation_share=0.0).train
    passes = []

    class Loader:
        """A loader that yields two of three batches."""

        def __iter__(self) -> Iterator[int]:
            passes.append(len(passes))
            time.sleep(0.2)
            return iter(range(2))

    found = measure_reading(
        {"folder": folder}, SMALL, images=9, batch_size=3, readers=Readers(1), repetitions=2, warmup=1,
        peers={"other": Loader()},
    )  # fmt: skip
    assert list(found["seconds"]) == ["other", "folder"] and passes == [0, 1, 2]
    assert min(found["seconds"]["other"]) >= 0.3  # counted as three batches


def test_images_that_are_made_have_no_decoding_to_compare_with() -> None:
    fractals = open_data("fractals:2:3:0:16", validation_share=0.0).train
    found = measure_reading(
        {"fractals": fractals}, SMALL, images=9, batch_size=2, readers=Readers(0), repetitions=1, warmup=0
    )
    assert list(found["seconds"]) == ["fractals"] and found["images"] == 6 and found["image_bytes"] == 0


@pytest.mark.parametrize(("images", "most"), [(9, 6), (5, 5)])
def test_a_batch_larger_than_a_round_is_refused(images: int, most: int) -> None:
    fractals = open_data("fractals:2:3:0:16", validation_share=0.0).train
    with pytest.raises(ConfigError, match=f"batch_size=7 is more than the {most} images of a round"):
        measure_reading(
            {"f": fractals}, SMALL, images=images, batch_size=7, readers=Readers(0), repetitions=1, warmup=0
        )


@pytest.mark.slow
def test_opening_is_measured_in_processes_of_its_own() -> None:
    found = measure_opening(10_020)
    assert found["images"] == 10_020 and found["again_seconds"] > 0 and found["first_seconds"] > 0
    assert 0 <= found["peak_bytes"] < 100e6


READS = {"vitrail.load", "safetensors.torch.load_file", "plain read"}
PROGRAMS = {"python", "import torch", "import vitrail", "from vitrail import load", "vitrail predict"}


def test_every_way_is_timed(tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(reading, "_process", lambda command: lambda: started.append(command))
    config = tiny_work(channels=1).config
    result = measure_loading(config, device=torch.device("cpu"), repetitions=1, warmup=0)
    assert 4 * config.parameters() < result["file_bytes"] < 4 * config.parameters() + 10_000
    assert set(result["first"]) == set(result["loads"]) == READS and set(result["processes"]) == PROGRAMS
    scripts = [command[1] for command in started if command[0] == "-c"]
    assert sorted(scripts) == ["", "from vitrail import load", "import torch", "import vitrail"]
    (predict,) = [command for command in started if command[0] == "-m"]
    assert predict[1:3] == ["vitrail", "predict"] and predict[5:] == ["--device", "cpu"]
