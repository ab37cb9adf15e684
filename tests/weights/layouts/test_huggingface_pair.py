"""Tests of CLIP and SigLIP of transformers: their logits, embeddings and tokens are ours, both ways."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from vitrail.data.texts import TextTokenizer, train_tokenizer
from vitrail.errors import BundleError

transformers = pytest.importorskip("transformers")
TEXTS = ["a photo of a bee", "Two WASPS, resting!", "x"]
SENTENCES = ["a photo of a bee", "two wasps resting", "a red fly on a leaf"] * 4


def save_clip(folder: Path, act: str) -> Any:
    tokenizer = train_tokenizer(SENTENCES, vocabulary=560, context=28)
    model = json.loads(tokenizer.content)["model"]
    end = tokenizer.end_token
    text = {
        "vocab_size": tokenizer.vocabulary, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": 28, "hidden_act": act, "eos_token_id": end,
        "bos_token_id": end - 1, "pad_token_id": end,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 24, "patch_size": 8, "hidden_act": act,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=20)
    network = transformers.CLIPModel(config).eval()
    network.save_pretrained(folder)
    transformers.CLIPTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]).save_pretrained(
        folder
    )
    return network


def pieces() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=60, character_coverage=1.0, pad_id=0,
        eos_id=1, bos_id=-1, unk_id=2, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def save_siglip(folder: Path, *, second: bool = False, image_size: int = 24) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    if second:  # the tokenizer of Gemma: merged pieces, with bytes for unknown characters
        table = {name: number for number, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"])}
        table |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
        for piece in [*"abcdefghijklmnopqrstuvwxyz▁", "ph", "pho", "▁a", "be"]:
            table.setdefault(piece, len(table))
        merges = [("p", "h"), ("ph", "o"), ("▁", "a"), ("b", "e")]
        transformers.Siglip2Tokenizer(vocab=table, merges=merges).save_pretrained(folder)
        size = len(table)
    else:
        (folder / "spiece.model").write_bytes(pieces())
        size = TextTokenizer(pieces(), "sentencepiece", 28, end_token=1, padding=1).vocabulary
    shared = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.SiglipConfig(
        text_config={**shared, "vocab_size": size, "max_position_embeddings": 28, "projection_size": 24},
        vision_config={**shared, "image_size": image_size, "patch_size": 8},
    )
    network = transformers.SiglipModel(config).eval()
    with torch.no_grad():
        network.logit_scale.fill_(2.3)
        network.logit_bias.fill_(-4.0)
    network.save_pretrained(folder)
    return network


MAKERS: dict[str, Callable[[Path], Any]] = {
    "clip": lambda folder: save_clip(folder, "quick_gelu"),
    "clip-gelu": lambda folder: save_clip(folder, "gelu"),
    "siglip": save_siglip,
    "siglip2": lambda folder: save_siglip(folder, second=True),
}


def check_same(theirs: Any, ours: vitrail.Bundle, tokens: torch.Tensor) -> None:
    images = torch.randn(2, 3, 24, 24)
    with torch.inference_mode():
        out = theirs(input_ids=tokens, pixel_values=images)
        embedded = torch.nn.functional.normalize(ours.network.embed(images), dim=-1)
        texts = ours.embed_texts(TEXTS)
    assert torch.allclose(embedded, out.image_embeds, atol=1e-5)
    assert torch.allclose(texts, out.text_embeds, atol=1e-5)
    logits = np.exp(ours.words.scale) * embedded @ texts.T + (ours.words.bias or 0.0)
    assert torch.allclose(logits, out.logits_per_image, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_logits_embeddings_and_tokens_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = MAKERS[kind](tmp_path / "theirs")
    ours = vitrail.load(tmp_path / "theirs", device="cpu")
    tokens = torch.from_numpy(ours.words.tokenizer.encode(TEXTS).tokens)
    if kind == "siglip2":
        reader: Any = transformers.Siglip2Tokenizer.from_pretrained(tmp_path / "theirs")
        expected = [[*reader(text, add_special_tokens=False)["input_ids"], reader.eos_token_id] for text in TEXTS]
        assert [row[row != reader.pad_token_id].tolist() for row in tokens] == expected
    else:
        family = transformers.SiglipTokenizer if kind == "siglip" else transformers.CLIPTokenizer
        reader = family.from_pretrained(tmp_path / "theirs")
        expected = reader(TEXTS, padding="max_length", truncation=True, max_length=28)["input_ids"]
        assert tokens.tolist() == expected
    check_same(theirs, ours, tokens)

    to = f"huggingface-{kind.split('-')[0].rstrip('2')}"
    ours.save(tmp_path / "ours")
    lost = vitrail.convert(tmp_path / "ours", tmp_path / "back", to=to)
    assert not [note for note in lost if "not carried" in note]
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    check_same(again, vitrail.load(tmp_path / "back", device="cpu"), tokens)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    if kind != "siglip2":
        assert written(TEXTS, padding="max_length", truncation=True, max_length=28)["input_ids"] == tokens.tolist()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_clip(tmp_path, "gelu")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(BundleError, match="no tokenizer"):
        vitrail.load(tmp_path)
    (tmp_path / "spiece.model").write_bytes(pieces())
    with pytest.raises(BundleError, match="not a token"):
        vitrail.load(tmp_path)


def test_pixels_that_fill_no_patch_are_cut_as_in_the_library(tmp_path: Path) -> None:
    """SigLIP so400m has patches of 14 pixels and images of 384."""
    theirs = save_siglip(tmp_path / "theirs", image_size=30)
    ours = vitrail.load(tmp_path / "theirs", device="cpu")
    vitrail.convert(tmp_path / "theirs", tmp_path / "back", to="huggingface-siglip")
    images = torch.randn(2, 3, 30, 30)
    with torch.inference_mode():
        expected = theirs.get_image_features(images).pooler_output
        for model in (ours, vitrail.load(tmp_path / "back", device="cpu")):
            assert model.preprocess.image_size == (30, 30)
            assert torch.allclose(model.network.embed(images), expected, atol=1e-5)
    with pytest.raises(BundleError, match="cut_uneven=True"):  # a file without an image size would be read for 24
        vitrail.convert(tmp_path / "theirs", tmp_path / "other", to="big-vision-pair")


def test_a_note_tells_that_positions_are_resized_to_the_size_of_the_preprocessing(tmp_path: Path) -> None:
    save_siglip(tmp_path)
    content = {"size": {"height": 32, "width": 32}, "resample": 3, "image_mean": [0.5], "image_std": [0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    larger = vitrail.load(tmp_path, device="cpu")
    assert larger.network.config.image_size == (32, 32)
    assert any("positions are resized" in note for note in larger.notes)
    assert vitrail.load(tmp_path, device="cpu", image_size=(24, 24)).notes == ()


@pytest.mark.parametrize(
    ("save", "setting"),
    [
        (save_siglip, {"padding_side": "left"}), (save_siglip, {"do_lower_case": False}),
        (save_siglip, {"add_bos_token": True}), (save_siglip, {"add_eos_token": False}),
        (lambda folder: save_clip(folder, "gelu"), {"truncation_side": "left"}),
    ],
)  # fmt: skip
def test_settings_of_a_tokenizer_that_change_tokens_are_refused(
    save: Callable[[Path], Any], setting: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **setting}))
    with pytest.raises(BundleError, match=f"{next(iter(setting))}="):
        vitrail.load(tmp_path)


def test_the_end_of_a_text_is_the_token_that_the_config_names(tmp_path: Path) -> None:
    """transformers reads the number 2, which older files have, as the largest token."""
    save_clip(tmp_path, "gelu")
    content = json.loads((tmp_path / "config.json").read_text())
    for number, is_read in ((2, True), (17, False)):
        content["text_config"]["eos_token_id"] = number
        (tmp_path / "config.json").write_text(json.dumps(content))
        if is_read:
            vitrail.load(tmp_path, device="cpu")
    with pytest.raises(BundleError, match="eos_token_id=17"):
        vitrail.load(tmp_path)


def test_an_unknown_activation_is_refused(tmp_path: Path) -> None:
    save_clip(tmp_path, "gelu")
    content = json.loads((tmp_path / "config.json").read_text())
    content["text_config"]["hidden_act"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(BundleError, match="hidden_act='relu'"):
        vitrail.load(tmp_path)
    with pytest.raises(BundleError, match="text tower"):
        vitrail.convert("small", tmp_path / "other", to="huggingface-clip")
