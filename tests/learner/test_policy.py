"""A policy's log-probabilities are those of a plain forward pass, one row at a time, for every kind of model."""

import pytest
import torch

from covey.learner.packing import Row, microbatches, pad_rows
from covey.learner.policy import Policy
from covey.types import Completion, Prompt
from kit import tiny_model


def row(prompt, completion, group=0):
    ids = torch.tensor(completion)
    return Row(
        prompt=Prompt(uid=f"0:{group}", token_ids=tuple(prompt), text=""),
        completion=Completion(token_ids=ids, text="", finish="stop"),
        group=group,
        advantage=torch.zeros(()),
        counts=torch.ones(len(ids), dtype=torch.bool),
    )


ROWS = [row([5, 6, 7, 8], [9, 10, 11], 0), row([12, 13], [14], 1), row([15, 16, 17], [18, 19, 20, 21, 22], 2)]


def plain_logp(model, one, temperature):
    ids = torch.tensor([[*one.prompt.token_ids, *one.completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float() / temperature
    start = len(one.prompt.token_ids)
    logp = torch.log_softmax(logits, -1)[start - 1 : -1]
    return logp.gather(-1, one.completion.token_ids[:, None]).squeeze(-1)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_padded_batch_equals_one_row_at_a_time(architecture, temperature):
    model = tiny_model(architecture).eval()
    policy = Policy(model, pad_id=0, temperature=temperature, logits_chunk=2)
    measured = policy.measure(ROWS, entropy=True)
    assert policy._splits(), "decoder and head can be called apart for this model"
    for i, one in enumerate(ROWS):
        got = measured.logp[i, : one.completion.num_tokens]
        torch.testing.assert_close(got, plain_logp(model, one, temperature), rtol=1e-4, atol=1e-5)
        assert (measured.logp[i, one.completion.num_tokens :] == 0).all()


def test_a_model_that_scales_its_logits_in_its_own_way_is_measured_whole(caplog):
    model = tiny_model("llama").eval()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = scaled
    policy = Policy(model, pad_id=0)
    measured = policy.measure(ROWS)
    torch.testing.assert_close(measured.logp[0, :3], plain_logp(model, ROWS[0], 1.0), rtol=1e-4, atol=1e-5)
    assert "whole logits" in caplog.text


def test_gradients_reach_every_parameter_and_ignore_padding():
    model = tiny_model("qwen2").eval()

    def gradients(batches):
        model.zero_grad()
        for batch in batches:
            Policy(model, pad_id=0).measure(batch).logp.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    together, apart = gradients([ROWS]), gradients([[one] for one in ROWS])
    for name in together:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-5)


def test_microbatches_hold_every_row_once_and_respect_both_limits():
    batches = microbatches(ROWS, max_rows=2, max_tokens=8)
    assert sorted(id(one) for batch in batches for one in batch) == sorted(id(one) for one in ROWS)
    assert all(len(batch) <= 2 for batch in batches)
    assert all(len(batch) == 1 or len(batch) * max(one.num_tokens for one in batch) <= 8 for batch in batches)
    assert batches[0][0].num_tokens == 8, "longest first, so that what cannot fit fails at once"


def sizes(batches):
    """(group, rows of it) of each batch, in order."""
    return [
        [(i, sum(one.group == i for one in batch)) for i in dict.fromkeys(o.group for o in batch)] for batch in batches
    ]


def groups_of_rows(*shapes):
    """For each (prompt tokens, completion tokens): a group of four."""
    return [
        row(list(range(1, 1 + prompt)), [2] * length, group=i)
        for i, (prompt, length) in enumerate(shapes)
        for _ in range(4)
    ]


def test_groups_are_joined_until_a_batch_has_enough():
    rows = groups_of_rows((4, 3), (4, 3), (4, 3))  # 16 tokens each, their prompt counted once
    whole = {"max_rows": 99, "max_tokens": 99, "shares_prompts": True}
    assert sizes(microbatches(rows, **whole)) == [[(0, 4), (1, 4), (2, 4)]]
    assert sizes(microbatches(rows, **whole, enough_tokens=32)) == [[(0, 4), (2, 4)], [(1, 4)]]


def test_a_group_that_is_more_than_enough_is_kept_together_so_that_its_prompt_is_computed_once():
    rows = groups_of_rows((20, 6), (20, 6))  # 40 tokens each
    given = {"max_rows": 99, "enough_tokens": 30, "shares_prompts": True}
    assert sizes(microbatches(rows, **given, max_tokens=50)) == [[(0, 4)], [(1, 4)]]
    assert sizes(microbatches(rows, **given, max_tokens=None)) == [[(0, 4)], [(1, 4)]]
    assert sizes(microbatches(rows, **given, max_tokens=39)) == [[(0, 3)], [(0, 1)], [(1, 3)], [(1, 1)]], (
        "but not beyond what fits"
    )
    assert sizes(microbatches(rows, **given | {"enough_tokens": None}, max_tokens=30)) == [
        [(0, 2)],
        [(0, 2)],
        [(1, 2)],
        [(1, 2)],
    ]


def test_a_shared_prompt_is_computed_once_where_that_takes_no_more_batches():
    rows = groups_of_rows((8, 8), (8, 7), (8, 6), (8, 4))  # 36, 32, 28 and 20 tokens
    given = {"max_rows": 99, "shares_prompts": True}
    assert sizes(microbatches(rows, **given, max_tokens=60)) == [[(1, 4), (2, 4)], [(0, 4), (3, 4)]]
    assert sizes(microbatches(rows, **given | {"max_rows": 7}, max_tokens=60)) == [
        [(0, 4), (1, 2)],
        [(1, 2), (2, 4), (3, 1)],
        [(3, 3)],
    ], "whole groups would take one more"


def test_rows_that_share_no_prompt_are_padded_with_those_of_their_length():
    rows = groups_of_rows((8, 9), (8, 2), (8, 8), (8, 1))
    assert sizes(microbatches(rows, max_rows=8)) == [[(0, 4), (2, 4)], [(1, 4), (3, 4)]]


def test_the_first_completion_token_is_predicted_by_the_prompts_last():
    padded = pad_rows(ROWS, pad_id=0, device=torch.device("cpu"))
    flat = padded.input_ids.flatten()
    assert flat[padded.source[0]] == 8
    assert padded.target[0] == 9
