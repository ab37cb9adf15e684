"""Tests of ImageNet's labels, with made-up ids instead of ImageNet's, and given files for the public ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.make import MemorySource, targets_of
from tests.targets import single_labels
from vitrail.data import remote
from vitrail.data.source import Sample, Source, samples_of
from vitrail.data.sources import open_data
from vitrail.errors import DataError, SaveError
from vitrail.evaluation import imagenet
from vitrail.evaluation.imagenet import Synset, imagenet_columns, map_classes, read_real, read_synsets, real_accuracy
from vitrail.evaluation.metrics.intervals import mean_interval
from vitrail.evaluation.outputs import Predictions
from vitrail.testing import check_source

IDS = [f"n{1_000_000 + 37 * number:08}" for number in range(1000)]
"""A thousand ids in rising order, which replace ImageNet's ids in these tests."""
NAMES = [f"thing {number}, res {number}" for number in range(1000)]
NAMES[134] = NAMES[517] = "crane"
NUMBERS = [str(number) for number in range(1000)]


@pytest.fixture(autouse=True)
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ImageNet's ids by the ids above, empty the cache, and block all hosts."""
    monkeypatch.setattr(imagenet, "IDS_SHA256", hashlib.sha256("\n".join(IDS).encode()).hexdigest())
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(imagenet, "SYNSETS_URL", "public://imagenet_class_index.json")
    monkeypatch.setattr(imagenet, "REAL_URL", "public://real.json")
    fsspec.register_implementation("public", PublicFiles, clobber=True)


class PublicFiles(AbstractFileSystem):
    """Serves given files as public://name, and notes which are asked for."""

    protocol = "public"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.asked.append(path)
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], list[str]]:
    """Return a function that serves files in place of the public ones. It returns the list of requested files."""
    monkeypatch.setattr(PublicFiles, "files", {})
    monkeypatch.setattr(PublicFiles, "asked", [])

    def start(content: dict[str, bytes]) -> list[str]:
        PublicFiles.files.update(content)
        return PublicFiles.asked

    return start


def index_json() -> bytes:
    """Return the list in the JSON form of Keras."""
    names = [name.split(",")[0].replace(" ", "_") for name in NAMES]
    return json.dumps({str(number): pair for number, pair in enumerate(zip(IDS, names, strict=True))}).encode()


@pytest.fixture(params=["lines", "json"])
def list_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "list"
    lines = "\n".join(f"{one} {name}" for one, name in zip(IDS, NAMES, strict=True))
    path.write_bytes(index_json() if request.param == "json" else lines.encode())
    return path


HEADS = {
    "ids": IDS,
    "ids and names": [f"{one} {name}" for one, name in zip(IDS, NAMES, strict=True)],
    "names": NAMES,
    "usual names": [name.split(",")[0].replace(" ", "_") for name in NAMES],
    "numbers": NUMBERS,
    "ids in another order": IDS[::-1],
}


@settings(max_examples=10)
@given(st.permutations([f"class {number}" for number in range(9)]), st.data())
def test_equal_names_in_any_order_and_some_of_them(head: list[str], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(head), min_size=1, unique=True))
    assert [head[column] for column in map_classes(head, names).columns] == names


def test_all_classes_in_order_may_have_a_name_twice() -> None:
    """An example is ImageNet's two cranes. The hub's data calls the second one "crane (517)"."""
    numbered = [*NAMES[:517], "crane (517)", *NAMES[518:]]
    assert map_classes(NAMES, numbered).columns == map_classes(NAMES, NAMES).columns == tuple(range(1000))


def test_ids_inside_longer_names() -> None:
    found = map_classes(["n02085620-Chihuahua", "n02085782 spaniel", "x"], ["n02085782", "n02085620"])
    assert found.columns == (1, 0)


UNMATCHED = "do not match exactly one of the model's"


