"""Tests of big_vision's pairs of towers. transformers' SigLIP under big_vision's names is the same model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.words import PIECES, bert_of_bees, model_with_words
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.texts import TextTokenizer
from vitrail.errors import BundleError
from vitrail.models.text import Pair, PairConfig, TextConfig
from vitrail.models.variants import build, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import Words

pytest.importorskip("transformers")  # which the helpers need

from tests.weights.layouts.test_huggingface_pair import TEXTS, check_same, pieces, save_siglip

HEADS = 3
BERT_TEXTS = ["a photo of a bee", "Bees, bees, 2 wasps!", "x", "bee " * 40]


def attention(
    projections: dict[str, tuple[torch.Tensor, torch.Tensor]], out: tuple[torch.Tensor, torch.Tensor], ours: str
) -> dict[str, np.ndarray]:
    """Return the kernels and biases of queries, keys and values, which big_vision divides among the heads, and those of
    the projection behind them."""
    place, found = f"{ours}/MultiHeadDotProductAttention_0", {}
    for part, (weight, bias) in projections.items():
        found[f"{place}/{part}/kernel"] = weight.T.reshape(weight.shape[1], HEADS, -1).numpy()
        found[f"{place}/{part}/bias"] = bias.reshape(HEADS, -1).numpy()
    weight, bias = out
    found[f"{place}/out/kernel"] = weight.T.reshape(HEADS, -1, len(bias)).numpy()
    found[f"{place}/out/bias"] = bias.numpy()
    return found


def block(state: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, np.ndarray]:
    def both(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return state[f"{theirs}.self_attn.{name}.weight"], state[f"{theirs}.self_attn.{name}.bias"]

    projections = {part: both(f"{part[0]}_proj") for part in ("query", "key", "value")}
    found = attention(projections, both("out_proj"), ours)
    for number in (0, 1):
        found |= norm(state, f"{theirs}.layer_norm{number + 1}", f"{ours}/LayerNorm_{number}")
        found |= dense(state, f"{theirs}.mlp.fc{number + 1}", f"{ours}/MlpBlock_0/Dense_{number}")
    return found


def dense(state: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {f"{ours}/kernel": state[f"{theirs}.weight"].T.numpy(), f"{ours}/bias": state[f"{theirs}.bias"].numpy()}


def norm(state: dict[str, torch.Tensor], theirs: str, ours: str) -> dict[str, np.ndarray]:
    return {f"{ours}/scale": state[f"{theirs}.weight"].numpy(), f"{ours}/bias": state[f"{theirs}.bias"].numpy()}


def big_vision_names(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    vision, text = "vision_model.", "text_model."
    patches = state[f"{vision}embeddings.patch_embedding.weight"]
    found = {
        "img/embedding/kernel": patches.permute(2, 3, 1, 0).numpy(),
        "img/embedding/bias": state[f"{vision}embeddings.patch_embedding.bias"].numpy(),
        "img/pos_embedding": state[f"{vision}embeddings.position_embedding.weight"][None].numpy(),
        "txt/Embed_0/embedding": state[f"{text}embeddings.token_embedding.weight"].numpy(),
        "txt/pos_embedding": state[f"{text}embeddings.position_embedding.weight"][None].numpy(),
        "t": state["logit_scale"].reshape(1).numpy(), "b": state["logit_bias"].reshape(1).numpy(),
        **norm(state, f"{vision}post_layernorm", "img/Transformer/encoder_norm"),
        **norm(state, f"{text}final_layer_norm", "txt/Encoder_0/encoder_norm"),
        **dense(state, f"{text}head", "txt/head"),
    }  # fmt: skip
    for layer in range(2):
        found |= block(state, f"{vision}encoder.layers.{layer}", f"img/Transformer/encoderblock_{layer}")
        found |= block(state, f"{text}encoder.layers.{layer}", f"txt/Encoder_0/encoderblock_{layer}")
    pool, head = "img/MAPHead_0", f"{vision}head."
    found[f"{pool}/probe"] = state[f"{head}probe"].numpy()
    thirds = (state[f"{head}attention.in_proj_{part}"].chunk(3) for part in ("weight", "bias"))
    projections = dict(zip(("query", "key", "value"), zip(*thirds, strict=True), strict=True))
    out = state[f"{head}attention.out_proj.weight"], state[f"{head}attention.out_proj.bias"]
    found |= attention(projections, out, pool)
    found |= norm(state, f"{head}layernorm", f"{pool}/LayerNorm_0")
    for number in (0, 1):
        found |= dense(state, f"{head}mlp.fc{number + 1}", f"{pool}/MlpBlock_0/Dense_{number}")
    return {f"params/{name}": value for name, value in found.items()}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with all blocks of a tower along a first axis, as big_vision writes scanned towers."""
    found = {name: value for name, value in tensors.items() if "encoderblock_1" not in name}
    for name in [name for name in found if "encoderblock_0" in name]:
        both = [tensors[name], tensors[name.replace("encoderblock_0", "encoderblock_1")]]
        del found[name]
        found[name.replace("encoderblock_0", "encoderblock")] = np.stack(both)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_logits_and_embeddings_are_those_of_siglip(scanned: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs: Any = save_siglip(tmp_path / "theirs")
    tensors: Any = big_vision_names({name: value.detach() for name, value in theirs.state_dict().items()})
    (tmp_path / "big").mkdir()
    np.savez(tmp_path / "big" / "siglip.npz", **(stacked(tensors) if scanned else tensors))
    alone = vitrail.load(tmp_path / "big" / "siglip.npz", device="cpu")
    assert alone.words is None and any("no tokenizer (spiece.model)" in note for note in alone.notes)
    (tmp_path / "big" / "spiece.model").write_bytes(pieces())
    ours = vitrail.load(tmp_path / "big" / "siglip.npz", device="cpu")
    assert ours.words is not None and ours.provenance["layout"] == "big-vision-pair"
    tokens = torch.from_numpy(ours.words.tokenizer.encode(TEXTS).tokens)
    check_same(theirs, ours, tokens)
    lost = vitrail.convert(tmp_path / "big" / "siglip.npz", tmp_path / "back", to="big-vision-pair")
    assert not [note for note in lost if "not carried" in note and "preprocessing" not in note]
    with np.load(tmp_path / "back" / "model.npz") as written:
        assert written.keys() == tensors.keys()
        for name in tensors:
            np.testing.assert_array_equal(written[name], tensors[name], err_msg=name)
    check_same(theirs, vitrail.load(tmp_path / "back", device="cpu"), tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "bias"), [("map", -3.0), ("last", None)])
