"""Values that processes exchange: their tensors are copied as bytes and come back as they were."""

import pickle
from dataclasses import replace

import pytest
import torch

from covey.process.tensor_bytes import from_bytes, to_bytes
from kit import completion, group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8])
def test_tensors_of_every_type_and_shape_come_back(dtype):
    tensors = [torch.randn(shape).mul(9).to(dtype) for shape in ((), (0,), (1,), (3, 5), (2, 0, 3), (33,))]
    tensors.append(tensors[3].t())
    found = from_bytes(torch.cat((to_bytes(tensors), torch.zeros(77, dtype=torch.uint8))))
    for one, other in zip(found, tensors, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_a_group_comes_back_with_everything_that_belongs_to_it():
    given = group(["4", "fünf"], rewards=[[1.0], [float("nan")]], columns={"answer": {"deep": [4, None]}})
    answers = tuple(replace(one, logprobs=torch.randn(one.num_tokens), version=3) for one in given.completions)
    given = replace(given, completions=answers)
    (found,) = from_bytes(to_bytes([given]))
    assert found.prompt.columns == given.prompt.columns
    torch.testing.assert_close(found.rewards, given.rewards, equal_nan=True, rtol=0, atol=0)
    for one, other in zip(found.completions, answers, strict=True):
        assert (one.text, one.finish, one.version, one.old_logp) == (other.text, other.finish, 3, None)
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.logprobs, other.logprobs)


def test_a_tensor_that_occurs_twice_is_sent_once_and_stays_one():
    x = torch.randn(10_000)
    sent = to_bytes([x, {"again": x}])
    assert sent.numel() < 1.1 * x.nbytes
    first, second = from_bytes(sent)
    assert first is second["again"]


def test_parameters_and_tensors_with_a_gradient_are_pickled_as_torch_does_it():
    given = [torch.nn.Parameter(torch.ones(2)), torch.ones(3, requires_grad=True), torch.Size([2])]
    found = from_bytes(to_bytes(given))
    assert isinstance(found[0], torch.nn.Parameter)
    assert found[1].requires_grad
    assert found[2] == torch.Size([2])


def test_many_completions_take_a_fraction_of_their_pickle():
    drawn = [
        replace(completion(ids=range(200)), logprobs=torch.zeros(200), old_logp=torch.zeros(200)) for _ in range(64)
    ]
    assert to_bytes(drawn).numel() < 0.85 * len(pickle.dumps(drawn))
