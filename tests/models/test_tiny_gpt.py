"""TinyGPT against a naive model, and the injection of attention."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from llm_systems_cookbook.models import (
    ByteTokenizer,
    TinyGPT,
    TinyGPTConfig,
)

SMALL = TinyGPTConfig(
    vocab_size=40,
    num_layers=3,
    width=24,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,  # the heads together are wider than the model
    hidden=20,
    max_context=300,
)
TOKENS = 17
CLOSE = {"atol": 1e-9, "rtol": 0.0}


def small(seed=0, dtype=torch.float64):
    return TinyGPT(SMALL, seed=seed, dtype=dtype)


def random_ids(count=TOKENS, seed=0, vocab_size=SMALL.vocab_size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator)


class ListAttention:
    """Causal attention of one sequence over lists of all it has seen."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def __call__(self, layer, query, key, value):
        keys = self.keys.setdefault(layer, [])
        values = self.values.setdefault(layer, [])
        rows = []
        for q, k, v in zip(query, key, value, strict=True):
            keys.append(k)
            values.append(v)
            rows.append(attend(q, torch.stack(keys), torch.stack(values)))
        return torch.stack(rows)


def attend(query, keys, values):
    """Return [num_heads, head_dim] of a query that sees all the keys."""
    group = query.shape[0] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,thd->ht", query, keys)
    weights = torch.softmax(scores / math.sqrt(query.shape[1]), dim=1)
    return torch.einsum("ht,thd->hd", weights, values)


def run(model, ids, chunk=None, attention=None, first=0):
    """Return the logits of all rows, computed `chunk` tokens at a time."""
    attention = attention or ListAttention()
    positions = torch.arange(first, first + len(ids))
    chunks = zip(
        ids.split(chunk or len(ids)),
        positions.split(chunk or len(ids)),
        strict=True,
    )
    return torch.cat(
        [model(i, p, attention, torch.arange(len(i))) for i, p in chunks]
    )


def greedy(model, prompt, count):
    """Return `count` greedy tokens after the prompt."""
    attention = ListAttention()
    logits = run(model, prompt, attention=attention)[-1]
    tokens = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(int(logits.argmax()))
        last = torch.tensor(tokens[-1:])
        logits = run(model, last, attention=attention, first=position)[-1]
    return tokens


# The whole model once more: numpy, one position at a time, everything before
# it again at each position, every matrix on its own, every head in a loop.


def naive_weights(model):
    """Return the unfused matrices as numpy arrays, one dict per layer."""
    config = model.config
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    layers = []
    for layer in model.layers:
        qkv = layer.qkv.numpy()
        layers.append(
            {
                "attention_norm": layer.attention_norm.numpy(),
                "q": qkv[:q_rows],
                "k": qkv[q_rows : q_rows + kv_rows],
                "v": qkv[q_rows + kv_rows :],
                "o": layer.attention_out.numpy(),
                "mlp_norm": layer.mlp_norm.numpy(),
                "gate": layer.gate_up.numpy()[: config.hidden],
                "up": layer.gate_up.numpy()[config.hidden :],
                "down": layer.down.numpy(),
            }
        )
    return layers


def naive_norm(x, weight):
    return x / math.sqrt((x**2).mean() + 1e-5) * weight


def naive_rotate(head, position, theta):
    """Turn pair (i, i + half) of one head as a complex number."""
    half = len(head) // 2
    turned = np.empty_like(head)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(head))
        pair = complex(head[i], head[i + half])
        pair *= complex(math.cos(angle), math.sin(angle))
        turned[i], turned[i + half] = pair.real, pair.imag
    return turned