def test_pairs_come_back_as_they_were(pool: Any, bias: float | None, tmp_path: Path) -> None:
    """Attention pooling of texts, and a pair without a bias, which learned by a softmax."""
    torch.manual_seed(0)
    tokenizer = TextTokenizer(pieces(), "sentencepiece", 28, end_token=1, padding=1, cleaning="canonical")
    shared: Any = {"width": 24, "depth": 2, "heads": 3, "mlp_width": 40, "activation": "gelu-tanh", "norm_eps": 1e-6}
    image = ViTConfig(image_size=(24, 24), patch_size=(8, 8), num_classes=0, pool="gap", **shared)
    text = TextConfig(
        vocabulary=tokenizer.vocabulary, context=28, end_token=1, is_causal=False, pool=pool, outputs=24,
        output_bias=True, **shared,
    )  # fmt: skip
    pair = Pair(PairConfig(image=image, text=text, bias=bias)).eval()
    bundle = vitrail.Bundle(pair.image, (), Preprocess(image_size=(24, 24)), words=Words.of(pair, tokenizer))
    bundle.save(tmp_path / "ours")
    vitrail.convert(tmp_path / "ours", tmp_path / "theirs", to="big-vision-pair")
    again = vitrail.load(tmp_path / "theirs", device="cpu")
    assert again.words.bias == bias
    file = (tmp_path / "theirs" / "spiece.model").rename(tmp_path / "bare.model")
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    weights = tmp_path / "theirs" / "model.npz"
    assert any("--tokenizer" in note for note in vitrail.load(weights, device="cpu").notes)
    named = vitrail.load(weights, device="cpu", tokenizer=file)
    assert torch.equal(named.embed_texts(TEXTS), again.embed_texts(TEXTS))
    (tmp_path / "text.model").write_text("no pieces")
    for model, tokenizer, message in (
        (weights, tmp_path / "none.model", "does not exist"), (weights, tmp_path / "text.model", "not a model of"),
        (weights, tmp_path / "ours" / "model.json", "cannot be read"), (tmp_path / "ours", file, "its own tokenizer"),
    ):  # fmt: skip
        with pytest.raises(BundleError, match=message):
            vitrail.load(model, tokenizer=tokenizer)
    torch.testing.assert_close(again.embed_texts(TEXTS), bundle.embed_texts(TEXTS), rtol=0, atol=1e-6)
    images = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(again.network.embed(images), bundle.network.embed(images), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["whole", "without a tokenizer", "another network", "projected"])
