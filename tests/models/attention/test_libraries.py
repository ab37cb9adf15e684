"""Tests of attention mechanisms against the libraries of other authors, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.attention.oracle import config_of, insides, made_network
from vitrail.models.vit import VisionTransformer

pytestmark = pytest.mark.slow

PATCHES_ONLY: dict[str, Any] = {"pool": "gap", "registers": 0, "qkv_bias": False}


def made(attention: str, **fields: Any) -> tuple[VisionTransformer, Any, Any, Tensor]:
    """Return a network in float32, the attention and the inside of its first block, and tokens."""
    network = made_network(config_of(attention, **fields), torch.float32)
    tokens = torch.randn(2, network.config.tokens, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return network, network.blocks[0].attention, insides(network)[0], tokens


def check(ours: Tensor, theirs: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Check results and gradients. Each pair has tensors of ours and theirs with equal gradients."""
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    mine, their_own = (
        torch.autograd.grad(output.sin().mean(), [pair[side] for pair in pairs])
        for side, output in enumerate((ours, theirs))
    )
    for one, other in zip(mine, their_own, strict=True):
        torch.testing.assert_close(one, other.view_as(one), atol=1e-5, rtol=1e-4)


def joined(*layers: nn.Linear) -> nn.Parameter:
    return nn.Parameter(torch.cat([layer.weight for layer in layers]).detach().clone())


