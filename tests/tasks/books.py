"""Codebooks of tests. Processes of tests import this module, so it does not import pytest."""

from __future__ import annotations

import torch

from tests.tasks.images import Pictures
from tests.tasks.objectives import small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.processes.group import join_processes
from vitrail.tasks.codebook import Codebook
from vitrail.tasks.tokenizer import Tokenizer
from vitrail.tasks.vqvae import VqVae

__all__ = ["make", "make_tokenizer", "updated"]


def make(size: int, width: int, *, whole: bool = False) -> Codebook:
    """Return a codebook with the same random codes in every call. Distances of whole numbers are exact in float32."""
    torch.manual_seed(0)
    book = Codebook(size, width)
    if whole:
        book.codes.copy_(torch.randint(-4, 5, (size, width)))
        book.sums.copy_(book.codes)
    return book


def updated(parts: int) -> dict[str, list[float]]:
    """Return the state of a codebook after three steps, in which each process has its part of the batch."""
    processes, book = join_processes(), make(8, 3)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        vectors = torch.randint(-4, 5, (8, 5, 3), generator=generator).float()
        order = torch.rand(8, generator=generator, dtype=torch.float64)
        share = slice(processes.rank * 8 // processes.world, (processes.rank + 1) * 8 // processes.world)
        for own, rank in zip(vectors[share].chunk(parts), order[share].chunk(parts), strict=True):
            book(own, torch.ones(len(own), dtype=torch.bool))
            book.offer(own[:, 0], rank)
        book.update(processes, decay=0.6, restart_below=0.5)
    return {name: tensor.flatten().tolist() for name, tensor in book.state_dict().items()}


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
