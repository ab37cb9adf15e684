"""A tiny model of images and texts with random weights, and its tokenizer."""

from __future__ import annotations

import functools
import math
import string
from dataclasses import replace

import torch

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.texts import TextTokenizer, train_tokenizer, wordpiece_tokenizer
from vitrail.models.text import Pair, PairConfig, TextConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import Words

IMAGE = ViTConfig(
    image_size=(24, 16), patch_size=(8, 8), width=24, depth=2, heads=2, mlp_width=40, num_classes=0, projection=20,
    pre_norm=True, patch_bias=False, activation="quick-gelu",
)  # fmt: skip


@functools.cache
def tokenizer_of_bees() -> TextTokenizer:
    return train_tokenizer(["a photo of a bee", "a photo of a wasp"] * 3, vocabulary=540, context=12)


def text_config(tokenizer: TextTokenizer) -> TextConfig:
    return TextConfig(
        vocabulary=tokenizer.vocabulary, context=12, width=16, depth=2, heads=2, mlp_width=24,
        end_token=tokenizer.end_token, outputs=20,
    )  # fmt: skip


PIECES = (
    "[PAD]", "[UNK]", "[CLS]", *string.ascii_lowercase, *string.digits,
    *(f"##{letter}" for letter in string.ascii_lowercase + string.digits), *"!'(),.:[]_“日本あ\u2044\u03c3", "##\u03c3",
    "##あ", "bee", "##ee", "photo",
)  # fmt: skip
"""A vocabulary of BERT."""


def bert_of_bees() -> tuple[TextConfig, TextTokenizer]:
    """Return the config of a text tower like BERT, and its tokenizer."""
    tokenizer = wordpiece_tokenizer(PIECES, context=12)
    own = replace(text_config(tokenizer_of_bees()), activation="gelu-tanh", norm_eps=1e-12, output_bias=True)
    return replace(
        own, vocabulary=len(PIECES), is_causal=False, pool="cls", end_token=None, padding=0, post_norm=True
    ), tokenizer


def model_with_words(*, bias: float | None = None, image: ViTConfig = IMAGE) -> Bundle:
    """Return a model like CLIP, or with a bias of the logits one like SigLIP."""
    torch.manual_seed(1)
    tokenizer = tokenizer_of_bees()
    pair = Pair(PairConfig(image=image, text=text_config(tokenizer), scale=math.log(20), bias=bias)).eval()
    return Bundle(pair.image, (), Preprocess(image_size=image.image_size), words=Words.of(pair, tokenizer))


def square_model_with_words() -> Bundle:
    """Return a model like CLIP that the files of other libraries can hold."""
    return model_with_words(image=replace(IMAGE, image_size=(24, 24), norm_eps=1e-5, activation="gelu"))
