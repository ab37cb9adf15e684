"""Tests of data sets on the hub, with huggingface_hub itself, real Parquet files, and a server on this machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.make import encode, keys_of, targets_of
from tests.weights.hub_server import Hub, Repository, cut_off, restart_client, serving
from vitrail.data.formats.hub import open_hub_data
from vitrail.data.formats.parquet import missing_shards
from vitrail.data.sources import open_whole
from vitrail.data.splits import Choice
from vitrail.errors import DataError, SaveError
from vitrail.testing import check_source

NAME = "datasets/org/name"
SPEC = "hf:org/name"
CONVERTED = "refs/convert/parquet"
RANDOM = np.random.default_rng(0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server that replaces the hub for the client, with empty caches."""
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "data"))
    with serving(tmp_path / "home", monkeypatch) as server:
        yield server


def parquet(labels: Sequence[int], names: Sequence[str] = ("rose", "daisy"), **columns: Any) -> bytes:
    """Return a Parquet file as Hugging Face's library writes it, with random images."""
    pictures = [encode(RANDOM.integers(0, 256, (4, 5, 3), dtype=np.uint8), "PNG") for _ in labels]
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    features |= {name: {"names": ["x", "y", "z"], "_type": "ClassLabel"} for name in columns}
    image = pa.array([{"bytes": piece, "path": "a.png"} for piece in pictures])
    table = pa.table({"image": image, "label": pa.array(labels, pa.int64()), **columns})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=2)
    return file.getvalue()


def card(*configs: str) -> bytes:
    """Return a README with configurations, each in YAML."""
    entries = "\n".join(f"- {config}" for config in configs)
    return f"---\nlicense: mit\nconfigs:\n{entries}\n---\n# A data set\n".encode()


