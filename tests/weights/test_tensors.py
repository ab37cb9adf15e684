"""Tests of files of named tensors: written tensors are read in float32, and damage is reported."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import re
import resource
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.make import write_file
from vitrail.errors import BundleError, SaveError
from vitrail.weights import tensors as tensors_module
from vitrail.weights.tensors import SUFFIXES, TensorFile, open_tensors, save_tensors

TENSORS = {
    "a/kernel": torch.arange(6.0).reshape(2, 3) / 7,
    "b": torch.tensor([1.5, -2.0]),
    "scalar": torch.tensor(3.25),
    "empty": torch.zeros(0, 4),
    "stack": torch.arange(24.0).reshape(4, 3, 2),
}


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path of each kind of file."""
    return tmp_path / f"weights{request.param}"


def assert_read(file: TensorFile, tensors: dict[str, torch.Tensor]) -> None:
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert name in file and file.read(name).dtype == torch.float32
        assert torch.equal(file.read(name), tensor), name


def test_reads_what_the_library_wrote_whole_or_row_by_row(path: Path) -> None:
    other = {"step": torch.tensor(5), "ids": torch.arange(4), "mask": torch.tensor([True])}  # are no weights
    file = open_tensors(write_file(TENSORS | other, path))
    assert_read(file, TENSORS)
    assert "nothing" not in file and file.path == path
    for row in range(4):
        assert torch.equal(file.read("stack", row), TENSORS["stack"][row])
        assert file.read("stack", row).untyped_storage().nbytes() <= 24 * 4
    if path.suffix in (".safetensors", ".pth"):
        assert file.read("b").data_ptr() == file.read("b").data_ptr(), "a mapped file costs no memory of its own"
    write_file({}, path)
    with pytest.raises(BundleError, match=r"holds no (named )?tensors"):
        open_tensors(path)


@pytest.mark.parametrize(
    ("kind", "suffix"), [(torch.float16, ".pth"), (torch.bfloat16, ".safetensors"), (torch.float64, ".safetensors")]
)
def test_other_number_formats_become_float32(kind: torch.dtype, suffix: str, tmp_path: Path) -> None:
    tensors = {name: tensor.to(kind) for name, tensor in TENSORS.items()}
    file = open_tensors(write_file(tensors, tmp_path / f"x{suffix}"))
    assert_read(file, {name: tensor.float() for name, tensor in tensors.items()})
    assert file.read("stack", 2).dtype == torch.float32


@pytest.mark.parametrize(("kind", "order"), [("<f2", "C"), (">f4", "F"), ("<f8", "C"), (">f2", "F"), ("f16", "C")])
def test_other_number_formats_of_numpy_become_float32(kind: str, order: Any, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {name: np.asarray(tensor.numpy(), kind, order) for name, tensor in TENSORS.items()}
    np.savez(tmp_path / "x.npz", **arrays)
    file = open_tensors(tmp_path / "x.npz")
    assert_read(file, {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()})
    assert torch.equal(file.read("stack", 1), file.read("stack")[1]) and file.read("stack").is_contiguous()


@pytest.mark.parametrize(("compressed", "order"), [(False, "F"), (True, "C")])
def test_bfloat16_of_jax_in_an_npz(compressed: bool, order: Any, tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.5, 3e20], [0.1, 7.0, -0.0]]).bfloat16()
    # numpy has no such type, so jax's arrays are saved as two bytes without a meaning
    array = np.asarray(values.view(torch.int16).numpy().view("V2"), order=order)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "x.npz", w=array, step=np.array(7))
    file = open_tensors(tmp_path / "x.npz")
    assert_read(file, {"w": values.float()})
    assert torch.equal(file.read("w", 1), values[1].float())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda state: {"model": state, "args": {"x": [1, "two"]}},
        lambda state: {"teacher": state, "student": {name: torch.zeros_like(state[name]) for name in state}},
        lambda state: {"model": {"network": state}},
        lambda state: collections.OrderedDict(state),
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"teacher": {f"module.backbone.{name}": tensor for name, tensor in state.items()}},
        lambda state: {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()},
        lambda state: {f"backbone.module._orig_mod.{name}": tensor for name, tensor in state.items()},
        lambda state: {f"model_ema.module.{name}": tensor for name, tensor in state.items()},
        lambda state: {name: torch.nn.Parameter(tensor) for name, tensor in state.items()},
    ],
)
def test_weights_inside_a_checkpoint(wrap: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path) -> None:
    for file, zipped in ((tmp_path / "x.pth.tar", True), (tmp_path / "old.ckpt", False)):
        torch.save(wrap(TENSORS), file, _use_new_zipfile_serialization=zipped)
        assert_read(open_tensors(file), TENSORS)


