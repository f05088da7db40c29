"""The cases of Triton's kernels give a device all of its tensors: a card would refuse one of the host's."""

from types import SimpleNamespace

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton_attention_cases import PLAIN, SHAPES, both


class StoppedError(Exception):
    """No kernel runs here."""


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_case_hands_its_tensors_to_the_device(shape):
    devices = set()

    def decode(*given, **options):
        leaves = tree_leaves([vars(x) if isinstance(x, SimpleNamespace) else x for x in given] + [options])
        devices.update(x.device.type for x in leaves if isinstance(x, Tensor))
        raise StoppedError

    with pytest.raises(StoppedError):
        both(SimpleNamespace(Spans=SimpleNamespace, decode=decode), device="meta", **PLAIN | shape)
    assert devices == {"meta"}
