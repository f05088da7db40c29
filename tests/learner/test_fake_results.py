"""Remembered results of fake tensors are those that PyTorch computes each time."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from covey import GRPOConfig
from covey.doctor.dry_run import Target, measured
from covey.doctor.roofline.estimate import TimedBytes
from covey.doctor.roofline.gpus import GPUS
from covey.learner.fake_results import FakeResults
from covey.learner.live_memory import FakeBytes
from kit import rest_nightly, tiny_model

aten = torch.ops.aten
FAKES = FakeTensorMode(allow_non_fake_inputs=True)


def fake(*shape, dtype=torch.float32):
    with FAKES:
        return torch.empty(*shape, dtype=dtype)


def call(func, args, kwargs):
    return func(*args, **kwargs)


def results():
    """A memory of its own: the shared one may hold the operation already."""
    made = FakeResults(FAKES, call, lambda func, args, kwargs, result: 2.0)
    made._results = {}
    return made


def layout(result, inputs):
    """Numbers of the inputs whose storage it has, and shapes, strides and types of each tensor of a result."""
    tensors = result if isinstance(result, (list, tuple)) else [result]
    storages = [x.untyped_storage()._cdata for x in inputs]
    return type(result), [
        None if x is None else (
            x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.untyped_storage().nbytes(),
            [i for i, storage in enumerate(storages) if storage == x.untyped_storage()._cdata],
            [i for i, other in enumerate(inputs) if other is x],
        )
        for x in tensors
    ]  # fmt: skip


OPERATIONS = {
    "a product": (aten.mm.default, lambda: (fake(3, 4), fake(4, 5)), {}),
    "a view": (aten.slice.Tensor, lambda: (fake(6, 4).t(), 1, 1, 5, 2), {}),
    "several views": (aten.split.Tensor, lambda: (fake(6, 4), 4), {}),
    "in place": (aten.add_.Tensor, lambda: (fake(3, 4), fake(4)), {}),
    "several outputs": (aten.var_mean.correction, lambda: (fake(3, 4), [1]), {"keepdim": True}),
    "a list of tensors": (aten.cat.default, lambda: ([fake(3, 4), fake(2, 4)],), {}),
    "another type": (aten._to_copy.default, lambda: (fake(4, 3).t(),), {"dtype": torch.bfloat16}),
    "lists in place": (aten._foreach_add_.Scalar, lambda: ([fake(3), fake(2)], 1.0), {}),
    "expanded": (aten.expand.default, lambda: (fake(1, 4), [3, 4]), {}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_is_the_same_when_it_is_remembered(name):
    func, arguments, kwargs = OPERATIONS[name]
    memory = results()
    for is_remembered in (False, True):
        args = arguments()
        inputs = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, torch.Tensor)]
        assert len(memory._results) == is_remembered
        result, seconds = memory.compute(func, args, kwargs)
        assert layout(result, inputs) == layout(func(*args, **kwargs), inputs)
        assert seconds == 2.0


@pytest.mark.parametrize(
    "func, arguments",
    [
        (aten.t_.default, lambda: (fake(3, 4),)),  # takes another shape in place
        (aten.mul.Tensor, lambda: (fake(3, 4), torch.ones(4))),  # a tensor with numbers
        (aten.mul.Tensor, lambda: (torch.ones(4), torch.ones(4))),
        (aten.mul.Tensor, lambda: (fake(4, dtype=torch.complex64), 2)),  # may be conjugated without a trace
    ],
)
def test_what_is_not_plain_is_computed_each_time(func, arguments):
    memory = results()
    for _ in range(2):
        args, again = arguments(), arguments()
        assert layout(memory.compute(func, args, {})[0], []) == layout(func(*again), [])
    assert not memory._results


@pytest.mark.parametrize("other", [2.0, True, 3])
def test_equal_numbers_of_other_types_are_told_apart(other):
    memory = results()
    ints = fake(3, dtype=torch.long)
    for value in (2, other):
        assert memory.compute(aten.mul.Tensor, (ints, value), {})[0].dtype == aten.mul.Tensor(ints, value).dtype


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", rest_nightly([True, False], 1))
def test_a_step_is_measured_alike_with_and_without(is_adapted, tmp_path, monkeypatch):
    adapter = is_adapted and pytest.importorskip("peft").LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), report_to="none", beta=0.1, num_generations=4, per_device_train_batch_size=4,
        max_completion_length=60,
    )  # fmt: skip
    target = Target(on_cpu=False, logits=10**6, memory=10**9, live=lambda: TimedBytes(GPUS["H100"]))

    def measurement():
        return measured(args, tiny_model().config, peft_config=adapter or None, prompt_tokens=40, target=target)

    quick = measurement()
    monkeypatch.setattr(FakeResults, "compute", lambda self, *call: (x := self._compute(*call), self.cost(*call, x)))
    assert measurement() == quick
    assert quick.learning > quick.updating > 0


def test_bytes_are_counted_until_remembered_tensors_are_freed():
    live = FakeBytes()
    with live:
        with live.fakes:
            x = torch.empty(256, 256)
        for _ in range(3):
            y = x + x
            assert live.now == y.nbytes + x.nbytes
            del y
            assert live.now == x.nbytes