@pytest.mark.parametrize("average", ["model_ema", "state_dict_ema", "teacher", "swa_model", "EMA", "avg-model"])
def test_the_average_goes_before_the_trained_weights(average: str, tmp_path: Path) -> None:
    trained = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    torch.save({"model": trained, average: TENSORS}, tmp_path / "x.pth")
    file = open_tensors(tmp_path / "x.pth")
    assert_read(file, TENSORS)
    (note,) = file.notes
    assert f"{average}.*" in note and "model.*" in note


def test_the_moments_of_an_optimizer_are_no_average_of_the_weights(tmp_path: Path) -> None:
    moments = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    torch.save({"model": TENSORS, "exp_avg": moments, "exp_avg_sq": moments}, tmp_path / "x.pth")
    assert_read(open_tensors(tmp_path / "x.pth"), TENSORS)


@pytest.mark.parametrize(
    ("beside", "place"),
    [
        ({"ema": {"decay": 0.9, "shadow_params": [*TENSORS.values()]}}, "ema.shadow_params.*"),
        ({"callbacks": {"EMACallback": {"weights": TENSORS}}}, "callbacks.EMACallback.weights"),
        ({"best": TENSORS}, "best"),
        ({f"best {name}": TENSORS[name] for name in TENSORS}, "the top level"),
        ({"optimizer": {"state": [*TENSORS.values()]}, "scale": torch.tensor(1.0)}, ""),
    ],
)
def test_a_copy_of_the_weights_that_is_not_read_is_named(beside: dict[str, Any], place: str, tmp_path: Path) -> None:
    torch.save({"model": TENSORS, **beside}, tmp_path / "x.pth")
    file = open_tensors(tmp_path / "x.pth")
    assert_read(file, TENSORS)
    assert [f"under {place} are not read" in note for note in file.notes] == [True] * bool(place)


