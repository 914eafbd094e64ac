# ruff: noqa: ANN001, ANN201, F821, N803
@triton.jit
def window_kernel(
    query,
    keys,
    values,
    tables,
    lengths,
    out,
    scale,
    max_blocks,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Attend with one query head to the newest tokens."""
    seq, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    length = tl.load(lengths + seq)
    # One token too many: the window counts the newest one.
    oldest = tl.maximum(length - window - 1, 0)
    dim = tl.arange(0, HEAD_DIM)
    offset = tl.arange(0, BLOCK_SIZE)
    row = (seq * NUM_HEADS + head) * HEAD_DIM + dim
    q = tl.load(query + row) * scale

    m = float("-inf")
    l = 0.0
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for block in range(oldest // BLOCK_SIZE, tl.cdiv(length, BLOCK_SIZE)):
        block_id = tl.load(tables + seq * max_blocks + block)
        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset
        at = slot[:, None] * HEAD_DIM + dim[None, :]
        position = block * BLOCK_SIZE + offset
        live = (position >= oldest) & (position < length)
        k = tl.load(keys + at, mask=live[:, None], other=0.0)
        v = tl.load(values + at, mask=live[:, None], other=0.0)

        scores = tl.where(live, tl.sum(q[None, :] * k, 1), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 0))
        rescale = tl.exp(m - m_new)
        weights = tl.exp(scores - m_new)
        l = l * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        m = m_new
    if length > 0:
        acc = acc / l
    tl.store(out + row, acc)


def window_attention(b: AttentionInputs, out: Tensor) -> None:
    """Write decode attention over the last b.window tokens into out."""
    window_kernel[b.num_seqs, b.num_heads](
        *arguments(b, out),
        b.window,
        NUM_HEADS=b.num_heads,
        NUM_KV_HEADS=b.num_kv_heads,
        BLOCK_SIZE=b.block_size,
        HEAD_DIM=b.head_dim,
    )