@pytest.mark.parametrize(
    ("head", "data", "message"),
    [
        (["a", "b"], ["dog", "cat", "cow", "emu", "ant", "gnu"], f"'dog', 'cat', .*'ant' and 1 more, {UNMATCHED}"),
        (["crane", "crane", "a"], ["a", "crane"], rf"^classes of the data, 'crane', {UNMATCHED}"),
        (["n00000002", "n00000001"], ["n00000001 tench", "n00000001_fish"], "'n00000001_fish' .* both match output 1"),
        (["an02085620", "n020856201"], ["n02085620"], UNMATCHED),
        *[(head, data, UNMATCHED) for head, data in ((NAMES, ["0", "1000"]), (NAMES[:10], ["0"]), (NAMES, ["-1"]))],
    ],
)
def test_classes_that_do_not_match_exactly_one_output_are_refused(
    head: list[str], data: list[str], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        map_classes(head, data)


@pytest.mark.parametrize("head", HEADS)
def test_all_ids_the_numbers_of_v2_and_some_ids_by_a_list(head: str, list_file: Path) -> None:
    shuffled, numbers = np.random.default_rng(0).permutation(1000).tolist(), [700, 3, 134, 517, 999]
    for names, mapping, expected in (
        ([IDS[number] for number in shuffled], None, shuffled),
        (sorted(NUMBERS), None, map(int, sorted(NUMBERS))),
        ([IDS[number] for number in numbers], list_file, numbers),
    ):
        found = map_classes(HEADS[head], names, mapping=mapping).columns
        assert found == tuple(999 - number if head == "ids in another order" else number for number in expected)


def test_names_by_a_list_under_a_head_of_ids(list_file: Path) -> None:
    assert map_classes(IDS[::-1], ["thing_3", "thing 700, res 700"], mapping=list_file).columns == (996, 299)
    with pytest.raises(DataError, match=r"'crane', 'cat', do not match exactly one of the list's: 'n01000000'"):
        map_classes(IDS, ["thing 3", "crane", "cat"], mapping=list_file)


def test_some_ids_by_the_public_list_which_is_fetched_once(serve: Callable[..., list[str]], tmp_path: Path) -> None:
    asked = serve({"imagenet_class_index.json": index_json()})
    for _ in range(2):
        assert map_classes(NUMBERS, [IDS[7], IDS[5]]).columns == (7, 5)
    assert asked == ["imagenet_class_index.json"]
    assert (tmp_path / "cache/imagenet/imagenet_class_index.json").read_bytes() == index_json()


def test_offline_it_says_what_to_give(tmp_path: Path) -> None:
    said = (
        r"the list of ImageNet's WordNet ids cannot be downloaded \(.*\); download public://"
        rf"imagenet_class_index.json elsewhere, and name the file or copy it to {tmp_path}/cache/imagenet/imagenet_"
    )
    with pytest.raises(DataError, match=said):
        map_classes(NUMBERS, IDS[:3])


def test_nothing_is_fetched_for_other_heads_and_data(serve: Callable[..., list[str]]) -> None:
    asked = serve({"imagenet_class_index.json": index_json()})
    for head, data in ((NUMBERS[:10], IDS[:3]), (NUMBERS, ["cat", "dog"]), (IDS, ["cat", IDS[2]])):
        with pytest.raises(DataError, match="rename them, name a file of WordNet ids and names in the order of"):
            map_classes(head, data)
    assert not asked


def test_a_list_of_other_classes_is_refused(list_file: Path) -> None:
    with pytest.raises(DataError, match="list: class 0 is 'thing 999' in the model and 'thing 0' in the list"):
        map_classes(NAMES[::-1], IDS[:3], mapping=list_file)
    with pytest.raises(DataError, match="the list has 1,000 WordNet ids, but the model has 7 outputs"):
        map_classes(NUMBERS[:7], IDS[:3], mapping=list_file)
    some_renamed = [f"renamed {number}" if number % 3 == 0 else name for number, name in enumerate(NAMES)]
    assert map_classes(some_renamed, IDS[:3], mapping=list_file).columns == (0, 1, 2)


def test_a_head_that_is_not_imagenets_is_refused() -> None:
    with pytest.raises(DataError, match=r"the model's 1,000 classes, 'n01000001', .* 995 more, are not ImageNet's"):
        imagenet_columns([f"n{int(one[1:]) + 1:08}" for one in IDS])


def test_the_list_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("n00000001 great white shark, man-eater\nn00000002\nn00000003: cock\n")
    shark = Synset("n00000001", ("great white shark", "man-eater"))
    assert read_synsets(path) == (shark, Synset("n00000002", ()), Synset("n00000003", ("cock",)))
    path.write_text('{"1": ["n00000002", "b_c"], "0": ["n00000001", "a"]}')
    assert read_synsets(path) == (Synset("n00000001", ("a",)), Synset("n00000002", ("b c",)))


@pytest.mark.parametrize(
    "text",
    ["", "tench", "n00000001 a\n\nb", "n00000001\nn00000001", "{", "{}", '{"1": ["n00000001", "a"]}', '{"0": [1, "a"]}',
     '{"0": ["n00000001"]}', '{"0": "n1"}', '{"0": 3}', '{"0": ["n00000001", 3]}', '{"0": [[], "a"]}', "\xff"],
)  # fmt: skip
def test_what_is_no_list_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"{path} is not a list of different WordNet ids: lines like "):
        read_synsets(path)


