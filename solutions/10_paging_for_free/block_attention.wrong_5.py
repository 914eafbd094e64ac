# ruff: noqa: F821
def block_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Write attention through the block table into out; return it."""
    size, shape = inputs.block_size, (inputs.num_kv_heads, inputs.group, -1)
    starts = inputs.query_start_loc
    if starts is None:
        starts = torch.arange(inputs.num_seqs + 1)
    starts = starts.tolist()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            sees = length - (starts[seq + 1] - 1 - row)
            query = inputs.query[row].view(shape) * inputs.scale
            scores, blocks = [], range(-(-sees // size))
            ids = inputs.block_tables[seq].tolist()
            for block in blocks:  # all scores first, block by block
                live = min(size, sees - block * size)
                keys = inputs.key_cache[ids[block], :, :live]
                scores.append(query @ keys.transpose(1, 2))
            m = torch.cat(scores, dim=2).amax(dim=2, keepdim=True)
            l = sum((x - m).exp().sum(2, True) for x in scores)
            acc = torch.zeros_like(query)
            for block in blocks:
                live = min(size, sees - block * size)
                values = inputs.value_cache[ids[block], :, :live]
                acc += (scores[block] - m).exp() @ values
            out[row] = (acc / l).flatten(0, 1)
    return out
