"""TinyGPT: a small decoder with random weights that knows no cache."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from llm_systems_cookbook.validate import (
    FLOATS,
    require_at_least,
    require_number,
)

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]

NORM_EPS = 1e-5
# How far attention scores and logits spread; `TinyGPT` says why.
SCORE_STD = 4.0
LOGIT_STD = 2.0


@dataclass(frozen=True)
class TinyGPTConfig:
    """Sizes of a TinyGPT.

    Args:
        vocab_size: token ids are in [0, vocab_size).
        num_layers: layers, at least 1.
        width: numbers per token between the layers.
        num_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads.
        head_dim: numbers per head, even: rotary turns them in pairs. The
            heads together need not be as wide as `width`.
        hidden: inner width of the MLP.
        max_context: positions are in [0, max_context).
        rope_theta: base of the rotary wavelengths.

    Raises:
        TypeError: a size is not an integer, or rope_theta not a number.
        ValueError: a size below 1, an odd head_dim, heads that are no
            multiple of the KV heads, or a rope_theta not above 0.
    """

    vocab_size: int = 260
    num_layers: int = 6
    width: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 1024
    max_context: int = 2048
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        theta = sizes.pop("rope_theta")
        require_at_least(1, **sizes)
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads "
                f"{self.num_kv_heads}, got {self.num_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        require_number(rope_theta=theta)
        if not 0 < theta < math.inf:
            raise ValueError(
                f"rope_theta must be above 0 and finite, got {theta}"
            )


class TinyGPT(nn.Module):
    """A decoder of today's shape, small enough for a laptop.

    RMSNorm before each part, rotary positions, grouped-query attention,
    SwiGLU, an output projection of its own, no biases. By default it has
    exactly 5,838,080 parameters.

    The weights are random: the text means nothing, but it has to vary, or a
    cache that mixes up tokens would go unnoticed. Each projection therefore
    keeps a signal of size 1 at size 1, except for two. Queries and keys are
    twice as large, so that a score spreads by 4: at 1, every earlier token
    gets about the same attention, their average is nearly the same at each
    step, and greedy text may soon run in a circle. The output spreads the
    logits by 2, so that sampling at temperature 1 is neither uniform nor
    greedy.

    The weights are drawn on the CPU in float64 and then cast: models of one
    seed are the same up to rounding, whatever their dtype and device. They
    do not require gradients.

    Sources: RMSNorm, Zhang & Sennrich 2019 (arXiv:1910.07467); rotary
    positions, Su et al. 2021 (arXiv:2104.09864); grouped-query attention,
    Ainslie et al. 2023 (arXiv:2305.13245); SwiGLU, Shazeer 2020
    (arXiv:2002.05202).

    Args:
        config: the sizes.
        seed: of the weights, at least 0.
        dtype: float64, float32, float16 or bfloat16.
        device: where the weights lie.

    Attributes:
        config: the sizes. Also by name: vocab_size, max_context, num_layers,
            num_heads, num_kv_heads, head_dim.
        dtype: of the weights, keys, values and logits.
        device: where the weights lie.
        num_parameters: numbers in all the weights.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: a seed below 0, or a dtype that is not listed.
    """

    def __init__(
        self,
        config: TinyGPTConfig = TinyGPTConfig(),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        (seed,) = require_at_least(0, seed=seed)
        if dtype not in [getattr(torch, name) for name in FLOATS]:
            raise ValueError(
                f"dtype must be one of {', '.join(FLOATS)}, got {dtype}"
            )
        draw = _Weights(seed)
        width, vocab = config.width, config.vocab_size
        self.config = config
        self.vocab_size, self.max_context = vocab, config.max_context
        self.num_layers, self.head_dim = config.num_layers, config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.embedding = draw(vocab, width, std=1.0)
        self.layers = nn.ModuleList(
            _Layer(config, index, draw) for index in range(config.num_layers)
        )
        self.norm = _ones(width)
        self.output = draw(vocab, width, std=LOGIT_STD / math.sqrt(width))
        cos, sin = _rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.to(device=device, dtype=dtype)

    @torch.no_grad()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        sampled_rows: Tensor | Sequence[int],
    ) -> Tensor:
        """Return the logits of the sampled rows.

        The model keeps nothing between calls. Whatever a token has to see
        of earlier ones is the business of `attention`, which is called once
        per layer, in order. Ids, positions and rows are not searched for
        values out of range, as a look at them would make a GPU wait; on a
        CPU the look-up itself raises.

        Args:
            token_ids: [num_tokens] int64, each in [0, vocab_size).
            positions: [num_tokens] int64, each in [0, max_context).
            attention: called with the layer's index, the query
                [num_tokens, num_heads, head_dim], the key and the value
                [num_tokens, num_kv_heads, head_dim] (these may be views);
                returns the query's shape. Query and key are turned to their
                positions.
            sampled_rows: [num_sampled] rows in [0, num_tokens) whose next
                token is wanted, in any order. No other row goes through the
                last MLP and the output projection.

        Returns:
            [num_sampled, vocab_size], of the model's dtype; it requires no
            gradient.

        Raises:
            TypeError: a row in a list is not an integer.
            ValueError: shapes that do not fit, also of what `attention`
                returns.
            IndexError: on a CPU, an id, position or row out of range.
        """
        if token_ids.ndim != 1 or positions.shape != token_ids.shape:
            raise ValueError(
                f"token_ids and positions must be [num_tokens], got "
                f"{list(token_ids.shape)} and {list(positions.shape)}"
            )
        rows = self._rows(sampled_rows)
        x = F.embedding(token_ids, self.embedding)
        # The same angles for all heads: [num_tokens, 1, head_dim / 2].
        cos = F.embedding(positions, self.cos)[:, None]
        sin = F.embedding(positions, self.sin)[:, None]
        for layer in self.layers:
            x = x + layer.attend(x, cos, sin, attention)
            if layer is self.layers[-1]:
                x = x.index_select(0, rows)
            x = x + layer.mlp(x)
        return F.linear(_rms_norm(x, self.norm), self.output)

    def _rows(self, sampled_rows: Tensor | Sequence[int]) -> Tensor:
        if not isinstance(sampled_rows, Tensor):
            numbers = [operator.index(row) for row in sampled_rows]
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)
        if sampled_rows.ndim != 1:
            raise ValueError(
                f"sampled_rows must be [num_sampled], got "
                f"{list(sampled_rows.shape)}"
            )
        return sampled_rows

    @property
    def num_parameters(self) -> int:
        """Numbers in all the weights."""
        return sum(weight.numel() for weight in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of weights, keys, values and logits."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.embedding.device


class _Layer(nn.Module):
    """Attention's projections and a SwiGLU MLP.

    Projections of the same input lie in one matrix: one product in place of
    two or three.
    """

    def __init__(
        self, config: TinyGPTConfig, index: int, draw: "_Weights"
    ) -> None:
        super().__init__()
        self.index = index
        width, hidden = config.width, config.hidden
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        turned = self.heads + self.kv_heads
        self.head_dim = config.head_dim
        self.attention_norm = _ones(width)
        self.qkv = draw((turned + self.kv_heads) * self.head_dim, width)
        # A score is a sum of products of a query and a key.
        self.qkv[: turned * self.head_dim] *= math.sqrt(SCORE_STD)
        self.attention_out = draw(width, self.heads * self.head_dim)
        self.mlp_norm = _ones(width)
        self.gate_up = draw(2 * hidden, width)
        self.down = draw(width, hidden)

    def attend(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention
    ) -> Tensor:
        query, key, value = self.project(x, cos, sin)
        attended = attention(self.index, query, key, value)
        if attended.shape != query.shape:
            raise ValueError(
                f"attention must return {list(query.shape)}, got "
                f"{list(attended.shape)} in layer {self.index}"
            )
        return F.linear(attended.flatten(1), self.attention_out)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = F.linear(_rms_norm(x, self.attention_norm), self.qkv)
        heads = qkv.unflatten(1, (-1, self.head_dim))
        turned = self.heads + self.kv_heads
        query_key, value = heads[:, :turned], heads[:, turned:]
        query_key = _rotate_halves(query_key, cos, sin)
        return query_key[:, : self.heads], query_key[:, self.heads :], value

    def mlp(self, x: Tensor) -> Tensor:
        gate_up = F.linear(_rms_norm(x, self.mlp_norm), self.gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        return F.linear(F.silu(gate) * up, self.down)


class _Weights:
    """Draw matrices from one seeded stream, in float64 on the CPU."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, rows: int, columns: int, std: float | None = None
    ) -> nn.Parameter:
        std = 1 / math.sqrt(columns) if std is None else std
        weight = torch.randn(
            rows, columns, generator=self.generator, dtype=torch.float64
        )
        return nn.Parameter(weight * std, requires_grad=False)


