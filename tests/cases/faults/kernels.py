"""The named list of faulty kernels: see test_kernel_faults.py."""

from typing import NamedTuple


class KernelFault(NamedTuple):
    """One piece of kernels.py, and a faulty one in its place.

    `noticed` says by what: a key of NOTICES in test_kernel_faults.py, which
    runs in that process, or "guard" or "int32", in one that may crash.
    "equivalent" changes no result of a rung, and `why` explains it.
    """

    name: str
    old: str
    new: str
    noticed: str
    why: str = ""


FAULTS = [
    # --- The softmax ---------------------------------------------------------
    KernelFault(
        "mask by -10000",
        'scores = tl.where(seen, scores, float("-inf"))',
        "scores = tl.where(seen, scores, -10000.0)",
        "extremes",
    ),
    KernelFault(
        "missing rescale of the values",
        "acc = acc * rescale[:, None] + fresh",
        "acc = acc + fresh",
        "grid",
    ),
    KernelFault(
        "missing rescale of the total",
        "l = l * rescale + tl.sum(weights, 1)",
        "l = l + tl.sum(weights, 1)",
        "grid",
    ),
    KernelFault(
        "a row without tokens is NaN",
        'base = tl.where(m_new == float("-inf"), 0.0, m_new)\n'
        "    rescale = tl.exp(m - base)\n"
        "    weights",
        "base = m_new\n    rescale = tl.exp(m - base)\n    weights",
        "grid",
    ),
    KernelFault(
        "length 0 is NaN",
        "return acc / tl.where(none, 1.0, l)[:, None]",
        "return acc / l[:, None]",
        "grid",
    ),
    KernelFault(
        "scale forgotten",
        'scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale\n'
        "        scores = shaped_scores",
        'scores = tl.dot(q, tl.trans(k), input_precision="ieee")\n'
        "        scores = shaped_scores",
        "grid",
    ),
    # --- What is read --------------------------------------------------------
    KernelFault(
        "K unmasked",
        "keys, at_key, known, key_stride_dim",
        "keys, at_key, block_id >= -1, key_stride_dim",
        "guard",
    ),
    KernelFault(
        "V unmasked",
        "            at_value,\n            known,",
        "            at_value,\n            block_id >= -1,",
        "guard",
    ),
    KernelFault(
        "V of a block's unused slots",
        "v = tl.load(values + at, mask=stored, other=0.0).to(COMPUTE)",
        "v = tl.load(values + at, mask=(dim < HEAD_DIM)[None, :], "
        "other=0.0).to(COMPUTE)",
        "rungs",
    ),
    KernelFault(
        "K of a block's unused slots",
        "k = tl.load(keys + at, mask=stored, other=0.0).to(COMPUTE)",
        "k = tl.load(keys + at, mask=(dim < HEAD_DIM)[None, :], "
        "other=0.0).to(COMPUTE)",
        "equivalent",
        "Scores of unused slots are replaced by -inf, NaN or not. A value is "
        "multiplied by its weight, and 0 * NaN is NaN: that is why V needs "
        "its mask and K here does not.",
    ),
    KernelFault(
        "last partial block dropped",
        "end = tl.minimum(begin + per_split * TILE, newest)",
        "end = tl.minimum(begin + per_split * TILE, "
        "newest // BLOCK_SIZE * BLOCK_SIZE)",
        "grid",
    ),
    KernelFault(
        "last partial block dropped by rung 1",
        "for block in range(tl.cdiv(length, BLOCK_SIZE)):\n"
        "        block_id = tl.load(tables + seq * max_blocks + block)\n"
        "        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + "
        "offset\n"
        "        at = slot[:, None] * HEAD_DIM + dim[None, :]\n"
        "        live = block * BLOCK_SIZE + offset < length\n"
        "        k = tl.load(keys + at, mask=live[:, None], "
        "other=0.0).to(tl.float32)",
        "for block in range(length // BLOCK_SIZE):\n"
        "        block_id = tl.load(tables + seq * max_blocks + block)\n"
        "        slot = (block_id * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + "
        "offset\n"
        "        at = slot[:, None] * HEAD_DIM + dim[None, :]\n"
        "        live = block * BLOCK_SIZE + offset < length\n"
        "        k = tl.load(keys + at, mask=live[:, None], "
        "other=0.0).to(tl.float32)",
        "rungs",
    ),
    KernelFault(
        "offset in the block by `& (BLOCK_SIZE - 1)`",
        "offset = (position % BLOCK_SIZE).to(tl.int64)",
        "offset = (position & (BLOCK_SIZE - 1)).to(tl.int64)",
        "grid",
    ),
    KernelFault(
        "block id in 32 bits",
        "block_id = block_id.to(tl.int64)",
        "block_id = block_id.to(tl.int32)",
        "int32",
    ),
    KernelFault(
        "table read past its end",
        "block_id = tl.load(table + block, mask=in_table, other=-1)",
        "block_id = tl.where(in_table, tl.load(table + block), -1)",
        "guard",
    ),
    KernelFault(
        "a block that is not there passes for zeros",
        'scores = tl.where(known[None, :], scores, float("nan"))',
        "scores = tl.where(known[None, :], scores, scores)",
        "unvalidated",
    ),
    KernelFault(
        "block ids past the pool are trusted",
        "known = (block_id >= 0) & (block_id < num_blocks)",
        "known = block_id >= 0",
        "unvalidated",
    ),
    # --- Heads and strides ---------------------------------------------------
    KernelFault(
        "wrong KV head",
        "head = kv_head * GROUP + rows % GROUP",
        "head = rows % GROUP * (NUM_HEADS // GROUP) + kv_head",
        "grid",
    ),
    KernelFault(
        "wrong KV head in rung 1",
        "kv_head = head // (NUM_HEADS // NUM_KV_HEADS)",
        "kv_head = head % NUM_KV_HEADS",
        "rungs",
    ),
    KernelFault(
        "K's block stride for V",
        "at_value = block_id * value_stride_block",
        "at_value = block_id * key_stride_block",
        "grid",
    ),
    KernelFault(
        "K's slot stride for V",
        "offset * value_stride_slot",
        "offset * key_stride_slot",
        "grid",
    ),
    KernelFault(
        "query taken for contiguous",
        "at_query = token * query_stride_token + head * query_stride_head",
        "at_query = (token * NUM_HEADS + head) * HEAD_DIM",
        "grid",
    ),
    KernelFault(
        "block stride assumed",
        "at_key = block_id * key_stride_block + kv_head * key_stride_head",
        "at_key = block_id * (NUM_HEADS // GROUP * BLOCK_SIZE * HEAD_DIM)"
        " + kv_head * key_stride_head",
        "grid",
    ),
    KernelFault(
        "head stride assumed",
        "at_key = block_id * key_stride_block + kv_head * key_stride_head",
        "at_key = block_id * key_stride_block"
        " + kv_head * BLOCK_SIZE * HEAD_DIM",
        "grid",
    ),
    # --- Which rows see which tokens -----------------------------------------
    KernelFault(
        "a row does not see itself",
        "seen = seen & (position[None, :] <= row_position[:, None])",
        "seen = seen & (position[None, :] < row_position[:, None])",
        "grid",
    ),
    KernelFault(
        "not causal",
        "seen = seen & (position[None, :] <= row_position[:, None])",
        "seen = seen & (position[None, :] <= length)",
        "grid",
    ),
    KernelFault(
        "window off by one",
        "seen = seen & (position[None, :] > row_position[:, None] - window)",
        "seen = seen & (position[None, :] >= row_position[:, None] - window)",
        "grid",
    ),
    KernelFault(
        "a token before the window is read",
        "first - window + 1, 0)",
        "first - window, 0)",
        "grid",
    ),
    KernelFault(
        "wrong sequence for a query tile",
        "QUERY_TILE + middle <= tile:",
        "QUERY_TILE + middle < tile:",
        "grid",
    ),
    # --- Splits --------------------------------------------------------------
    KernelFault(
        "lost split",
        "used = split < splits",
        "used = split < splits - 1",
        "grid",
    ),
    KernelFault(
        "split counted twice",
        "begin = (first_tile + split * per_split) * TILE",
        "begin = (first_tile + tl.maximum(split - 1, 0) * per_split) * TILE",
        "grid",
    ),
    KernelFault(
        "empty split not neutral",
        'return tl.where(none, float("-inf"), m + log_l)',
        "return tl.where(none, 0.0, m + log_l)",
        "grid",
    ),
    KernelFault(
        "parts averaged instead of weighed",
        "weights = tl.exp(lses - base)",
        "weights = tl.where(used, 1.0, 0.0)",
        "grid",
    ),
    KernelFault(
        "the largest part not taken off",
        'base = tl.where(m == float("-inf"), 0.0, m)',
        "base = 0.0",
        "extremes",
    ),
    # --- Options -------------------------------------------------------------
    KernelFault(
        "ALiBi offset",
        "distance = (position - (length - 1)).to(tl.float32)",
        "distance = (position - length).to(tl.float32)",
        # Without a sink the softmax cancels what all scores have in common:
        # only cases with both tell.
        "grid",
    ),
    KernelFault(
        "soft-cap overflow",
        "large = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)",
        "large = (tl.exp(2.0 * x) - 1.0) / (tl.exp(2.0 * x) + 1.0)",
        "extremes",
    ),
    KernelFault(
        "soft cap after ALiBi",
        "scores += slope[:, None] * distance[None, :]",
        "scores += slope[:, None] * distance[None, :]\n"
        "        if softcap is not None:\n"
        "            scores = tl.minimum(scores, softcap)\n"
        "            scores = tl.maximum(scores, -softcap)",
        "grid",
    ),
    KernelFault(
        "sink with every split",
        "if SPLITS == 1:\n        if sinks is not None:",
        "if True:\n        if sinks is not None:",
        "grid",
    ),
    KernelFault(
        "sink forgotten by the combination",
        "l += tl.exp(sink - base)",
        "l += 0.0",
        "grid",
    ),
    KernelFault(
        "sink not rescaled",
        "l = l * rescale + tl.exp(sink - base)",
        "l = l + tl.exp(sink - base)",
        "grid",
    ),
    KernelFault(
        "fp8 key scale dropped",
        "scale = scale * tl.load(k_scale + kv_head)",
        "scale = scale * 1.0",
        "grid",
    ),
    KernelFault(
        "fp8 value scale dropped",
        "acc = acc * tl.load(v_scale + kv_head)",
        "acc = acc * 1.0",
        "grid",
    ),
    KernelFault(
        "fp8 sign lost",
        "shifted = ((wide & 0x80) << 8) | (magnitude << 7)",
        "shifted = magnitude << 7",
        "grid",
    ),
    KernelFault(
        "fp8 kinds confused",
        "if E5M2:",
        "if not E5M2:",
        "grid",
    ),
    KernelFault(
        "soft cap that cancels where scores are small",
        "return tl.where(square < 0.04, small, large)",
        "return large",
        "extremes",
    ),
    KernelFault(
        "length 0 with a sink of -inf is NaN",
        'base = tl.where(m_new == float("-inf"), 0.0, m_new)\n'
        "    rescale = tl.exp(m - base)\n"
        "    l = l * rescale + tl.exp(sink",
        "base = m_new\n"
        "    rescale = tl.exp(m - base)\n"
        "    l = l * rescale + tl.exp(sink",
        "extremes",
    ),
    KernelFault(
        "value scale of the first head for all",
        "tl.load(v_scale + kv_head)",
        "tl.load(v_scale)",
        "grid",
    ),
    KernelFault(
        "fp8 NaN becomes a number",
        'return tl.where(magnitude == 0x7F, float("nan"), number)',
        "return number",
        "fp8",
    ),
    KernelFault(
        "query's numbers taken for neighbours",
        "dim[None, :] * query_stride_dim",
        "dim[None, :]",
        "grid",
    ),
    KernelFault(
        "cache's numbers taken for neighbours",
        "at = slot_at[:, None] + dim[None, :] * stride_dim",
        "at = slot_at[:, None] + dim[None, :]",
        "grid",
    ),
    KernelFault(
        "rows of padding write the next program's tokens",
        "row_used = (rows < QUERY_TILE * GROUP) & (index < query_len)",
        "row_used = index < query_len",
        "one program",
    ),
    KernelFault(
        "tables looked up past their last column",
        "in_table = wanted & (block < max_blocks)",
        "in_table = wanted",
        "guard",
    ),
    KernelFault(
        "slots counted in 32 bits",
        "offset = (position % BLOCK_SIZE).to(tl.int64)",
        "offset = position % BLOCK_SIZE",
        "int32",
    ),
    KernelFault(
        "KV heads counted in 32 bits",
        "tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)",
        "tile, kv_head = tl.program_id(0), tl.program_id(1)",
        "int32",
    ),
    KernelFault(
        "slots written in 32 bits",
        "slot = tl.load(slots + token).to(tl.int64)",
        "slot = tl.load(slots + token).to(tl.int32)",
        "int32",
    ),
    # --- The cache write -----------------------------------------------------
    KernelFault(
        "slot -1 written",
        "if slot < 0:",
        "if slot < -1:",
        "write",
    ),
    KernelFault(
        "slot divided by the wrong block size",
        "at = slot // BLOCK_SIZE * cache_stride_block",
        "at = slot // (2 * BLOCK_SIZE) * cache_stride_block",
        "write",
    ),
    KernelFault(
        "rows taken for contiguous",
        "at_row = token * row_stride_token + head * row_stride_head",
        "at_row = (token * tl.num_programs(1) + head) * HEAD_DIM",
        "write",
    ),
]
