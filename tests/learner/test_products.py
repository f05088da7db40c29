"""Few row counts on a CPU: oneDNN compiles, and keeps, code for each."""

import torch
from shared_rows import row

from covey.kernels import padded_rows
from covey.learner.shared_prompt import share_rows


def test_rows_are_padded_to_few_counts_that_return():
    counts = {padded_rows(rows) for rows in range(1, 4097)}
    assert len([count for count in counts if 2048 < count <= 4096]) == 8
    assert all(rows <= padded_rows(rows) <= rows * 9 / 8 for rows in range(1, 10_000))
    assert [padded_rows(rows) for rows in (1, 15, 128, 1024)] == [1, 15, 128, 1024]
    assert padded_rows(16_448) == 16_640, "what is large is not made much larger"


def test_packed_rows_of_many_lengths_are_of_few_lengths_on_a_cpu():
    lengths = set()
    for count in range(30, 127):
        packed = share_rows([row(0, [5, 6, 7, 8], list(range(10, 10 + count)))] * 4, torch.device("cpu"))
        lengths.add(packed.input_ids.shape[1])
    assert len([length for length in lengths if length > 256]) == 8
