"""Triton's draw against PyTorch's, in Triton's interpreter on a CPU. `pip install triton` to run it."""

import pytest
import torch
from triton_cases import IN_THE_INTERPRETER, WAYS, compare, drawn

from covey.rollout.sampler import SamplingParams
from covey.rollout.sampling import processed
from covey.rollout.truncation import kernel_options

pytestmark = [pytest.mark.nightly, *IN_THE_INTERPRETER]


@pytest.fixture
def kernels():
    from covey.kernels import triton_sampling

    return triton_sampling


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "rows, size, dtype", [(3, 5, torch.float32), (1, 4096, torch.bfloat16), (2, 5003, torch.bfloat16)]
)
def test_the_draw_is_that_of_pytorch(kernels, way, rows, size, dtype):
    """One row, a vocabulary of less than a block, of one, and no multiple of it; a token that cannot be drawn."""
    logits = (3 * torch.randn(rows, size)).to(dtype)
    logits[:, 1] = -torch.inf
    seen = torch.rand(rows, size) < 0.3 if way == "penalty" else None
    compare(kernels, logits, torch.rand(rows, dtype=torch.float64), seen, **WAYS[way])


def test_equal_scores_stay_or_go_together_and_the_first_of_equals_is_the_likeliest(kernels):
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 0.0]]).repeat(6, 1)
    uniforms = torch.linspace(0, 0.999, 6, dtype=torch.float64)
    for way in ({"temperature": 0}, {"top_k": 3}, {"top_k": 1}, {"top_p": 0.4}, {"top_p": 0.7}, {"min_p": 0.3}):
        compare(kernels, logits, uniforms, **way)


def test_a_row_with_one_token_left_draws_it_with_certainty(kernels):
    logits = torch.full((2, 4100), -torch.inf)
    logits[0, 4097], logits[1, 0] = -7.0, 2.0
    for way in ({}, {"top_p": 0.5}, {"temperature": 0}, {"top_k": 3}):
        assert compare(kernels, logits, torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64), **way).tolist() == [
            4097,
            0,
        ]


def test_the_ends_of_the_uniforms_draw_the_first_and_the_last_possible_token(kernels):
    logits = torch.zeros(2, 9000)
    logits[:, :2], logits[:, -1] = -torch.inf, -torch.inf
    tokens = compare(kernels, logits, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [2, 8998]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_logits_give_a_log_probability_that_is_no_number(kernels, broken):
    logits = torch.randn(2, 4200)
    logits[0, 4150] = broken
    tokens, logprobs = drawn(kernels, logits, torch.tensor([0.3, 0.3], dtype=torch.float64), SamplingParams())
    assert logprobs.isnan().tolist() == [True, False]
    assert (tokens < 4200).all()
    nothing = torch.full((1, 50), -torch.inf)
    _, logprobs = drawn(kernels, nothing, torch.tensor([0.3], dtype=torch.float64), SamplingParams())
    assert logprobs.isnan().all()


def test_a_rows_token_does_not_depend_on_its_batch(kernels):
    logits, uniforms = torch.randn(5, 5000).bfloat16(), torch.rand(5, dtype=torch.float64)
    params = SamplingParams(top_p=0.8)
    together, logprobs = drawn(kernels, logits, uniforms, params)
    for row in range(5):
        alone, logprob = drawn(kernels, logits[row : row + 1], uniforms[row : row + 1], params)
        assert alone.item() == together[row]
        assert logprob.item() == logprobs[row]


def test_the_frequencies_are_the_probabilities(kernels):
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf]])
    uniforms = torch.linspace(0, 1 - 1e-9, 200, dtype=torch.float64)
    tokens, _ = drawn(kernels, logits.expand(200, -1).contiguous(), uniforms, SamplingParams())
    shares = torch.bincount(tokens, minlength=5) / 200
    torch.testing.assert_close(shares, processed(logits, SamplingParams()).softmax(-1)[0], atol=0.01, rtol=0)


@pytest.mark.parametrize("ends", [True, False])
def test_the_tables_of_rows_are_advanced_as_the_twin_does(kernels, ends):
    """A row that runs, one that has ended, one that ends by its limit, one by its token, and one that marks its token."""
    from kernel_twins import _draw_into

    logits, results = torch.randn(4, 40), []
    logits[3, 7] = 50.0
    for run in (kernels.draw_into, None):
        seen = torch.zeros(4, 40, dtype=torch.bool)
        is_eos = torch.zeros(40, dtype=torch.bool)
        is_eos[7] = True
        tables = {
            "token": torch.tensor([1, 2, 3, 4]),
            "position": torch.tensor([10, 11, 12, 13]),
            "written": torch.tensor([0, 3, 4, 2]),
            "limit": torch.tensor([5, 5, 5, 5]),
            "output_row": torch.tensor([2, 0, 1, 3]),
            "live": torch.tensor([True, False, True, True]),
            "stopped": torch.tensor([False, True, False, False]),
            "first": torch.tensor([0, 2**30, 1, 2], dtype=torch.int32),
            "is_eos": is_eos,
            "tokens": torch.zeros(5, 5, dtype=torch.int64),
            "logprobs": torch.zeros(5, 5),
            "uniforms": torch.rand(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
            "never": 2**30,
            "ends": ends,
        }
        options = kernel_options(SamplingParams(repetition_penalty=1.1))
        if run:
            run(kernels.RowState(**tables), logits, seen=seen, **options)
        else:
            _draw_into(tables, logits, seen=seen, **options)
        results.append(tables | {"seen": seen})
    for name, value in results[1].items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(results[0][name], value, msg=name)
    assert results[0]["live"].tolist() == ([True, False, False, False] if ends else [True, False, True, True])