@pytest.mark.parametrize("shares", [False, True])
def test_linformer(shares: bool) -> None:
    linformer = pytest.importorskip("linformer")
    theirs = linformer.LinformerSelfAttention(16, 35, k=4, heads=2, share_kv=shares)
    network, layer, _, tokens = made(f"linformer:rows=4:share={'keys-values' if shares else 'heads'}", **PATCHES_ONLY)
    context: Any = network.context
    parts = (theirs.proj_k,) if shares else (theirs.proj_k, theirs.proj_v)
    layer.qkv.weight = joined(theirs.to_q, theirs.to_k, theirs.to_k if shares else theirs.to_v)
    layer.out.load_state_dict(theirs.to_out.state_dict())
    with torch.no_grad():
        context.projections[0] = torch.stack(parts).transpose(1, 2)[:, None]
    given = tokens.detach().clone().requires_grad_()
    pairs = [(tokens, given), (layer.out.weight, theirs.to_out.weight)]
    check(layer(tokens, insides(network)[0]), theirs(given), pairs)
    (of_projections,) = torch.autograd.grad(layer(tokens, insides(network)[0]).sin().mean(), [context.projections])
    expected = torch.autograd.grad(theirs(given).sin().mean(), parts)
    torch.testing.assert_close(of_projections[0, :, 0], torch.stack(expected).transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_the_summed_form_of_axial_attention() -> None:
    library = pytest.importorskip("axial_attention")
    theirs = library.AxialAttention(16, num_dimensions=2, heads=2, dim_index=-1, sum_axial_out=True)
    _, layer, inside, tokens = made("axial:sum=on", **PATCHES_ONLY)
    given = tokens.detach().clone().requires_grad_()
    pairs = [(tokens, given)]
    for ours, wrapped in zip((layer.columns, layer.rows), theirs.axial_attentions, strict=True):
        ours.qkv.weight = joined(wrapped.fn.to_q, wrapped.fn.to_kv)
        ours.out.load_state_dict(wrapped.fn.to_out.state_dict())
        pairs.append((ours.out.weight, wrapped.fn.to_out.weight))
    check(layer(tokens, inside), theirs(given.view(2, 5, 7, 16)).flatten(1, 2), pairs)


@pytest.mark.parametrize(
    ("attention", "size", "window", "around", "exact"),
    [
        ("blocks:size=4", (8, 24), 16, 0, False),
        ("blocks:size=4:halo=4", (8, 24), 16, 1, False),  # the blocks are a row, and the halo is the blocks beside
        ("strided:block=18", (8, 18), 18, 1, True),  # no two patches are two strides apart
    ],
)
def test_local_attention_of_a_sequence(
    attention: str, size: tuple[int, int], window: int, around: int, exact: bool
) -> None:
    library = pytest.importorskip("local_attention")
    theirs = library.LocalAttention(
        window, look_backward=around, look_forward=around, exact_windowsize=exact, use_rotary_pos_emb=False
    )
    network, layer, inside, tokens = made(attention, **PATCHES_ONLY, image_size=size)
    rows, columns = network.config.grid
    order = torch.arange(rows * columns)
    if not exact:
        order = order.view(rows, -1, 4).transpose(0, 1).flatten()
    q, k, v, _ = (one if one is None else one[:, :, order] for one in layer._operands(tokens, inside, None))
    mixed = theirs(q, k, v)[:, :, order.argsort()]
    check(layer(tokens, inside), layer.combine(mixed), [(tokens, tokens), *((one, one) for one in layer.parameters())])


@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("window", [3, 4, 5])
def test_windows_are_those_of_natten(window: int) -> None:
    """NATTEN has no gradients on a CPU."""
    natten = pytest.importorskip(
        "natten", reason="natten is built beside the torch that is there: make test-slow does it"
    )
    _, layer, inside, tokens = made(f"local:window={window}", **PATCHES_ONLY)
    with torch.no_grad():
        q, k, v = (one.transpose(1, 2).unflatten(1, (5, 7)) for one in layer._operands(tokens, inside, None)[:3])
        mixed = natten.na2d(q.contiguous(), k.contiguous(), v.contiguous(), kernel_size=window)
        expected = layer.combine(mixed.flatten(1, 2).transpose(1, 2))
        torch.testing.assert_close(layer(tokens, inside), expected, atol=1e-5, rtol=1e-5)


def test_neighbours_and_a_class_token_are_those_of_longformer() -> None:
    """No two of the 35 patches are two strides apart. Longformer's global token has weights of its own."""
    library = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    settings = library.LongformerConfig(
        hidden_size=16, num_attention_heads=2, attention_window=[36], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = library.LongformerSelfAttention(settings, 0)
    _, layer, inside, tokens = made("strided:block=18", registers=0)
    parts = theirs.query, theirs.key, theirs.value
    for part, weight, bias in zip(parts, layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True):
        part.weight, part.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    for name in ("query", "key", "value"):
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    is_global = torch.zeros(2, 36, dtype=torch.bool)
    is_global[:, 0] = True
    given = tokens.detach().clone().requires_grad_()
    mixed = theirs(
        given,
        attention_mask=10000.0 * is_global,
        is_index_masked=torch.zeros_like(is_global),
        is_index_global_attn=is_global,
        is_global_attn=True,
    )[0]
    check(layer(tokens, inside), layer.out(mixed), [(tokens, given), (layer.out.weight, layer.out.weight)])


@pytest.mark.parametrize("chunk", [35, 7])
def test_chunks_are_those_of_reformer(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library neither masks other buckets nor counts pairs of several rounds once. So one round has one bucket."""
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    settings = reformer.ReformerConfig(
        hidden_size=16, num_attention_heads=2, attention_head_size=8, lsh_attn_chunk_length=chunk, num_hashes=1,
        num_buckets=2, is_decoder=False, hidden_dropout_prob=0.0, lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = reformer.LSHSelfAttention(settings).eval()
    _, layer, inside, tokens = made(f"lsh:chunk={chunk}:rounds=1", **PATCHES_ONLY)
    layer.query_value.weight = joined(theirs.query_key, theirs.value)
    monkeypatch.setattr(
        "vitrail.models.attention.lsh.hashed",
        lambda queries, rotations: queries.new_zeros(*queries.shape[:2], 1, queries.shape[2], dtype=torch.int64),
    )
    given = tokens.detach().clone().requires_grad_()
    buckets = torch.zeros(2, 2, 35, dtype=torch.int64)
    expected = layer.out(theirs(given, buckets=buckets).hidden_states)
    check(layer(tokens, inside), expected, [(tokens, given), (layer.out.weight, layer.out.weight)])