def message(spec: str, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as caught:
        open_hub_data(spec, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_a_data_set_by_its_name(hub: Hub) -> None:
    files = {
        "README.md": b"# A data set without YAML",
        "data/train-00000-of-00002.parquet": parquet([0, 1, 1]),
        "data/train-00001-of-00002.parquet": parquet([1, 0]),
        "data/test-00000-of-00001.parquet": parquet([1, 1, 0, 0]),
        "images.zip": b"zip",
    }
    hub.add(NAME, files)
    splits = open_hub_data(SPEC, None)
    assert sorted(hub.fetched()) == ["README.md", *sorted(Path(name).name for name in files if "data/" in name)]
    assert splits.classes == ("rose", "daisy") and splits.validation is None
    assert keys_of(splits.train) == [
        *(f"data/train-00000-of-00002.parquet:{row}" for row in range(3)),
        *(f"data/train-00001-of-00002.parquet:{row}" for row in range(2)),
    ]
    assert targets_of(splits.test) == [1, 1, 0, 0]
    assert len(splits.notes) == 1 and splits.notes[0].startswith(f"data {SPEC!r}: the images were unpacked")
    check_source(splits.train)
    again = open_hub_data(SPEC, None)  # nothing is fetched or unpacked again
    assert hub.fetched() == [] and again.notes == ()
    shutil.rmtree(Path(os.environ["HF_HOME"]))
    restart_client()
    assert open_hub_data(SPEC, None).notes == ()  # fetched anew, but of the same content
    assert "train-00001-of-00002.parquet" in hub.fetched()


def test_columns_are_chosen_behind_the_name(hub: Hub) -> None:
    hub.add(NAME, {"train.parquet": parquet([0, 1, 1], coarse_label=[2, 0, 1])})
    splits = open_whole(f"{SPEC}?label=coarse_label", classes=("z", "y", "x")).whole
    assert targets_of(splits.train) == [0, 2, 1]
    with pytest.raises(DataError, match="chooses nothing"):
        open_whole(f"{SPEC}?labels=coarse_label")


def test_a_revision(hub: Hub) -> None:
    old = hub.add(NAME, {"train.parquet": parquet([0])})
    hub.add(NAME, {"train.parquet": parquet([0, 1])})
    hub.repositories[NAME].refs["v1.0"] = old
    assert [len(open_hub_data(f"{SPEC}{revision}", None).train) for revision in ("", "@v1.0", f"@{old}")] == [2, 1, 1]
    assert message(f"{SPEC}@v1.1") == "data 'org/name' has no revision 'v1.1'; nearest: v1.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "train", "test"),
    [
        ("config_name: c\n  data_files:\n  - split: train\n    path: a/*\n  - split: test\n    path: b/*", "a", "b"),
        ("config_name: c\n  data_files:\n    train: b/**\n    test: ['a/1.parquet', 'a/2.*']", "b", "a"),
        ("config_name: c\n  data_files:\n  - split: train\n    path: ['a/[1-2].parquet', '**/1.parquet']", "a1b", ""),
        ("config_name: c\n  data_files: 'a/?.parquet'", "a", ""),
        ("config_name: c\n  data_files: ['a/1.parquet', b/2.parquet]", "1b", ""),
        ("config_name: c\n  data_dir: b", "b", ""),
        ("config_name: c\n  data_dir: b\n  data_files: '*'", "b", ""),
        ("config_name: c\n  data_files:\n  - split: all\n    path: b/*", "b", ""),
        ("config_name: c", "ab", ""),
    ],
)
def test_a_readme_says_which_files(hub: Hub, config: str, train: str, test: str) -> None:
    files = {"a/1.parquet": [0], "a/2.parquet": [1, 1], "b/2.parquet": [0, 1, 0, 1], "b/x.txt": None}
    hub.add(NAME, {name: b"" if labels is None else parquet(labels) for name, labels in files.items()}
            | {"README.md": card(config)})  # fmt: skip
    lengths = {"a": 3, "b": 4, "ab": 7, "a1b": 3, "1b": 5, "": None}
    splits = open_hub_data(SPEC, None)
    assert len(splits.train) == lengths[train]
    assert (None if splits.test is None else len(splits.test)) == lengths[test]


@pytest.mark.slow
def test_configurations_of_a_readme(hub: Hub) -> None:
    files = {f"{name}/train-00000-of-00001.parquet": parquet([0] * length) for name, length in (("x", 1), ("y", 2))}
    texts = [f"config_name: big-{name}\n  data_files:\n  - split: train\n    path: {name}/train-*" for name in "xy"]
    hub.add(NAME, {**files, "README.md": card(*texts)})
    assert f"data {SPEC!r} has several configurations: big-x, big-y; " in message(SPEC)
    assert [len(open_hub_data(f"{SPEC}:big-{name}", None).train) for name in "xy"] == [1, 2]
    assert message(f"{SPEC}:small") == f"data {SPEC + ':small'!r} has no configuration 'small'; choices: big-x, big-y"
    assert "nearest: big-y" in message(f"{SPEC}@main:bigy")
    hub.add(NAME, {**files, "README.md": card(texts[0], f"{texts[1]}\n  default: true")})
    assert len(open_hub_data(SPEC, None).train) == 2
    hub.add(NAME, {**files, "README.md": card(texts[0], texts[1].replace("big-y", "default"))})
    assert len(open_hub_data(SPEC, None).train) == 2


def test_configurations_by_folders(hub: Hub) -> None:
    hub.add(NAME, {f"{name}/train/0000.parquet": parquet([0] * length) for name, length in (("x", 1), ("y", 2))})
    assert "several configurations: x, y" in message(SPEC)
    assert len(open_hub_data(f"{SPEC}:y", None).train) == 2
    hub.add(NAME, {f"{name}/0000.parquet": parquet([0] * length) for name, length in (("x", 1), ("y", 2))})
    assert len(open_hub_data(SPEC, None).train) == 3  # folders without splits are of one


@pytest.mark.slow
@pytest.mark.parametrize("readme", [b"", b"---\n: [\n---\n", b"---\n- a\n---\n", b"---\nconfigs: 3\n---\n",
                                    b"---\nconfigs: [a, b]\n---\n", b"\xff\xfe---"])  # fmt: skip
def test_a_readme_that_says_nothing(hub: Hub, readme: bytes) -> None:
    hub.add(NAME, {"README.md": readme, "data/train-00000-of-00001.parquet": parquet([0, 1])})
    assert len(open_hub_data(SPEC, None).train) == 2


def test_missing_shards_are_named(hub: Hub) -> None:
    names = [f"data/train-0000{number}-of-00004.parquet" for number in (0, 3)]
    hub.add(NAME, {name: parquet([0, 1]) for name in (*names, "data/test-00000-of-00001.parquet")})
    expected = "2 of 4 files data/train-*. The first missing file is data/train-00001-of-*"
    assert open_hub_data(SPEC, None).notes[0] == f"data {SPEC!r} has only {expected}"
    from_one = [f"x/train-{number}-of-3.parquet" for number in (1, 2, 3)]
    assert not [*missing_shards(from_one)]
    assert [*missing_shards(from_one[1:])] == ["2 of 3 files x/train-*. The first missing file is x/train-1-of-*"]
    assert [*missing_shards(from_one[:2])] == ["2 of 3 files x/train-*. The first missing file is x/train-0-of-*"]


def test_patterns_of_a_readme(hub: Hub) -> None:
    text = "config_name: x\n  data_files:\n  - split: train\n    path: '[!b].parquet'\n  - split: test\n    path: c.csv"
    hub.add(NAME, {"a.parquet": parquet([0]), "b.parquet": parquet([0, 1]), "c.csv": b"", "README.md": card(text)})
    splits = open_hub_data(SPEC, None)
    assert len(splits.train) == 1 and splits.test is None
    assert splits.notes[0].endswith("README names no .parquet file of the repository for test")
    hub.status = 503
    assert f"data {SPEC!r} was read from the cache" in open_hub_data(SPEC, None).notes[1]


@pytest.mark.slow
def test_splits_that_are_not_ours(hub: Hub) -> None:
    files = {f"data/{split}-00000-of-00001.parquet": parquet([0, 1]) for split in ("train", "train_full", "extra")}
    hub.add(NAME, files)
    splits = open_hub_data(SPEC, None)
    assert len(splits.train) == 2
    assert splits.notes[0] == f"data {SPEC!r}: skipped extra, train_full, because only train, val and test are read"
    hub.add(NAME, {name.replace("train-", "train_a-"): content for name, content in files.items()})
    assert "has train_a and train_full, but only one of them can be the train split" in message(SPEC)
    extra = {name: content for name, content in files.items() if "train" not in name}
    hub.add(NAME, extra | {"more.parquet": b""})
    assert "has the splits extra, (none) but no train split" in message(SPEC)
    hub.add(NAME, extra | {"test.parquet": parquet([0, 1])})
    splits = open_hub_data(SPEC, None)  # for measuring
    assert len(splits.train) == 0 and len(splits.test) == 2
    splits = open_hub_data(SPEC, None, choice=Choice(splits={"train": ("extra",)}))
    assert len(splits.train) == 2 and splits.test is None
    hub.add(NAME, {name: content for name, content in files.items() if "extra" in name})
    assert len(open_hub_data(SPEC, None).train) == 2


@pytest.mark.slow
def test_without_parquet_the_conversion_is_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, {"data.zip": b"zip", "README.md": card("config_name: c\n  data_files: data.zip")})
    expected = "has no .parquet files (it holds: README.md, data.zip), and the hub's own conversion is not available"
    assert expected in message(SPEC)
    converted = {"default/partial-train/0000.parquet": parquet([0, 1]), "default/test/0000.parquet": parquet([1])}
    hub.repositories[NAME].commit(converted, CONVERTED)
    splits = open_hub_data(SPEC, None)
    assert keys_of(splits.train) == [f"default/partial-train/0000.parquet:{row}" for row in range(2)]
    assert splits.notes[0] == f"data {SPEC!r}: the hub has converted only the first part of train"
    assert len(splits.test) == 1
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        restart_client()
        assert len(open_hub_data(SPEC, None).train) == 2
    restart_client()
    hub.repositories[NAME].refs["v1"] = hub.repositories[NAME].refs["main"]
    assert message(f"{SPEC}@v1").startswith(f"data {SPEC + '@v1'!r} has no .parquet files; its files are README.md, ")
    hub.repositories[NAME].commit({"README.md": b""}, CONVERTED)
    assert message(SPEC) == f"data {SPEC!r} has no .parquet files, and neither has the hub's own conversion"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["offline", "down", "broken"])
