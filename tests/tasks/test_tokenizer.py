"""Tests of saved tokenizers: loading, altered files, and the images of a run as a tokenizer sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.tasks.books import make_tokenizer
from tests.tasks.images import images_of
from tests.tasks.objectives import small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, DestinationError
from vitrail.models.variants import variant_config
from vitrail.tasks.tokenizer import TokenizerTargets, check_grid, load_tokenizer, tokenizer_facts
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import convert, load
from vitrail.weights.saved import TOKENIZER


def test_a_tokenizer_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    made = make_tokenizer()
    folder = made.save(tmp_path / "run" / "model")
    images = images_of(3)
    for place in (folder, tmp_path / "run"):
        read = load_tokenizer(place)
        assert read.sha256 == made.sha256 and read.preprocess == made.preprocess and read.provenance == made.provenance
        assert torch.equal(read.tokens(images), made.tokens(images)) and read.tokens(images).shape == (3, 12)
        restored = read.restored(read.tokens(images))
        assert restored.shape == images.shape and torch.equal(restored, made.restored(made.tokens(images)))
    plain = load(tmp_path / "run")
    assert plain.classes == () and weights_sha256(plain.network) == weights_sha256(made.network)
    assert torch.equal(plain.network.embed(images), made.network.embed(images))


@pytest.mark.parametrize("to", ["vitrail", "timm"])
def test_a_converted_tokenizer_says_that_its_codebook_is_lost(tmp_path: Path, to: str) -> None:
    folder = make_tokenizer().save(tmp_path / "run" / "model")
    for number, place in enumerate((folder, tmp_path / "run")):
        notes = convert(place, tmp_path / f"{number}", to)
        assert any("not carried" in note and "codebook" in note for note in notes)
    assert not any("codebook" in note for note in convert(tmp_path / "0", tmp_path / "again", to))


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    one, other = make_tokenizer(), make_tokenizer(codes=9)
    folder = one.save(tmp_path / "model")
    with pytest.raises(DestinationError, match="exists already"):
        other.save(folder)
    with pytest.raises(ConfigError, match="stored='bfloat16': rounding the weights of a tokenizer would change its"):
        other.save(folder, overwrite=True, stored="bfloat16")
    other.save(folder, overwrite=True)
    assert load_tokenizer(folder).coder.config.codes == 9
    Bundle(one.network, (), one.preprocess).save(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["model.json", "model.safetensors"]


def other_encoder(folder: Path) -> None:
    made = make_tokenizer()
    with torch.no_grad():
        next(made.network.parameters()).add_(1)
    content = (folder / TOKENIZER).read_bytes()
    Bundle(made.network, (), made.preprocess).save(folder, overwrite=True)
    (folder / TOKENIZER).write_bytes(content)


def other_width(folder: Path) -> None:
    network = small_network(width=24, heads=3)
    content = (folder / TOKENIZER).read_bytes()
    Bundle(network, (), Preprocess(image_size=(21, 28))).save(folder, overwrite=True)
    (folder / TOKENIZER).write_bytes(content)


def rewritten(folder: Path, **changes: object) -> None:
    tensors = load_file(folder / TOKENIZER)
    tensors["codebook.codes"][0, 0] += 1
    header = {"format": 1, "config": {}, **changes}
    save_file(tensors, folder / TOKENIZER, metadata={"tokenizer": json.dumps(header)})


def altered(folder: Path) -> None:
    content = bytearray((folder / TOKENIZER).read_bytes())
    content[-1] ^= 1
    (folder / TOKENIZER).write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda folder: (folder / TOKENIZER).unlink(), "is a model without a codebook"),
        (lambda folder: (folder / TOKENIZER).write_bytes(b"none"), "tokenizer.safetensors is damaged"),
        (lambda folder: save_file({}, folder / TOKENIZER), "has format None, but this version of Vitrail reads forma"),
        (lambda folder: rewritten(folder, format=2), "has format 2, but this version of Vitrail reads format 1"),
        (rewritten, "tokenizer.safetensors does not fit the encoder beside it"),
        (other_width, "tokenizer.safetensors does not fit the encoder beside it"),
        (other_encoder, "tokenizer.safetensors belongs to other weights of the encoder: a SHA-256 is not"),
        (altered, "tokenizer.safetensors was altered: a SHA-256 is not the one that its header states; copy the model"),
        (lambda folder: (folder / "model.json").unlink(), "model.safetensors holds the weights of a Vitrail network"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused(break_: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = make_tokenizer().save(tmp_path / "model")
    break_(folder)
    with pytest.raises(BundleError, match=message):
        load_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"tokenizer='.*model' cannot be loaded: "):
        tokenizer_facts(str(folder))


def test_facts_are_those_of_the_newest_files(tmp_path: Path) -> None:
    made = make_tokenizer()
    folder = made.save(tmp_path / "model")
    facts = tokenizer_facts(str(folder))
    assert (facts.sha256, facts.coder.codes, facts.patches) == (made.sha256, 24, 12)
    assert tokenizer_facts(str(folder)) is facts
    make_tokenizer(codes=9).save(folder, overwrite=True)
    assert tokenizer_facts(str(folder)).coder.codes == 9


def test_a_network_with_as_many_patches_fits(tmp_path: Path) -> None:
    folder = str(make_tokenizer().save(tmp_path / "model"))
    for variant, size in (("ViT-Pico/7", (21, 28)), ("ViT-Pico/14", (42, 56)), ("ViT-Pico/16x8", (48, 32))):
        check_grid(folder, variant_config(variant, image_size=size))
    with pytest.raises(ConfigError, match=r"has tokens of 3 x 4 patches .* but the network has 4 x 3 patches"):
        check_grid(folder, variant_config("ViT-Pico/7", image_size=(28, 21)))


@pytest.mark.parametrize(("channels", "size"), [
    ((3, 3), (42, 56)), ((3, 1), (21, 28)), ((1, 3), (42, 56)), ((1, 1), (21, 28)),
])  # fmt: skip
def test_a_tokenizer_sees_images_with_its_own_preprocessing(
    channels: tuple[int, int], size: tuple[int, int], tmp_path: Path
) -> None:
    of_run, own = channels
    made = make_tokenizer(channels=own)
    targets = TokenizerTargets(str(made.save(tmp_path / "model")))
    preprocess = Preprocess(image_size=size, channels=of_run, mean=(0.5,), std=(0.25,))
    targets.begin(preprocess, torch.device("cpu"))
    pixels = torch.rand(2, of_run, *size)
    seen = pixels if of_run == own else pixels.repeat(1, 3, 1, 1)
    if (of_run, own) == (3, 1):
        seen = (0.299 * pixels[:, 0] + 0.587 * pixels[:, 1] + 0.114 * pixels[:, 2])[:, None]
    if size != (21, 28):
        seen = F.interpolate(seen, (21, 28), mode="bilinear", antialias=True)
    expected = made.tokens((seen - 0.4) / 0.3)
    found = targets.tokens((pixels - 0.5) / 0.25)
    assert (found == expected).float().mean() > 0.95, "rounding may move a patch to another code"
    assert targets.restored(found).shape == (2, of_run, *size)
    assert not any(weight.requires_grad for weight in targets.tokenizer.coder.parameters())
