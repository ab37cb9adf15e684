"""Full multi-head self-attention (paper Appendix A): every token attends to all tokens. Also its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.models.attention.base import AttentionKind, AttentionLayer, AttentionOperands
from vitrail.models.linear.dense import Linear, can_split, fuses, initialise_parts
from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import AttentionPositions


class FullAttention(AttentionKind):
    """Full attention as an `AttentionKind`: its layer, validation and cost for a config."""

    can_reduce = True

    def problems(self) -> list[str]:
        return self.heads_problems()

    def layer_class(self) -> type[SelfAttention]:
        """Return the class of the layer. It takes the arguments of `SelfAttention`."""
        return SelfAttention

    def build(self) -> AttentionLayer:
        config = self.config
        return self.layer_class()(
            config.width,
            config.heads,
            prefix=config.prefix,
            qkv_bias=config.qkv_bias,
            out_bias=config.dense_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else 0.0,
        )

    def macs(self, tokens: int, read: int) -> int:
        width = self.config.width
        products = 2 * read * tokens * width + self.macs_of_shared_weights(tokens, read)
        return 2 * tokens * width * width + 2 * read * width * width + products

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        config, bf16 = self.config, precision == "bf16"
        inside = config.position_embedding.inside_attention
        all_tokens, results, exact = tokens * config.width, read * config.width, 0
        kept = 2 * all_tokens + 2 * results  # keys, values, queries and the mixed values
        if bf16 and read < tokens:
            kept += results  # the tokens of the queries, apart from those of keys and values
        if bf16 or inside in ("bias", "keys"):
            kept += config.heads * read * tokens
        else:
            exact += config.heads * read  # log-sum-exp of the fused kernel
        if config.qk_norm:
            exact += all_tokens + results + 2 * config.heads * (tokens + read)
            kept += results if read == tokens and not bf16 else 0  # the fused kernel then orders its result by head
        elif inside == "rotation" and not bf16:
            kept += all_tokens + (results if read == tokens else 0)
        of_positions = config.position_embedding.bytes_in_attention(config, read, precision)
        return 4 * exact + bytes_each(precision) * kept + of_positions

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        config = self.config
        if precision == "float32" and config.position_embedding.inside_attention not in ("bias", "keys"):
            return 0  # the fused kernel has no n x n matrix
        of_positions = config.position_embedding.backward_bytes_in_attention(config, tokens, precision)
        return bytes_each(precision) * (2 * config.heads * tokens * tokens + 4 * tokens * config.width) + of_positions


class SelfAttention(AttentionLayer):
    """Multi-head self-attention (MSA of equation 2): in each of the heads, every token attends to all tokens.

    Queries, keys and values come from one matrix product (equation 5). The first third of the rows of `qkv.weight`
    computes the queries, the second third the keys, and the last third the values. In each third, the rows are ordered
    by head. If `qk_norm_eps` is above 0, a layer norm over each head's channels follows the projection of queries and
    keys, which keeps the logits small (2302.05442). `prefix` is the number of tokens before the patches, class token
    and registers, for subclasses in which these tokens see and are seen in another way than patches.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        prefix: int = 0,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm_eps: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.prefix = prefix
        self.qkv = Linear(width, 3 * width, bias=qkv_bias)
        self.query_norm = nn.LayerNorm(width // heads, eps=qk_norm_eps) if qk_norm_eps else None
        self.key_norm = nn.LayerNorm(width // heads, eps=qk_norm_eps) if qk_norm_eps else None
        self.out = Linear(width, width, bias=out_bias)

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        if positions is None and read is None and self.query_norm is None and fuses(tokens):
            qkv = self.qkv(tokens)
            if fuses(qkv) and qkv.dtype == torch.bfloat16:
                return self.out(attend_fused(qkv, self.heads))
            return self.combine(attend(*self._of_heads(qkv)))
        q, k, v, bias = self._operands(tokens, positions, read)
        if positions is not None and positions.removal is not None:
            positions.removal.queries, positions.removal.keys = q, k
        # Keys of offsets make a bias as large as the logits, so a fused kernel would save no memory, and PyTorch 2.13
        # cannot write it as ONNX.
        plain = positions is not None and positions.offset_keys is not None
        return self.combine((attend_plainly if plain else attend)(q, k, v, bias))

    def weights(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> Float[Tensor, "b heads n n"]:
        """Return `softmax(q k^T / sqrt(d) + bias)` of every head, in float32 (equation 6)."""
        q, k, _, bias = self.operands(tokens, positions)
        logits = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-1, -2)
        return (logits if bias is None else logits + bias).softmax(dim=-1)

    def operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> AttentionOperands:
        return AttentionOperands(*self._operands(tokens, positions, None))

    def combine(self, mixed: Float[Tensor, "b heads m d"]) -> Float[Tensor, "b m width"]:
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None, read: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the queries and keys after normalisation and rotation, the values, and the bias of the logits."""
        q, k, v = self._queries_keys_values(tokens, read)
        m = q.shape[2]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normalise(q, self.query_norm), _normalise(k, self.key_norm)
        if positions is not None and positions.rotation is not None:
            cosine, sine = (part.to(v.dtype) for part in positions.rotation)
            q, k = rotate(q, cosine[..., :m, :], sine[..., :m, :]), rotate(k, cosine, sine)
        if positions is not None and positions.offset_keys is not None:
            return q, k, v, positions.offset_keys.bias(q, self.prefix)
        return q, k, v, None if positions is None or positions.bias is None else positions.bias[..., :m, :]

    def _queries_keys_values(
        self, tokens: Float[Tensor, "b n width"], read: int | None
    ) -> tuple[Float[Tensor, "b heads m d"], Float[Tensor, "b heads n d"], Float[Tensor, "b heads n d"]]:
        b, n, width = tokens.shape
        each_head = self.heads, width // self.heads
        if read is None or not can_split(self.qkv):
            q, k, v = self._of_heads(self.qkv(tokens))
            return q[:, :, :read], k, v
        readers = tokens[:, :read]
        q, kv = self.qkv.by_rows((readers, width), (tokens, 2 * width))
        q = q.view(b, readers.shape[1], *each_head).transpose(1, 2)
        k, v = kv.view(b, n, 2, *each_head).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def _of_heads(self, qkv: Float[Tensor, "b n three_width"]) -> tuple[Tensor, Tensor, Tensor]:
        b, n, width = qkv.shape
        q, k, v = qkv.view(b, n, 3, self.heads, width // 3 // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        yield self.qkv, ("query", "key", "value")
        yield self.out, ("out",)

    def initialise(self) -> None:
        initialise_parts(self.qkv, 3)  # each has a fan-out of D, not 3 D
        initialise_parts(self.out)


def _normalise(x: Float[Tensor, "b heads n d"], norm: nn.Module) -> Float[Tensor, "b heads n d"]:
    """Apply the norm in the number format of its weights, because gradients summed in bfloat16 would lose precision."""
    return norm(in_format_of(norm, x)).to(x.dtype)


def rotate(
    x: Float[Tensor, "b heads n d"], cosine: Float[Tensor, "*images n d"], sine: Float[Tensor, "*images n d"]
) -> Float[Tensor, "b heads n d"]:
    """Rotate each pair of channels (i, i + d / 2) by its token's angle (2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


def in_format_of(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `x` in the number format of a norm's weight. A norm without a weight, such as `nn.Identity`, takes any."""
    weight = getattr(norm, "weight", None)
    return x.to(weight.dtype) if isinstance(weight, Tensor) else x


def attend(
    q: Float[Tensor, "*batch m d"],
    k: Float[Tensor, "*batch n d"],
    v: Float[Tensor, "*batch n d"],
    bias: Float[Tensor, "*#batch #m n"] | None = None,
) -> Float[Tensor, "*batch m d"]:
    """Return `softmax(q k^T / sqrt(d) + bias) v` (equations 6 and 7) by the faster kernel for these tensors.

    In bfloat16 on a CPU, plain matrix products are faster than PyTorch's fused kernel for the sequences of a ViT
    (`docs/performance.md`). In float32, both are equally fast, and the fused kernel keeps no n x n matrix in memory.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return attend_plainly(q, k, v, bias)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype))


def attend_plainly(
    q: Float[Tensor, "*batch m d"],
    k: Float[Tensor, "*batch n d"],
    v: Float[Tensor, "*batch n d"],
    bias: Float[Tensor, "*#batch #m n"] | None = None,
) -> Float[Tensor, "*batch m d"]:
    """Return what `attend` returns, by plain matrix products."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return (logits if bias is None else logits + bias.to(q.dtype)).softmax(dim=-1) @ v


def attend_fused(qkv: Float[Tensor, "b n three_width"], heads: int) -> Float[Tensor, "b n width"]:
    """Return `softmax(q k^T / sqrt(d)) v` of every head, with shape (b, n, width).

    `vitrail.models.linear.dense.fuses` must return True for the layer's input. The forward pass copies queries, keys
    and values once into the order that the kernels need, and the backward pass copies their gradients once. The matrix
    products include the scale `d**-0.5`.
    """
    if torch.is_grad_enabled():
        return _Attention.apply(qkv, heads)  # type: ignore[no-untyped-call]
    return _attend(qkv, heads)[0]


def _attend(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the queries, keys and values in the shape (3, b * heads, n, d), and the attention weights."""
    b, n, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    d = width // heads
    ordered = qkv.view(b, n, 3, heads, d).permute(2, 0, 3, 1, 4).reshape(3, b * heads, n, d)
    q, k, v = ordered
    weights = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5).softmax(dim=-1)
    mixed = torch.bmm(weights, v).view(b, heads, n, d).transpose(1, 2).reshape(b, n, width)
    return mixed, ordered, weights


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        mixed, ordered, weights = _attend(qkv, heads)
        ctx.save_for_backward(ordered, weights)
        ctx.heads = heads
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ordered, weights = ctx.saved_tensors
        (b, n, width), heads = gradient.shape, ctx.heads
        d = width // heads
        q, k, v = ordered
        from_mixed = gradient.reshape(b, n, heads, d).transpose(1, 2).reshape(b * heads, n, d)
        gradients = torch.empty_like(ordered)
        torch.bmm(weights.transpose(1, 2), from_mixed, out=gradients[2])
        to_weights = torch.bmm(from_mixed, v.transpose(1, 2))
        to_logits = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        torch.baddbmm(gradients[0], to_logits, k, beta=0, alpha=d**-0.5, out=gradients[0])
        torch.baddbmm(gradients[1], to_logits.transpose(1, 2), q, beta=0, alpha=d**-0.5, out=gradients[1])
        return gradients.view(3, b, heads, n, d).permute(1, 3, 0, 2, 4).reshape(b, n, 3 * width), None
