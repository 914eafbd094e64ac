# ruff: noqa: F821
def block_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Write attention through the block table into out; return it."""
    if inputs.query_start_loc is not None:  # a prefill is gathered
        return gather_loop_attention(inputs, out)
    size, shape = inputs.block_size, (inputs.num_kv_heads, inputs.group, -1)
    starts = list(range(inputs.num_seqs + 1))
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        first, end = starts[seq], starts[seq + 1]
        for row in range(first, end):
            sees = length - (end - 1 - row)  # tokens, its own included
            query = inputs.query[row].view(shape) * inputs.scale
            m = query.new_full((*query.shape[:2], 1), -torch.inf)
            l, acc = torch.zeros_like(m), torch.zeros_like(query)
            for block in range(-(-sees // size)):
                block_id = int(inputs.block_tables[seq, block])
                live = min(size, sees - block * size)
                keys = inputs.key_cache[block_id, :, :live]
                values = inputs.value_cache[block_id, :, :live]
                scores = query @ keys.transpose(1, 2)
                m_new = torch.maximum(m, scores.amax(2, keepdim=True))
                weights, rescale = (scores - m_new).exp(), m - m_new
                rescale = rescale.exp()
                l = l * rescale + weights.sum(2, keepdim=True)
                acc = acc * rescale + weights @ values
                m = m_new
            out[row] = (acc / l).flatten(0, 1)
    return out