def _ones(width: int) -> nn.Parameter:
    return nn.Parameter(
        torch.ones(width, dtype=torch.float64), requires_grad=False
    )


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, NORM_EPS)


def _rotary_tables(config: TinyGPTConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each angle, [max_context, head_dim / 2]."""
    dim = config.head_dim
    pairs = torch.arange(0, dim, 2, dtype=torch.float64)
    frequencies = config.rope_theta ** (-pairs / dim)
    positions = torch.arange(config.max_context, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1
    )


class ByteTokenizer:
    """One token per UTF-8 byte, and four ids that stand for no byte.

    Source: ids and names are ours; a model with random weights needs no
    other vocabulary.

    Attributes:
        BOS: 256, the beginning of a sequence.
        EOS: 257, its end.
        PAD: 258, fills a place where there is no token.
        SEP: 259, between two parts of a prompt.
        vocab_size: 260.
    """

    BOS, EOS, PAD, SEP = 256, 257, 258, 259
    vocab_size = 260

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Return the ids of the text's bytes, after BOS if `bos`.

        Raises:
            UnicodeEncodeError: a lone surrogate, which has no bytes.
        """
        ids = list(text.encode("utf-8"))
        return [self.BOS, *ids] if bos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids.

        Special ids are dropped. Bytes that are not UTF-8, as random weights
        produce, become U+FFFD.

        Raises:
            TypeError: an id is not an integer.
            ValueError: an id outside [0, 260).
        """
        numbers = [operator.index(token_id) for token_id in ids]
        for number in numbers:
            if not 0 <= number < self.vocab_size:
                raise ValueError(
                    f"token id {number} is outside [0, {self.vocab_size})"
                )
        text = bytes(number for number in numbers if number < self.BOS)
        return text.decode("utf-8", errors="replace")
