"""Shapes below which a CPU's kernels take another path, and with it other last bits.

Products of 1 to 3 rows are computed otherwise than those of 4 or more, in linear layers and in attention alike; attention
over fewer than 32 keys is summed otherwise than over 32 or more. A server that keeps to these shapes, and to the
trainer's alignment, gives the trainer's log-probs bit for bit.
"""

MIN_ROWS = 4
MIN_WIDTH = 32