def naive_attention(w, inputs, positions, config):
    """Return the last token's attention output, before the projection."""
    dim, theta = config.head_dim, config.rope_theta
    outputs = []
    for head in range(config.num_heads):
        kv_head = head * config.num_kv_heads // config.num_heads
        mine = slice(head * dim, (head + 1) * dim)
        theirs = slice(kv_head * dim, (kv_head + 1) * dim)
        query = naive_rotate(w["q"][mine] @ inputs[-1], positions[-1], theta)
        weights, values = [], []
        for x, position in zip(inputs, positions, strict=True):
            key = naive_rotate(w["k"][theirs] @ x, position, theta)
            weights.append(math.exp(query @ key / math.sqrt(dim)))
            values.append(w["v"][theirs] @ x)
        total = sum(
            weight * value
            for weight, value in zip(weights, values, strict=True)
        )
        outputs.append(total / sum(weights))
    return np.concatenate(outputs)


def naive_layer(w, history, positions, config):
    """Return the last token's values after the layer."""
    inputs = [naive_norm(x, w["attention_norm"]) for x in history]
    x = history[-1]
    x = x + w["o"] @ naive_attention(w, inputs, positions, config)
    normed = naive_norm(x, w["mlp_norm"])
    gate = w["gate"] @ normed
    swish = gate / (1 + np.exp(-gate))
    return x + w["down"] @ (swish * (w["up"] @ normed))


def naive_logits(model, ids, positions):
    """Return logits [num_tokens, vocab_size] of one sequence."""
    x = [model.embedding.numpy()[token] for token in ids]
    for w in naive_weights(model):
        x = [
            naive_layer(w, x[: i + 1], positions[: i + 1], model.config)
            for i in range(len(ids))
        ]
    normed = [naive_norm(row, model.norm.numpy()) for row in x]
    return np.stack([model.output.numpy() @ row for row in normed])


def give_norms_weights(model):
    """Replace the ones: a norm that forgets its weight must not pass."""
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5, generator=generator)


def test_the_default_model_has_5838080_parameters():
    model = TinyGPT()
    assert model.num_parameters == 5_838_080
    assert sum(p.numel() for p in model.state_dict().values()) == 5_838_080


def test_equals_a_naive_model_of_one_position_at_a_time():
    model = small()
    give_norms_weights(model)
    ids, positions = random_ids(), list(range(TOKENS))
    expected = torch.from_numpy(naive_logits(model, ids, positions))
    torch.testing.assert_close(run(model, ids), expected, **CLOSE)


def test_equals_a_naive_model_at_positions_with_gaps():
    model = small()
    ids = random_ids(6)
    positions = [0, 3, 4, 10, 200, 299]
    expected = torch.from_numpy(naive_logits(model, ids, positions))
    actual = model(ids, torch.tensor(positions), ListAttention(), range(6))
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
def test_chunks_equal_prefill_in_one_go(chunk):
    model, ids = small(), random_ids()
    torch.testing.assert_close(
        run(model, ids, chunk), run(model, ids), **CLOSE
    )


def test_attention_is_called_once_per_layer_in_order_with_its_shapes():
    calls = []

    def attention(layer, query, key, value):
        calls.append((layer, query.shape, key.shape, value.shape))
        return query

    small()(random_ids(5), torch.arange(5), attention, [4])
    shapes = (5, 6, 6), (5, 2, 6), (5, 2, 6)
    assert calls == [(layer, *shapes) for layer in range(3)]


def test_sampled_rows_come_in_the_order_asked_for():
    model, ids = small(), random_ids()
    every_row = run(model, ids)
    rows = [11, 3, 16, 3]
    for sampled in (rows, torch.tensor(rows), np.array(rows)):
        actual = model(ids, torch.arange(TOKENS), ListAttention(), sampled)
        torch.testing.assert_close(actual, every_row[rows], **CLOSE)


def test_no_sampled_row_gives_no_logits_and_still_fills_the_cache():
    attention = ListAttention()
    positions = torch.arange(TOKENS)
    logits = small()(random_ids(), positions, attention, [])
    assert logits.shape == (0, SMALL.vocab_size)
    assert [len(keys) for keys in attention.keys.values()] == [TOKENS] * 3


def test_rows_that_are_not_sampled_do_not_matter():
    model, ids = small(), random_ids()
    other = ids.clone()
    other[9:] = (other[9:] + 1) % SMALL.vocab_size

    rows, positions = [2, 8], torch.arange(TOKENS)
    before = model(ids, positions, ListAttention(), rows)
    after = model(other, positions, ListAttention(), rows)
    torch.testing.assert_close(after, before, **CLOSE)