def test_names_and_numbers_in_long_lists_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visited, search = [], tensors_module._places
    monkeypatch.setattr(tensors_module, "_places", lambda *place: visited.append(place) or search(*place))
    torch.save({"model": TENSORS, "order": [*range(1000)], "names": ["x"] * 1000}, tmp_path / "x.pth")
    assert_read(open_tensors(tmp_path / "x.pth"), TENSORS)
    assert len(visited) < 100


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"w": torch.zeros(2)}, "network": {"w": torch.zeros(2)}},
        {"student": {"w": torch.zeros(2)}, "teacher": {"w": torch.zeros(3)}},
        {"student": {"w": torch.zeros(2), "v": torch.zeros(1)}, "teacher": {"w": torch.zeros(2)}},
    ],
)
def test_two_networks_in_one_file(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(BundleError, match="holds several networks"):
        open_tensors(tmp_path / "x.pth")


@pytest.mark.parametrize("content", [torch.zeros(3), {}, [torch.zeros(2)], {"epoch": 1}, {"a": torch.tensor(1)}])
def test_a_pytorch_file_without_named_weights(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(BundleError, match=r"x\.pt holds no named tensors, neither at its top level nor under"):
        open_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_options_and_metrics_of_training_scripts_lie_beside_the_weights(zipped: bool, tmp_path: Path) -> None:
    more = {"args": argparse.Namespace(lr=0.1, blr=None), "best": np.float64(0.5), "epoch": np.int32(3)}
    torch.save({"model": {"w": torch.ones(2)}, **more}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    assert list(open_tensors(tmp_path / "x.pth").shapes) == ["w"]


def code_that_writes(marker: Path) -> object:
    """Return an object that runs code when it is unpickled."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(marker)!r}, 'w').close()",)

    return Evil()


@pytest.mark.parametrize("zipped", [True, False])
def test_the_code_in_a_pickle_does_not_run(zipped: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    marker = tmp_path / "was run"
    evil = code_that_writes(marker)
    torch.save({"w": torch.zeros(1), "evil": evil}, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    rest = "it is not loaded, because unpickling could run code. Save the state dict alone, best as .safetensors"
    with pytest.raises(BundleError, match=rf"x\.pth is damaged or contains the Python object .*exec; {rest}") as caught:
        open_tensors(tmp_path / "x.pth")
    (tmp_path / "bare.bin").write_bytes(pickle.dumps(evil))
    with pytest.raises(BundleError, match=r"bare\.bin is damaged") as bare:
        warnings.simplefilter("always")
        open_tensors(tmp_path / "bare.bin")
    assert not recwarn.list
    for error in (caught, bare):
        assert not re.search("weights_only=|safe_globals|trust", str(error.value))  # it advises nothing unsafe
    np.savez(tmp_path / "x.npz", w=np.zeros(2), evil=np.array([evil], dtype=object))
    with pytest.raises(BundleError, match=r"x\.npz: evil is a pickled object; it is not loaded, because unpickling"):
        open_tensors(tmp_path / "x.npz")
    assert not marker.exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists()


@pytest.fixture
def sharded(tmp_path: Path) -> Callable[..., Path]:
    """Write the tensors into two files with an index. `change` is called with the index's weight map."""

    def make(change: Callable[[dict[str, Any]], object] = dict) -> Path:
        first, second = dict(list(TENSORS.items())[:2]), dict(list(TENSORS.items())[2:])
        write_file(first, tmp_path / "model-1.safetensors")
        write_file(second, tmp_path / "model-2.safetensors")
        places = {**dict.fromkeys(first, "model-1.safetensors"), **dict.fromkeys(second, "model-2.safetensors")}
        change(places)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return index

    return make


def test_an_index_joins_its_shards(sharded: Callable[..., Path]) -> None:
    file = open_tensors(sharded())
    assert_read(file, TENSORS)
    assert torch.equal(file.read("stack", 2), TENSORS["stack"][2])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        *((place, "points outside its folder: ") for place in ("../b.safetensors", "/etc/b.safetensors", "a/b.pth")),
        *((place, "points to ") for place in ("model.safetensors.index.json", "config.json", "..", "", "readme")),
    ],
)
def test_an_index_points_to_weights_in_its_folder(place: str, message: str, sharded: Callable[..., Path]) -> None:
    index = sharded(lambda places: places.update(b=place))
    with pytest.raises(BundleError, match=rf"index\.json {message}'{re.escape(place)}'"):
        open_tensors(index)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"b": "model-3.safetensors"}, r"^weights '\S+model-3\.safetensors' do not exist"),
        ({"scalar": "model-1.safetensors"}, r"the tensor scalar is in model-1\.safetensors, but it is not"),
    ],
)
def test_missing_shards_and_tensors_are_named(
    places: dict[str, str], message: str, sharded: Callable[..., Path]
) -> None:
    with pytest.raises(BundleError, match=message):
        open_tensors(sharded(lambda known: known.update(places)))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "[" * 999])