def test_lit_of_vision_transformer(form: str, tmp_path: Path) -> None:
    """The image tower is one that `google` writes, whose outputs are compared with the original code elsewhere, and the
    text tower is that of transformers' SigLIP. Texts are read as they are."""
    torch.manual_seed(0)
    theirs: Any = save_siglip(tmp_path / "siglip")
    tensors = big_vision_names({name: value.detach() for name, value in theirs.state_dict().items()})
    found = {name.removeprefix("params/"): value for name, value in tensors.items() if name.startswith("params/t")}
    image, images = lit_image(found, tmp_path, width=24, num_classes=5 if form == "projected" else 0)
    if form == "another network":
        found = {name.replace("txt/Encoder_0", "txt/Decoder_0"): value for name, value in found.items()}
    folder = tmp_path / "lit"
    folder.mkdir()
    np.savez(folder / "LiT.npz", **found)
    if form != "without a tokenizer":
        (folder / "spiece.model").write_bytes(pieces())
    if form == "projected":
        with pytest.raises(BundleError, match="projects"):
            vitrail.load(folder / "LiT.npz")
        return
    ours = vitrail.load(folder / "LiT.npz", device="cpu")
    torch.testing.assert_close(ours.network.embed(images), image.network.embed(images), rtol=0, atol=1e-6)
    assert ours.preprocess.resize == "squash"
    if form != "whole":
        assert ours.words is None
        message = "neither big_vision's own network nor BERT" if form == "another network" else "(spiece.model)"
        assert any(message in note for note in ours.notes)
        return
    assert ours.words.bias is None and ours.words.tokenizer.cleaning == "none"
    tokens = torch.from_numpy(ours.words.tokenizer.encode(TEXTS).tokens)
    with torch.inference_mode():
        expected = theirs.text_model(input_ids=tokens).pooler_output
    expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(ours.embed_texts(TEXTS), expected, rtol=0, atol=1e-5)
    assert ours.words.scale == pytest.approx(theirs.logit_scale.item())


def lit_image(found: dict[str, Any], folder: Path, *, width: int, num_classes: int = 0) -> tuple[Bundle, torch.Tensor]:
    """Add a new image tower to the tensors of a file, and return the tower with images that it can embed."""
    config = ViTConfig(
        image_size=(27, 15), patch_size=(9, 5), num_classes=num_classes, width=width, depth=2, heads=3, mlp_width=41,
        activation="gelu-tanh",
    )  # fmt: skip
    image = Bundle(build(config).eval(), tuple("abcde"[:num_classes]), Preprocess(image_size=(27, 15)))
    image.save(folder / "image")
    vitrail.convert(folder / "image", folder / "image.npz", to="google")
    with np.load(folder / "image.npz") as written:
        found |= {f"img/{name}": written[name] for name in written}
    return image, torch.randn(3, 3, 27, 15)


