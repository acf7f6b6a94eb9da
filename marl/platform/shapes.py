"""Shapes below which a CPU's kernels use another code path, which rounds differently.

Products of 1 to 3 rows are computed otherwise than those of 4 or more, in linear layers and in attention alike; attention
over fewer than 32 keys is summed otherwise than over 32 or more, keys beyond a multiple of 16 otherwise than those before it,
and a block of 512 keys is summed in two halves where it has between 192 and 384. Several threads share the rows of a product,
and one may be left with 1 to 3 of them unless their number is a multiple of 4. A server that keeps to these shapes, and to the
trainer's alignment, gives the trainer's log-probs bit for bit.
"""

MIN_ROWS = 4
MIN_WIDTH = 32


def missing_rows(rows: int) -> int:
    """Rows that a product of so many lacks: it has a multiple of ``MIN_ROWS``, and no fewer."""
    return max(MIN_ROWS - rows, -rows % MIN_ROWS)


def near_width(length: int) -> int:
    """Width to which so many keys are padded where last bits do not matter."""
    return -(-max(length, MIN_WIDTH) // 16) * 16


def key_width(length: int) -> int:
    """Width to which so many keys are padded: what attention gives at a position is then the same at every greater one."""
    blocks, rest = divmod(near_width(length), 512)
    return 512 * blocks + (384 if 192 < rest < 384 else rest)