def test_two_sequences_in_a_batch_do_not_see_each_other():
    model = small()
    first, second = random_ids(7, seed=1), random_ids(5, seed=2)
    one, two = ListAttention(), ListAttention()

    def attention(layer, q, k, v):
        left = one(layer, q[:7], k[:7], v[:7])
        return torch.cat([left, two(layer, q[7:], k[7:], v[7:])])

    ids = torch.cat([first, second])
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    together = model(ids, positions, attention, range(12))
    apart = torch.cat([run(model, first), run(model, second)])
    torch.testing.assert_close(together, apart, **CLOSE)


def test_rotary_depends_on_relative_positions_alone():
    model, ids = small(), random_ids()
    expected = run(model, ids)
    torch.testing.assert_close(run(model, ids, first=200), expected, **CLOSE)
    gap = torch.arange(TOKENS)
    gap[8:] += 5
    moved = model(ids, gap, ListAttention(), range(TOKENS))
    torch.testing.assert_close(moved[:8], expected[:8], **CLOSE)
    assert (moved[8:] - expected[8:]).abs().amax(dim=1).min() > 1e-3


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = small(3), small(3), small(4)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        if weight.ndim == 2:
            assert not torch.equal(weight, other.state_dict()[name])


def test_weights_leave_the_global_generator_alone_and_take_no_gradients():
    before = torch.get_rng_state()
    model = small()
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(p.requires_grad for p in model.parameters())
    assert not run(model, random_ids()).requires_grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 0.5), (torch.float16, 0.1)],
)
def test_lower_precision_is_near_float64(dtype, tolerance):
    """Weights are the same up to rounding: a stray draw gives about 2."""
    exact, model = small(), small(dtype=dtype)
    assert model.dtype == dtype
    for a, b in zip(exact.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.to(dtype), b)
    # Attention in one precision, so that the model's own error is judged.
    ids = random_ids()
    wide = ListAttention()

    def attention(layer, *qkv):
        return wide(layer, *(x.double() for x in qkv)).to(dtype)

    logits = run(model, ids, attention=attention)
    assert logits.dtype == dtype
    error = (logits.double() - run(exact, ids)).pow(2).mean().sqrt()
    assert 0 < error < tolerance


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("config", "distinct"), [(TinyGPTConfig(), 30), (SMALL, 12)]
)
def test_greedy_text_varies(config, distinct, seed):
    """Random weights may run in a circle; then no bug could show."""
    model = TinyGPT(config, seed=seed)
    texts = []
    for prompt_seed in range(2):
        prompt = random_ids(16, prompt_seed, config.vocab_size)
        texts.append(greedy(model, prompt, 64))
    assert texts[0] != texts[1]
    for text in texts:
        assert len(set(text)) >= distinct
        assert text[-20:] not in [
            text[i : i + 20] for i in range(len(text) - 20)
        ]


def test_logits_spread_by_about_two():
    ids = random_ids(64, vocab_size=260)
    spread = run(TinyGPT(), ids).std(dim=1)
    assert spread.min() > 1.0
    assert spread.max() < 3.0


def test_every_earlier_token_counts():
    """A cache that mixes up one token has to show in the logits."""
    model = TinyGPT()
    ids = random_ids(48, vocab_size=260)
    last = run(model, ids)[-1]
    changes = []
    for position in range(0, 48, 6):
        other = ids.clone()
        other[position] = (other[position] + 1) % 260
        changes.append(float((run(model, other)[-1] - last).std()))
    # The logits spread by 2, and float32 rounds them by less than 1e-4.
    assert min(changes) > 0.05
    assert sum(changes) / len(changes) > 0.5