@pytest.mark.parametrize("named", [True, False])
def test_a_mapped_source_is_what_open_data_gives_where_names_are_equal(colour_folder: Path, named: bool) -> None:
    head = ("red", "teal", "blue", "green")
    opened = open_data(str(colour_folder), validation_share=0.0, classes=head).train
    if not named:  # the same pictures in folders named otherwise, under a head that has these names' ids
        ids = {"red": "n00000005", "blue": "n00000009", "green": "n00000007"}
        for name, one in ids.items():
            (colour_folder / name).rename(colour_folder / one)
        head = tuple(f"{ids.get(name, 'n00000000')} {name}" for name in head)
    bare = open_data(str(colour_folder), validation_share=0.0).train
    mapped = samples_of(bare).renumbered(map_classes(head, bare.classes).columns, head)
    check_source(mapped)
    assert mapped.classes == head

    def found(source: Source) -> set[str]:
        return {f"{Path(source.key(index)).name} {source.target(index)}" for index in range(len(source))}

    assert found(mapped) == found(opened)


def test_labels_of_a_mapped_source() -> None:
    source = MemorySource([b""] * 3, labels=[(2,), (0, 2), ()], classes=("x", "y", "z"))
    mapped = samples_of(source).renumbered((7, 0, 4), tuple("abcdefgh"))
    assert targets_of(mapped) == [(4,), (4, 7), ()] and mapped[1] == Sample("1", b"", (4, 7))


def real_json(labels: list[list[int]]) -> bytes:
    """Return a real.json with the given labels first, and then one label for each image."""
    return json.dumps(labels + [[number % 1000] for number in range(len(labels), 50_000)]).encode()


def predicting(likeliest: list[int], images: list[int], classes: list[str] = NUMBERS) -> Predictions:
    keys = tuple(f"val/ILSVRC2012_val_{number:08}.JPEG" for number in images)
    truth = single_labels(np.full(len(images), -1), len(classes))
    return Predictions(np.eye(1000, dtype=np.float32)[likeliest], truth, keys, np.arange(len(images)), tuple(classes))


def test_real_accuracy_is_a_count(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_bytes(real_json([[5, 6], [], [7], [8, 9, 10]]))
    real = read_real(path)
    assert len(real) == 50_000 and real[:4] == ((5, 6), (), (7,), (8, 9, 10))
    likeliest, images = [10, 5, 6, 0, 999], [4, 1, 3, 2, 50_000]
    found = real_accuracy(predicting(likeliest, images), real, bootstrap=20, seed=2)
    assert found == (mean_interval(np.array([True, True, False, True]), resamples=20, seed=2), 4)
    reversed_head = predicting([999 - number for number in likeliest], images, IDS[::-1])
    assert real_accuracy(reversed_head, real, bootstrap=20, seed=2) == found


def test_real_labels_need_an_image_that_has_one() -> None:
    with pytest.raises(DataError, match="none of 1 images has a ReaL label, so there is nothing to measure"):
        real_accuracy(predicting([0], [1]), [()])


@pytest.mark.slow
def test_what_are_no_real_labels_is_refused_and_not_kept(serve: Callable[..., list[str]], tmp_path: Path) -> None:
    message = r"real.json does not hold ReaL labels, which are a list of 50,000 lists of numbers from 0 to 999"
    for text in (b"<html>", b"[[1]]", b"5", b'{"a": 1}', real_json([[1000]]), real_json([[-1]])):
        serve({"real.json": text})
        with pytest.raises(DataError, match=message):
            read_real()
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_real_labels_are_fetched_once(serve: Callable[..., list[str]], tmp_path: Path) -> None:
    asked = serve({"real.json": real_json([[1, 2]])})
    assert read_real() == read_real() and len(asked) == 1
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*")) == ["imagenet", "real.json"]
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file in the way of a folder")
    with pytest.raises(SaveError, match=r"could not save the ReaL labels to .*cache/imagenet/real\.json"):
        read_real()
