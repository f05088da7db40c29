"""Triton's kernels are compared before a rollout uses them, in each form that it takes: split parts, windows, penalties, tables."""

import pytest
from kernel_twins import with_twins

from covey.errors import Unsupported
from covey.kernels import TritonDecode
from covey.rollout import NativeSampler, SamplingParams
from kit import tiny_model, tiny_tokenizer


def sampler(arch="qwen2", **options):
    model = tiny_model(arch, max_position_embeddings=1024, **options)
    return NativeSampler(model, tiny_tokenizer(), dtype="float32", attention="triton")


def planted(monkeypatch, name, is_met, spoil):
    """A kernel that is wrong where `is_met(arguments)` says so."""
    with_twins(monkeypatch)
    right = getattr(TritonDecode, name)

    def wrong(*args, **options):
        out = right(*args, **options)
        return spoil(out, args, options) if is_met(options) else out

    monkeypatch.setattr(TritonDecode, name, staticmethod(wrong))


def test_right_kernels_are_taken(monkeypatch):
    with_twins(monkeypatch)
    assert sampler().attention == "triton"
    assert sampler("mistral", sliding_window=900).attention == "triton"


@pytest.mark.parametrize("name", ["prompts", "suffix"])
def test_attention_that_is_wrong_for_split_parts_is_refused(monkeypatch, name):
    planted(monkeypatch, "attend", lambda options: options[name].shape[3] >= 512, lambda out, *_: 3 * out)
    with pytest.raises(Unsupported, match="the engine's logits differ"):
        sampler()


def test_attention_that_is_wrong_with_a_window_longer_than_any_prompt_is_refused(monkeypatch):
    planted(monkeypatch, "attend", lambda options: options["suffix_bias"] is not None, lambda out, *_: 3 * out)
    with pytest.raises(Unsupported, match="the engine's logits differ"):
        sampler("mistral", sliding_window=900)


def drawing(sampler, **params):
    """Begin to sample with these parameters, which tries the draw."""
    return sampler.begin(["1 + 1 ="], 2, SamplingParams(max_tokens=4, seed=1, **params))


def unmarked(out, args, options):
    options["seen"].zero_()


def unpenalized(out, args, options):
    args[0]["logprobs"] += 0.1


@pytest.mark.parametrize("spoil", [unpenalized, unmarked])
def test_a_draw_that_is_wrong_with_a_penalty_is_refused_where_one_is_asked_for(monkeypatch, spoil):
    planted(monkeypatch, "draw_into", lambda options: options["seen"] is not None, spoil)
    one = sampler()
    assert drawing(one).draws
    with pytest.raises(Unsupported, match="its draw"):
        drawing(one, repetition_penalty=1.2)


def late(out, args, options):
    args[0]["written"].zero_()


def test_a_draw_that_writes_its_tables_wrongly_is_refused(monkeypatch):
    planted(monkeypatch, "draw_into", lambda options: True, late)
    with pytest.raises(Unsupported, match="tables that its draw advances"):
        drawing(sampler())


def test_where_triton_is_a_choice_a_wrong_draw_leaves_its_attention_and_is_named_once(monkeypatch, caplog):
    planted(monkeypatch, "draw_into", lambda options: True, late)
    one = sampler()
    one.attention_option = "auto"
    assert not drawing(one, top_p=0.9).draws
    assert not drawing(one, top_p=0.8).draws
    assert one.attention == "triton"
    assert caplog.text.count("Tokens are drawn by PyTorch's operations, not by Triton's kernels: the tables") == 1


def test_a_form_of_the_draw_is_tried_once_when_first_asked_for(monkeypatch):
    """Each form is compiled: a run with plain sampling needs one of six."""
    forms = []
    planted(monkeypatch, "draw_into", lambda options: True, lambda out, args, options: forms.append(options))
    one = sampler()
    assert not forms
    for temperature in (1.0, 0.8):
        drawing(one, temperature=temperature)
    assert len(forms) == 1
    drawing(one, top_k=5)
    assert len(forms) == 2