def test_the_sizes_are_readable_on_the_model():
    model = small(dtype=torch.float32)
    assert model.config == SMALL
    for name in (
        "vocab_size",
        "max_context",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ):
        assert getattr(model, name) == getattr(SMALL, name)
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    with pytest.raises(FrozenInstanceError):
        model.config.width = 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size must be >= 1, got 0"),
        ({"num_layers": -1}, ValueError, "num_layers must be >= 1, got -1"),
        ({"width": 2.5}, TypeError, "width must be an integer, got 2.5"),
        ({"max_context": 0}, ValueError, "max_context must be >= 1, got 0"),
        (
            {"num_heads": 6, "num_kv_heads": 4},
            ValueError,
            "num_heads must be a multiple of num_kv_heads 4, got 6",
        ),
        ({"head_dim": 7}, ValueError, "head_dim must be even, got 7"),
        ({"rope_theta": 0.0}, ValueError, "must be above 0 and finite"),
        ({"rope_theta": math.nan}, ValueError, "finite, got nan"),
        ({"rope_theta": "10"}, TypeError, "must be a number, got '10'"),
    ],
)
def test_a_bad_config_names_the_value_and_the_limit(options, error, message):
    with pytest.raises(error, match=message):
        TinyGPTConfig(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be >= 0, got -1"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        (
            {"dtype": torch.int64},
            ValueError,
            "must be one of .*, got torch.in",
        ),
        # PyTorch stores it, and has no RMSNorm for it.
        ({"dtype": torch.float8_e5m2}, ValueError, "got torch.float8_e5m2"),
    ],
)
def test_a_bad_seed_or_dtype_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        TinyGPT(SMALL, **options)


def test_shapes_that_do_not_fit_are_refused():
    model, ids, positions = small(), random_ids(4), torch.arange(4)

    def call(ids=ids, positions=positions, rows=(3,), attention=None):
        return model(ids, positions, attention or ListAttention(), rows)

    assert call().shape == (1, SMALL.vocab_size)
    with pytest.raises(ValueError, match=r"got \[4\] and \[3\]"):
        call(positions=positions[:3])
    with pytest.raises(ValueError, match=r"got \[1, 4\] and \[1, 4\]"):
        call(ids=ids[None], positions=positions[None])
    with pytest.raises(ValueError, match=r"\[num_sampled\], got \[1, 1\]"):
        call(rows=torch.tensor([[3]]))
    with pytest.raises(TypeError, match="integer"):
        call(rows=[0.5])
    with pytest.raises(ValueError, match=r"must return \[4, 6, 6\].*layer 0"):
        call(attention=lambda layer, q, k, v: k)


@pytest.mark.parametrize("bad", [-1, 300])
def test_values_out_of_range_raise_on_a_cpu(bad):
    model, positions = small(), torch.arange(2)
    wrong = torch.tensor([0, bad])
    for ids, places, rows in (
        (wrong, positions, [0]),
        (positions, wrong, [0]),
        (positions, positions, [bad]),
    ):
        with pytest.raises(IndexError):
            model(ids, places, ListAttention(), rows)


@pytest.mark.parametrize("text", ["", "plain", "naïve – 東京 🙂\n\0"])
def test_text_survives_the_tokenizer(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, bos=True) == [tokenizer.BOS, *ids]


def test_decode_drops_specials_and_replaces_broken_bytes():
    tokenizer = ByteTokenizer()
    specials = tokenizer.BOS, tokenizer.EOS, tokenizer.PAD, tokenizer.SEP
    assert specials == (256, 257, 258, 259)
    assert tokenizer.vocab_size == TinyGPTConfig().vocab_size == 260
    assert tokenizer.decode([256, 72, 258, 105, 259, 257]) == "Hi"
    assert tokenizer.decode([0xE6, 72]) == "\ufffdH"
    assert tokenizer.decode(torch.tensor([72, 105])) == "Hi"


@pytest.mark.parametrize("bad", [-1, 260])
def test_decode_refuses_ids_outside_the_vocabulary(bad):
    with pytest.raises(ValueError, match=rf"{bad} is outside \[0, 260\)"):
        ByteTokenizer().decode([72, bad])
    with pytest.raises(TypeError):
        ByteTokenizer().decode([72.0])


def test_the_last_byte_is_a_byte():
    assert ByteTokenizer().decode([255]) == "\ufffd"
