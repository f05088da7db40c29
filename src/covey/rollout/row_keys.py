"""Keys of rows as whole sequences, for layers that read them so: indexers, a model's own attention, answers that are prefilled."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from covey.rollout.kv_cache import KVCache

Order: TypeAlias = Literal["end", "position"]
"""Order of gathered keys: padded on the left, so that all rows end together, or each at the place of its position."""


def index_place(cache: KVCache, layer: int) -> int:
    """Index among `layers` of the keys of a layer's indexer, which stand behind all layers."""
    return len(cache.layers) // 2 + layer


def index_keys(cache: KVCache, layer: int, keys: Tensor) -> Tensor:
    """[R, K, D] keys of the layer's indexer: each row's prompt's and its suffix, after `keys` [R, D] of this step."""
    place = index_place(cache, layer)
    suffix = cache.suffix[place][0, : len(keys), 0]
    suffix[:, cache.step_column] = keys
    return torch.cat((cache.prefix[place][0, cache.padded_owners, 0], suffix), 1).to(keys.dtype)


def visible_keys(cache: KVCache) -> Tensor:
    """[R, K] bool, true at those of `index_keys` that are keys of the row."""
    return torch.cat((cache.prefix_bias[cache.padded_owners], cache.suffix_bias[: cache.num_computed]), 1) == 0


def key_places(cache: KVCache, order: Order) -> Tensor:
    """[R, K] the columns of each row's keys, its prompt's before its own, in this order; -1 where there is none."""
    if ("places", order) not in cache.of_rows:
        padding, columns = cache.num_computed - cache.num_rows, cache.prefix_bias.shape[1]
        starts = torch.tensor(cache.starts + [cache.step_column] * padding, device=cache.device)[:, None]
        before = torch.tensor(cache.prompt_lengths, device=cache.device)[cache.padded_owners][:, None]
        counts = before + cache.step_column + 1 - starts
        place = torch.arange(int(counts.max()), device=cache.device)
        place = place - counts.max() + counts if order == "end" else place.expand(len(counts), -1)
        column = torch.where(place < before, place, columns + starts + place - before)
        cache.of_rows["places", order] = column.masked_fill((place < 0) | (place >= counts), -1)
    return cache.of_rows["places", order]


def whole_keys(cache: KVCache, layer: int, new: Sequence[Tensor], order: Order) -> tuple[Tensor, ...]:
    """Each [R, H, K, D]: the keys, or values, of a row's prompt and its own in `order`, after the `new` ones [R, H, D] of this step."""
    places, gathered = key_places(cache, order).clamp(min=0)[:, None, :, None], []
    for kind, x in enumerate(new):
        rows, heads, width = x.shape
        suffix = cache.suffix[layer][kind, :rows]
        suffix[:, :, cache.step_column, :width] = x
        both = torch.cat((cache.prefix[layer][kind, cache.padded_owners, ..., :width], suffix[..., :width]), 2)
        gathered.append(both.gather(2, places.expand(-1, heads, -1, width)).to(x.dtype))
    return tuple(gathered)


def keys_of(cache: KVCache, layer: int, row: int) -> Tensor:
    """[2, Hkv, K, D] keys and values of the row's prompt, and its own before the step column."""
    owner = cache.owners[row]
    prompt = cache.prefix[layer][:, owner, :, : cache.prompt_lengths[owner]]
    return torch.cat((prompt, cache.suffix[layer][:, row, :, cache.starts[row] : cache.step_column]), 2)
