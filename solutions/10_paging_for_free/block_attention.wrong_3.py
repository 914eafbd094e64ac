# ruff: noqa: F821
def block_attention(inputs: AttentionInputs, out: Tensor) -> Tensor:
    """Write attention through the block table into out; return it."""
    shape = inputs.num_kv_heads, inputs.group, -1
    starts = inputs.query_start_loc
    if starts is None:
        starts = torch.arange(inputs.num_seqs + 1)
    starts = starts.tolist()
    for seq, length in enumerate(inputs.seq_lens.tolist()):
        ids = inputs.block_tables[seq, : -(-length // inputs.block_size)]
        keys, values = (  # all blocks, gathered
            cache[ids.long()].transpose(0, 1).flatten(1, 2)
            for cache in (inputs.key_cache, inputs.value_cache)
        )
        for row in range(starts[seq], starts[seq + 1]):
            sees = length - (starts[seq + 1] - 1 - row)
            query = inputs.query[row].view(shape) * inputs.scale
            weights = (query @ keys[:, :sees].transpose(1, 2)).softmax(2)
            out[row] = (weights @ values[:, :sees]).flatten(0, 1)
    return out