def test_without_a_network_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    hub.add(NAME, {f"{name}/train-0000{number}-of-00002.parquet": parquet([0]) for name in "xy" for number in range(2)})
    keys = keys_of(open_hub_data(f"{SPEC}:x", None).train)
    restart_client()
    expected = cut_off(hub, monkeypatch, way)
    assert keys_of(open_hub_data(f"{SPEC}:x", None).train) == keys
    text = message(f"{SPEC}:y")
    assert "is incomplete in the cache" in text and expected in text
    assert text.endswith("lacks y/train-00000-of-00002.parquet, y/train-00001-of-00002.parquet")
    text = message("hf:org/other")
    assert "data 'hf:org/other' is not in the cache" in text and expected in text

    shutil.rmtree(os.environ["VITRAIL_DATA"])  # as though another program had fetched it
    assert keys_of(open_hub_data(SPEC, None).train) == keys
    shutil.rmtree(os.environ["VITRAIL_DATA"])
    next(Path(os.environ["HF_HOME"]).rglob("train-00001-of-00002.parquet")).unlink()
    text = message(SPEC)
    assert "has 1 of 2 files x/train-*. The first missing file is x/train-00001-of-*." in text and expected in text


def test_a_cache_on_a_disk_without_links(hub: Hub) -> None:
    """Files with equal names in two data sets are not confused."""
    for name, labels in (("datasets/org/a", [0, 1]), ("datasets/org/b", [1, 1, 0])):
        hub.add(name, {"data/train-00000-of-00001.parquet": parquet(labels)})
    images = []
    for spec in ("hf:org/a", "hf:org/b"):
        images.append(open_hub_data(spec, None).train[0].image)
    for link in Path(os.environ["HF_HOME"]).rglob("*.parquet"):
        content = link.read_bytes()
        link.unlink()
        link.write_bytes(content)
    again = [open_hub_data(spec, None) for spec in ("hf:org/a", "hf:org/b")]
    assert [splits.train[0].image for splits in again] == images and all(splits.notes for splits in again)


