"""Codebooks and tokenizers of tests."""

from __future__ import annotations

import torch

from tests.tasks.images import Pictures
from tests.tasks.objectives import small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.tasks.tokenizer import Codebook, Tokenizer
from vitrail.tasks.vqvae import VqVae


def make(size: int, width: int, *, whole: bool = False) -> Codebook:
    """Return a codebook with the same random codes in every call. Distances of whole numbers are exact in float32."""
    torch.manual_seed(0)
    book = Codebook(size, width)
    if whole:
        book.codes.copy_(torch.randint(-4, 5, (size, width)))
        book.sums.copy_(book.codes)
    return book


def make_tokenizer(
    *, size: tuple[int, int] = (21, 28), channels: int = 3, variant: str = "ViT-Pico/7", codes: int = 24
) -> Tokenizer:
    """Return a tokenizer with the same random weights in every call."""
    network = small_network(variant, size=size, channels=channels)
    task = VqVae(codes=codes, code_width=5, decoder_width=8, decoder_depth=1)
    objective = task.objective(network, Splits(Pictures(3), None, None))
    preprocess = Preprocess(image_size=size, channels=channels, mean=(0.4,), std=(0.3,))
    tokenizer = task.bundle(objective, (), preprocess, {"recipe": "test"})
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer
