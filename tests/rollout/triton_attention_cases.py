"""Shapes of the Triton kernels of attention, and one softmax over all keys."""

import torch

from covey.rollout.softmax_attention import HIDDEN, AttentionPart, RowMap, ScoreRule, by_one_softmax, wide


def both(
    kernels,
    *,
    device="cpu",
    width,
    heads,
    repeats,
    owners,
    lengths,
    starts,
    step_column,
    columns,
    dtype=torch.float32,
    has_bias=False,
    **options,
):
    """What the kernels give for random keys, and what one softmax in float32 over all of them gives, [R, Hq, D] each."""
    rows, prompts, held = len(owners), len(lengths), max([1, *lengths]) + 5
    query = torch.randn(rows, heads * repeats, width).to(dtype)
    own, shared = torch.randn(2, rows + 2, heads, columns, width), torch.randn(2, prompts, heads, held, width)
    own, shared = own.to(dtype), shared.to(dtype)
    own_bias = torch.full((rows + 2, columns), HIDDEN).to(dtype)
    for row, start in enumerate(starts):
        own_bias[row, start : step_column + 1] = 0
    bias = torch.where(torch.arange(held) < torch.tensor(lengths)[:, None], 0.0, HIDDEN).to(dtype)
    members = [[row for row, owner in enumerate(owners) if owner == p] for p in range(prompts)]
    size = max(map(len, members))
    spans = kernels.Spans(
        members=torch.tensor([rows + [0] * (size - len(rows)) for rows in members]),
        counts=torch.tensor([len(rows) for rows in members], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        owned=torch.ones(rows, dtype=torch.int32),
        first=torch.tensor(starts, dtype=torch.int32),
        step_column=torch.tensor([step_column]),
    )
    scale, softcap, sinks = width**-0.5, options.pop("softcap", None), options.get("sinks")
    if sinks is not None:
        sinks = torch.randn(heads * repeats) * sinks
        options["sinks"] = sinks.to(device)
    there = lambda x: x.to(device)
    spans = kernels.Spans(**{name: there(table) for name, table in vars(spans).items()})
    key, value = own[:, :rows, :, step_column].clone()
    own[:, :rows, :, step_column] = torch.nan  # the kernel writes what it was handed, and reads only what it wrote
    own = there(own)
    given = map(there, (query, key, value))
    biases = (there(own_bias), there(bias[owners])) if has_bias else (None, None)
    out = kernels.decode(*given, own, biases[0], there(shared), biases[1], spans, scale, softcap, **options).cpu()
    own = own.cpu()
    assert torch.equal(own[:, :rows, :, step_column], torch.stack((key, value)))
    parts = [
        AttentionPart(slab[0].float(), slab[1].float(), wide(bias, heads))
        for slab, bias in ((own[:, :rows], own_bias[:rows, None].float()), (shared, bias[:, None].float()))
    ]
    row_map = RowMap.of(owners, prompts, torch.device("cpu"))
    grouped = query.float().view(rows, heads, repeats, width)
    return out, by_one_softmax(grouped, *parts, row_map, ScoreRule(scale, softcap, sinks)).view(out.shape)


PLAIN = {
    "width": 64,
    "heads": 2,
    "repeats": 3,
    "owners": [1, 0, 1, 1],
    "lengths": [7, 39],
    "starts": [0, 5, 17, 36],
    "step_column": 36,
    "columns": 64,
}
SHAPES = {
    "heads of 80": {"width": 80},
    "heads of 96": {"width": 96, "heads": 1},
    "heads of 128": {"width": 128, "heads": 1},
    "one head for each": {"repeats": 1},
    "groups of one row": {"owners": [0, 2, 1, 3], "lengths": [7, 39, 1, 64]},
    "a prompt without keys": {"lengths": [0, 39]},
    "a prompt without rows": {"lengths": [7, 39, 12]},
    "no prompt has keys": {"lengths": [0, 0]},
    "rows with one key": {"starts": [36, 36, 36, 36]},
    "the last column": {"step_column": 63},
    "more queries than a program takes": {"owners": [0] * 12 + [1], "starts": [0] * 13, "heads": 1},
    "more queries of a row than a program takes": {"repeats": 40, "heads": 1, "owners": [0, 1], "starts": [3, 0]},
    "capped scores": {"softcap": 2.0},
    "sinks": {"sinks": 3.0},
    "sinks and split rows": {
        "sinks": 30.0,
        "columns": 160,
        "step_column": 140,
        "starts": [0, 130, 77, 140],
        "splits": (1, 3),
    },
    "split prompts": {"lengths": [7, 150], "splits": (3, 1)},
    "biases": {"has_bias": True},
    "more rows than prompts' keys": {"lengths": [1, 1]},
    "split rows": {"columns": 160, "step_column": 140, "starts": [0, 130, 77, 140], "splits": (1, 3)},
}