def test_a_damaged_index(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(BundleError, match=r"index\.json is (empty|damaged)"):
        open_tensors(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.npz", None, r"weights '\S+none\.npz' do not exist: there is no such file"), (".", None, "do not exist"),
        ("weights.h5", b"x", r"'\.h5' is not one of \.safetensors, \.npz, \.pth, \.pt, \.bin"),
        ("weights", b"x", "'no suffix' is not one of"), *((f"x{suffix}", b"", "is empty") for suffix in SUFFIXES),
    ],
)  # fmt: skip
def test_what_is_no_file_of_weights_is_named(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        open_tensors(tmp_path / name)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(BundleError, match="git lfs pull"):
        open_tensors(path)


@pytest.mark.parametrize("share", [0.1, 0.999])
def test_a_file_cut_short(path: Path, share: float) -> None:
    write_file({f"w{number}": torch.randn(50) for number in range(20)}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BundleError, match=rf"{re.escape(str(path))} is damaged"):
        open_tensors(path)


def test_damage_inside_an_npz_is_seen_when_it_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", w=np.full(1000, 3.0, np.float32))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[2000] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    file = open_tensors(tmp_path / "x.npz").renamed(str.upper)
    with pytest.raises(BundleError, match=r"^\S+x\.npz is damaged: w cannot be read \(Bad CRC-32"):
        file.read("W")


def test_names_in_an_npz_need_no_suffix(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", w=np.ones((2, 3), np.float32))
    with zipfile.ZipFile(tmp_path / "x.npz") as old, zipfile.ZipFile(tmp_path / "y.npz", "w") as new:
        new.writestr("w", old.read("w.npy"))
    assert torch.equal(open_tensors(tmp_path / "y.npz").read("w"), torch.ones(2, 3))


@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensors_without_dense_values_are_refused(kind: Callable[[torch.Tensor], Any], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": kind(torch.ones(2, 2))}, tmp_path / "x.pth")
    with pytest.raises(BundleError, match=r"x\.pth: b is a tensor"):
        open_tensors(tmp_path / "x.pth")


def test_bfloat16_is_written_to_an_npz_as_float32(tmp_path: Path) -> None:
    save_tensors({"w": torch.tensor([1.5], dtype=torch.bfloat16)}, tmp_path / "x.npz", SUFFIXES)
    assert np.load(tmp_path / "x.npz")["w"] == np.float32(1.5)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_archives_of_something_else_are_refused_without_unsafe_advice(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "x.pt")
    with pytest.raises(BundleError, match=r"x\.pt is a TorchScript archive, .* Save the state dict alone, best as"):
        open_tensors(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(BundleError, match=r"x\.npz is damaged, cut short or of another format than its suffix"):
        open_tensors(tmp_path / "x.npz")


@settings(max_examples=15)
@given(content=st.binary(min_size=1, max_size=200), suffix=st.sampled_from(SUFFIXES))
@example(content=b"PK\x03\x04" + b"x" * 100, suffix=".npz")
@example(content=b"a page of text\n" * 20, suffix=".pth")
def test_any_bytes_give_an_error_of_ours(content: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(content)
    with pytest.raises(BundleError):
        open_tensors(path)


@settings(max_examples=15)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255), suffix=st.sampled_from(SUFFIXES))
def test_any_altered_byte_gives_tensors_or_an_error_of_ours(
    position: int, value: int, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"altered{suffix}"
    path.unlink(missing_ok=True)
    write_file({"w": torch.ones(3, 2)}, path)
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    try:
        file = open_tensors(path)
        for name in file.shapes:
            file.read(name)
    except BundleError:
        pass


def test_what_is_saved_is_what_is_read_and_can_replace_its_file(path: Path) -> None:
    path = path.parent / "new" / "folder" / path.name
    save_tensors(TENSORS, path, SUFFIXES)
    file = open_tensors(path)
    tensors = {name: file.read(name) for name in file.shapes}
    for _ in range(3):
        save_tensors({"first": torch.zeros(5000), **tensors}, path, SUFFIXES)
    assert_read(open_tensors(path), {"first": torch.zeros(5000), **TENSORS})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    (new := path.with_name("new")).touch()
    assert path.stat().st_mode == new.stat().st_mode, "others can read it if they can read new files"
    (link := path.with_name(f"link-{path.name}")).symlink_to(path)
    save_tensors(TENSORS, link, SUFFIXES)
    assert link.is_symlink()
    assert_read(open_tensors(path), TENSORS)


def test_a_part_of_a_tensor_is_saved_without_the_rest(tmp_path: Path) -> None:
    save_tensors({"part": torch.zeros(100_000)[:10]}, tmp_path / "x.pth", (".pth",))
    assert (tmp_path / "x.pth").stat().st_size < 5000


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    for name in ("x.h5", "x"):
        with pytest.raises(BundleError, match=rf"cannot write '\S+{name}': the file name must end in \.pth or \.pt"):
            save_tensors(TENSORS, tmp_path / name, (".pth", ".pt"))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(path: Path) -> None:
    before = write_file(TENSORS, path).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # no file of this process can grow past it
    try:
        with pytest.raises(SaveError, match=r"could not save the weights to .*: .*File too large.*; an earlier"):
            save_tensors({"w": torch.zeros(10_000)}, path, SUFFIXES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_places_that_cannot_be_written(path: Path) -> None:
    path.mkdir()
    with pytest.raises(SaveError, match="Is a directory"):
        save_tensors(TENSORS, path, SUFFIXES)
    (path / "file").write_text("mine")
    with pytest.raises(SaveError, match="could not save the weights"):
        save_tensors(TENSORS, path / "file" / path.name, SUFFIXES)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert (path / "file").read_text() == "mine"