@pytest.mark.slow
def test_a_download_that_breaks_off_leaves_the_old_commit_for_later(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, {"train-0.parquet": parquet([0])})
    open_hub_data(SPEC, None)
    hub.add(NAME, {"train-0.parquet": parquet([0, 1]), "train-1.parquet": parquet([0, 1, 1])})
    hub.cut["train-1.parquet"] = [100, *[0] * 100]
    text = message(SPEC)
    assert f"train-1.parquet of data {SPEC!r} could not be downloaded: " in text and "Run the command again" in text
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        restart_client()
        assert len(open_hub_data(SPEC, None).train) == 1
    restart_client()
    hub.cut.clear()
    hub.fetched()
    assert len(open_hub_data(SPEC, None).train) == 5
    assert hub.fetched() == ["train-1.parquet"]


def test_a_dropped_connection_is_taken_up_again(hub: Hub) -> None:
    content = parquet([0, 1] * 20)
    hub.add(NAME, {"train.parquet": content})
    hub.cut["train.parquet"] = [500, 0, 700]
    assert len(open_hub_data(SPEC, None).train) == 40
    assert hub.cut["train.parquet"] == []


@pytest.mark.slow
def test_refusals(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, {"train.parquet": parquet([0, 1])})
    hub.add("org/model", {"model.safetensors": b"weights"})
    for spec in ("hf:org/nome", "hf:org/model"):
        text = message(spec)
        assert text.startswith(f"data {spec!r} is not a data set at {hub.endpoint}; if it is private, log in")
    hub.repositories[NAME].token = "hf_secret"
    text = message(SPEC)
    assert text.startswith(f"data {SPEC!r} is gated: ask for access at {hub.endpoint}/datasets/org/name, then log in")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    restart_client()
    assert len(open_hub_data(SPEC, None).train) == 2
    hub.status = 403
    assert f"access to data {SPEC!r} is refused (403" in message(SPEC)


def test_names_that_are_none(hub: Hub) -> None:
    for spec in ("hf:", "hf:mnist", "hf:a/b/c", "hf:org/name:", "hf:org/name@", "hf:org/na..me", "hf:../name"):
        assert message(spec).startswith(f"data {spec!r} is not a name on the hub; write hf:org/name, ")
    assert hub.requests == []


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["home", "data"])
def test_caches_that_cannot_be_written(hub: Hub, tmp_path: Path, blocked: str) -> None:
    hub.add(NAME, {"train.parquet": parquet([0, 1])})
    (tmp_path / blocked).write_text("not a folder")
    text = message(SPEC, SaveError)
    assert f"data {SPEC!r}" in text and str(tmp_path / blocked) in text


@pytest.mark.slow
def test_processes_that_open_it_at_once(hub: Hub) -> None:
    hub.repositories[NAME] = Repository()
    hub.add(NAME, {f"data/train-0000{number}-of-00003.parquet": parquet([0, 1] * 30) for number in range(3)})
    script = f"""
from vitrail.data.source import fingerprint
from vitrail.data.formats.hub import open_hub_data
print(fingerprint(open_hub_data({SPEC!r}, None).train))
"""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", script], **options) for _ in range(2)]
    answers = [process.communicate() for process in processes]
    assert len({out for out, _ in answers}) == 1 and answers[0][0], answers
