"""Tests of exported text towers: embeddings, tokenizers, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

from tests.cli.conftest import Cli
from tests.serving.conftest import make_bundle
from tests.words import bert_of_bees, model_with_words, text_config, tokenizer_of_bees
from vitrail import load
from vitrail.errors import BundleError, ConfigError, DestinationError, VitrailError
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.export.export import Exporter, export
from vitrail.export.formats import FORMATS
from vitrail.export.parity import usual_texts
from vitrail.export.program import describe
from vitrail.models.text import TextConfig, TextPool, TextTower
from vitrail.settings import to_plain
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.words import Words
from vitrail.weights.zero_shot import zero_shot

pytestmark = pytest.mark.slow  # writing the first file takes seconds

TEXTS = ["a bee", "a wasp is here", "x", "bee " * 40, "the photo"]


def write(bundle: Bundle, path: Path, to: str, **options: bool) -> Path:
    return export(bundle, path, to, usual_texts(9), contents="text_embedding", **options).path


@pytest.fixture(scope="module", autouse=True)
def unchecked() -> Iterator[None]:
    """Leave out the type checks of tests, which would fix the size of the batch that is traced."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def model() -> Bundle:
    return model_with_words(bias=-2.0)


@pytest.fixture(scope="module")
def onnx(model: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("texts") / "bees.onnx", "onnx")


def words_of(model: Bundle, pool: TextPool, *, is_causal: bool) -> Words:
    """Return another text tower for a model: that of BERT for `pool="cls"`."""
    torch.manual_seed(2)
    tokenizer = tokenizer_of_bees()
    config: TextConfig = replace(text_config(tokenizer), pool=pool, is_causal=is_causal)
    if pool == "cls":
        config, tokenizer = bert_of_bees()
    assert model.words is not None
    return replace(model.words, tower=TextTower(config).eval(), tokenizer=tokenizer)


@pytest.mark.filterwarnings("ignore:.*the end was cut")
def test_the_file_embeds_texts_like_the_model(model: Bundle, onnx: Path) -> None:
    file = load(onnx)
    for count in range(1, len(TEXTS) + 1):
        torch.testing.assert_close(file.embed_texts(TEXTS[:count]), model.embed_texts(TEXTS[:count]), atol=1e-6, rtol=0)
    assert file.words is not None and model.words is not None
    assert (file.words.scale, file.words.bias) == (model.words.scale, model.words.bias)


def test_other_programs_find_tokens_and_the_tokenizer(model: Bundle, onnx: Path) -> None:
    import onnxruntime
    import tokenizers

    session = onnxruntime.InferenceSession(onnx)
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, taken.type, taken.shape) == ("tokens", "tensor(int64)", ["batch", 12])
    assert (given.name, given.shape) == ("text_embedding", ["batch", 20])
    own = tokenizers.Tokenizer.from_file(str(onnx.with_name("bees.onnx.tokenizer.json")))
    words = json.loads(session.get_modelmeta().custom_metadata_map["vitrail"])["words"]
    rules, rows = words["tokenizer"], []
    for text in ("a bee", "wasp"):
        row = [rules["start_token"], *own.encode(text, add_special_tokens=False).ids, rules["end_token"]]
        rows.append(row + [rules["padding"]] * (rules["context"] - len(row)))
    (found,) = session.run(None, {"tokens": np.array(rows, np.int64)})
    np.testing.assert_allclose(found, model.embed_texts(["a bee", "wasp"]).numpy(), atol=1e-6)
    assert words["scale"] == pytest.approx(math.log(20))