def flaxformer_names(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors of transformers' BERT under the names of flaxformer."""
    encoder, found = "BertEncoder_0", {}
    for theirs, name in (("word", "token"), ("position", "position"), ("token_type", "segment")):
        table = state[f"embeddings.{theirs}_embeddings.weight"]
        found[f"{encoder}/embedder/embedders_{name}_ids/embedding"] = table.numpy()
    found |= norm(state, "embeddings.LayerNorm", f"{encoder}/layer_norm")
    for layer in range(2):
        theirs, ours = f"encoder.layer.{layer}", f"{encoder}/encoder_block/layer_sequence/layers_{layer}"
        for part in ("query", "key", "value"):
            found |= dense(state, f"{theirs}.attention.self.{part}", f"{ours}/attention_block/attention_layer/{part}")
        found |= dense(state, f"{theirs}.attention.output.dense", f"{ours}/attention_block/dense_layer")
        found |= norm(state, f"{theirs}.attention.output.LayerNorm", f"{ours}/attention_block/layer_norm")
        found |= dense(state, f"{theirs}.intermediate.dense", f"{ours}/mlp_block/mlp/dense_layer")
        found |= dense(state, f"{theirs}.output.dense", f"{ours}/mlp_block/dense_layer")
        found |= norm(state, f"{theirs}.output.LayerNorm", f"{ours}/mlp_block/layer_norm")
    return found


def lit_with_bert(folder: Path) -> tuple[Any, torch.nn.Linear, Bundle, torch.Tensor]:
    """Write `LiT.npz` and `LiT.txt`, its vocabulary, to a folder. Return the text tower, its projection, the image
    tower, and images."""
    import transformers

    torch.manual_seed(0)
    theirs = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(PIECES), hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=85,
            max_position_embeddings=21, hidden_act="gelu_pytorch_tanh", initializer_range=0.2,
        ),
        add_pooling_layer=False,
    ).eval()  # fmt: skip
    head = torch.nn.Linear(192, 33)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    state = {name: value.detach() for name, value in theirs.state_dict().items()}
    found = flaxformer_names(state) | dense({f"h.{n}": v.detach() for n, v in head.state_dict().items()}, "h", "head")
    found = {f"txt/{name}": value for name, value in found.items()} | {"t": np.array([2.3], np.float32)}
    image, images = lit_image(found, folder, width=33)
    np.savez(folder / "LiT.npz", **found)
    (folder / "LiT.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return theirs, head, image, images


@pytest.mark.slow
def test_lit_with_bert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text tower is transformers' BERT with the activation and the padding of the published code."""
    theirs, head, image, images = lit_with_bert(tmp_path)
    file, vocabulary = tmp_path / "LiT.npz", tmp_path / "LiT.txt"
    alone = vitrail.load(file, device="cpu")
    assert alone.words is None and any("(vocab.txt); name its file" in note for note in alone.notes)
    with pytest.warns(UserWarning, match="16 tokens that the model reads"):
        ours = vitrail.load(file, device="cpu", tokenizer=vocabulary).embed_texts(BERT_TEXTS)
    command = ["convert", str(file), str(tmp_path / "ours"), "--to", "vitrail", "--tokenizer", str(vocabulary)]
    assert main(command) == 0 and "the other positions (21 in all)" in capsys.readouterr().out
    saved = vitrail.load(tmp_path / "ours", device="cpu")
    assert saved.words.bias is None and saved.preprocess.resize == "squash"
    assert saved.words.scale == pytest.approx(2.3) and saved.words.tokenizer.context == 16
    tokens = torch.from_numpy(saved.words.tokenizer.encode(BERT_TEXTS).tokens)
    assert (tokens == 0).sum(1).unique().tolist() == [0, 2, 9, 14]
    with torch.inference_mode():
        hidden = theirs(input_ids=tokens, attention_mask=tokens.ne(0).long()).last_hidden_state
        expected = torch.nn.functional.normalize(head(hidden[:, 0]), dim=-1)
        tower = torch.nn.functional.normalize(saved.words.tower(tokens))
        for found in (ours, saved.words.embed(BERT_TEXTS).vectors, tower):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(saved.network.embed(images), image.network.embed(images), rtol=0, atol=1e-6)
    picture = tmp_path / "bee.png"
    Image.new("RGB", (31, 17), (200, 10, 90)).save(picture)
    assert main(["predict", str(tmp_path / "ours"), str(picture), "--classes", "bee", "wasp", "--json"]) == 0
    values = torch.tensor([*json.loads(capsys.readouterr().out)["probabilities"].values()])
    texts = saved.embed_texts(["a photo of a bee.", "a photo of a wasp."])
    wanted = (math.exp(2.3) * torch.nn.functional.normalize(saved.embed([picture]))[0] @ texts.T).softmax(0)
    torch.testing.assert_close(values.sort().values, wanted.sort().values, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "parameters"), [("B", 195_280_897), ("L", 638_443_521)])
