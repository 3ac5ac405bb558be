"""How many rows of logits fit into a budget of memory, where the weight's gradient is summed over chunks."""

from ligermodels.ops.loss.linear_cross_entropy import ROW_MULTIPLE


def rows_per_chunk(T: int, bytes_per_row: int, bytes_of_sum: int, memory_budget: int) -> int:
    """Rows per chunk of T rows: as many as the budget allows, spread evenly, in multiples of ROW_MULTIPLE if there are
    as many, and at least one.

    bytes_of_sum: what several chunks need for the sum of the weight's gradient (`GradientSum`). A single chunk needs no
    such sum, and may have its memory. It is part of the budget if it is no more than half of it, else it comes on top.
    """
    if T * bytes_per_row <= memory_budget + bytes_of_sum:
        return max(T, 1)
    if 2 * bytes_of_sum <= memory_budget:
        memory_budget -= bytes_of_sum
    rows = max(memory_budget // bytes_per_row, 1)
    if rows >= ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE
    chunks = -(-T // rows)
    return min(rows, -(-T // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)