@pytest.mark.parametrize(
    ("pool", "is_causal", "to"),
    [
        ("eot", False, "pt2"), ("last", False, "openvino"), ("map", False, "onnx"), ("eot", True, "openvino"),
        ("last", True, "pt2"), ("map", True, "triton"), ("cls", False, "onnx"), ("cls", False, "openvino"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*the end was cut")
def test_every_tower_in_every_format(model: Bundle, pool: TextPool, is_causal: bool, to: str, tmp_path: Path) -> None:
    bundle = replace(model, words=words_of(model, pool, is_causal=is_causal))
    file = load(write(bundle, tmp_path / f"bees{FORMATS[to].suffix}", to))
    for count in (1, 3, 5):
        torch.testing.assert_close(
            file.embed_texts(TEXTS[:count]), bundle.embed_texts(TEXTS[:count]), atol=1e-5, rtol=0
        )


def test_a_file_of_texts_refuses_everything_else(model: Bundle, onnx: Path, tmp_path: Path) -> None:
    file = load(onnx)
    image = np.zeros((24, 16, 3), np.uint8)
    attempts: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: file.embed([image]), "text tower only"),
        (lambda: file.predict([image]), "no head"),
        (lambda: file.save(tmp_path / "model"), "cannot be read, saved"),
        (lambda: zero_shot(file, ["a bee", "a wasp"]), "another head"),
        (lambda: load(onnx, num_classes=3), "num_classes"),
        (lambda: write(file, tmp_path / "again.pt2", "pt2"), "exported already"),
        (lambda: write(make_bundle(), tmp_path / "a.pt2", "pt2"), "no text tower"),
        (lambda: describe(model, "text_embedding", resizes=True), "resize=True"),
        (lambda: describe(model, "text_embedding", any_size=True), "any_size=True"),
        (lambda: describe(model, "text_embeding"), "nearest: text_embedding"),  # type: ignore[arg-type]
        (lambda: Exporter(model, TEXTS, contents="text_embedding").write(tmp_path / "a.onnx", "onnx", "int8"), "int8"),
    )
    for attempt, message in attempts:
        with pytest.raises(VitrailError, match=message):
            attempt()
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_belongs_to_the_file(model: Bundle, onnx: Path, tmp_path: Path) -> None:
    copy, beside = tmp_path / "bees.onnx", tmp_path / "bees.onnx.tokenizer.json"
    copy.write_bytes(onnx.read_bytes())
    with pytest.raises(BundleError, match=r"bees\.onnx\.tokenizer\.json is missing"):
        load(copy)
    beside.write_bytes(b"{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json was altered"):
        load(copy)
    copy.unlink()
    with pytest.raises(DestinationError, match=r"bees\.onnx\.tokenizer\.json exists "):
        write(model, copy, "onnx")
    content = bytearray(onnx.read_bytes())
    content[len(content) // 2] ^= 1
    copy.write_bytes(content)
    with pytest.raises(BundleError):
        load(copy)


def test_texts_find_the_images_of_the_same_model(model: Bundle, onnx: Path) -> None:
    about = {
        "weights_sha256": weights_sha256(model.network),
        "config": to_plain(model.network.config),
        "preprocess": to_plain(model.preprocess),
    }
    index = FeatureIndex(Path("f"), np.zeros((1, 20), np.float32), ("a.png",), (None,), about)
    index.check(load(onnx))
    with pytest.raises(ConfigError, match="other weights"):
        replace(index, about={"weights_sha256": "0"}).check(load(onnx))


def test_the_command(
    model: Bundle, colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    cli = Cli(capsys)
    command = ["export", model.save(tmp_path / "bees"), "--to", "pt2", "--output"]
    for words, message in (
        (["text"], "--output: 'text'"), (["text_embedding", "--resize"], "--resize"),
        (["text_embedding", "--image-size", "24", "16"], "--image-size"),
        (["text_embedding", "--max-pixels", "900"], "--max-pixels"),
        (["text_embedding", "--data", colour_folder], "has no texts"),
    ):  # fmt: skip
        assert message in cli.refuses(*command, *words)
    shown = cli.json(*command, "text_embedding", "--images", "9")
    (written,) = shown["files"]
    assert written["written"] == "bees-text.pt2" and written["parity"]["compared"] == "texts"
    assert (tmp_path / "bees-text.pt2").exists() and (tmp_path / "bees-text.pt2.tokenizer.json").exists()
    assert "20 times the cosine plus -2" in shown["notes"][-1] and "12 tokens" in shown["notes"][-1]
    assert "no head" in cli.refuses("predict", "bees-text.pt2", next(colour_folder.rglob("*.png")))