def test_published_sizes_of_lit_with_bert(size: str, parameters: int) -> None:
    """The published code states the number of parameters of LiT-B16B_2 and LiT-L16L, whose files have positions of 512
    tokens and two segments."""
    image = replace(variant_config(f"ViT-{size}/16", image_size=(224, 224)), num_classes=0)
    shared = {name: getattr(image, name) for name in ("width", "depth", "heads", "mlp_width")}
    text = TextConfig(
        vocabulary=30522, context=16, outputs=image.width, output_bias=True, pool="cls", end_token=None, padding=0,
        post_norm=True, is_causal=False, **shared,
    )  # fmt: skip
    assert PairConfig(image=image, text=text).parameters() + (512 - 16 + 2) * text.width == parameters


@pytest.mark.slow
def test_files_of_lit_with_bert_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    lit_with_bert(tmp_path)
    file, vocabulary = tmp_path / "LiT.npz", tmp_path / "LiT.txt"
    (tmp_path / "pieces.txt").write_text("[PAD]\nbee\n")
    (tmp_path / "spiece.model").write_bytes(pieces())
    for name, message in (("pieces.txt", "contains .UNK. and .CLS."), ("spiece.model", "not a vocabulary of BERT")):
        with pytest.raises(BundleError, match=message):
            vitrail.load(file, tokenizer=tmp_path / name)
    with np.load(file) as written:
        whole = {name: written[name] for name in written}
    segments = "txt/BertEncoder_0/embedder/embedders_segment_ids/embedding"
    narrow = {name: value[..., :65] if "embedders" in name else value for name, value in whole.items()}
    few = {name: value for name, value in whole.items() if name != segments}
    head = {"txt/head/kernel": np.zeros((192, 35), np.float32), "txt/head/bias": np.zeros(35, np.float32)}
    more = whole | {"txt/BertEncoder_0/pooler/kernel": np.zeros((5, 3), np.float32)}
    for tensors, message in (
        (narrow, "width 65 of BERT"), (few, "lacks the tensor .*segment_ids"), (more, "pooler/kernel"),
        (whole | head, "embeds in 33 numbers, but the text tower in 35"),
    ):  # fmt: skip
        np.savez(tmp_path / "changed.npz", **tensors)
        with pytest.raises(BundleError, match=message):
            vitrail.load(tmp_path / "changed.npz", tokenizer=vocabulary)


@pytest.mark.parametrize("layout", ["big-vision-pair", "huggingface-clip", "huggingface-siglip", "open-clip"])
def test_layouts_of_other_text_towers_are_refused(layout: str, tmp_path: Path) -> None:
    config, tokenizer = bert_of_bees()
    image = ViTConfig(image_size=(21, 21), patch_size=(7, 7), width=15, depth=1, heads=3, mlp_width=17, num_classes=0)
    pair = Pair(PairConfig(image=replace(image, projection=20), text=config))
    bundle = Bundle(pair.image, (), Preprocess(image_size=(21, 21)), words=Words.of(pair, tokenizer))
    clip = model_with_words().save(tmp_path / "clip")
    for model in (bundle.save(tmp_path / "bert"), *([clip] if layout == "big-vision-pair" else [])):
        with pytest.raises(BundleError, match=layout):
            vitrail.convert(model, tmp_path / "theirs", to=layout)
