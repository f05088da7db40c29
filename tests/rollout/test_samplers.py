"""What every sampler promises, whichever engine is inside."""

from collections import deque
from functools import partial

import pytest
import torch
from causal_classes import build
from plain_sampling import TEXTS, collect, favour, ids_of, plain_logprobs
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from covey.errors import ConfigError, DataError, ModelError, NumericsError
from covey.rollout import NativeSampler, SamplingParams, TransformersSampler
from covey.rollout.agreement import plain_logprobs as forwarded
from covey.rollout.calls import SampledScheduler, SeeingScheduler
from covey.rollout.live import LiveRequest
from covey.types import Prompt
from kit import prompt, rest_nightly, tiny_model, tiny_tokenizer

SAMPLERS = {"transformers": TransformersSampler, "native": partial(NativeSampler, dtype="float32")}


@pytest.fixture(params=SAMPLERS)
def new_sampler(request):
    return SAMPLERS[request.param]


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("arch", rest_nightly(["gemma2", "gpt2", "qwen2", "qwen3", "llama", "mistral"], 1))
def test_greedy_equals_generate_token_for_token(new_sampler, tokenizer, arch):
    model = tiny_model(arch, layers=2, seed=1)
    groups = collect(new_sampler(model, tokenizer), TEXTS, 1, SamplingParams(max_tokens=24, temperature=0))
    for group in groups:
        ids = torch.tensor([group.prompt.token_ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert group.completions[0].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "options",
    rest_nightly(
        [
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
            {},
            {"temperature": 1.7, "top_p": 0.7},
            {"temperature": 0.6},
            {"top_k": 7},
            {"min_p": 0.3},
            {"repetition_penalty": 1.5},
        ],
        1,
    ),
    ids=lambda options: "+".join(options) or "plain",
)
def test_log_probabilities_equal_a_plain_forward(new_sampler, tokenizer, options):
    model = tiny_model(layers=2, seed=2)
    params = SamplingParams(max_tokens=20, seed=4, **options)
    for group in new_sampler(model, tokenizer).sample(TEXTS[:2], 3, params):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_completions_do_not_depend_on_neighbours_or_order(new_sampler, tokenizer):
    model = tiny_model(layers=2, seed=3)
    params = SamplingParams(max_tokens=16, seed=7)
    prompts = [prompt(text, uid=f"0:{i}", tokenizer=tokenizer) for i, text in enumerate(TEXTS)]
    together = ids_of(collect(new_sampler(model, tokenizer), prompts, 4, params))
    backwards = ids_of(collect(new_sampler(model, tokenizer), prompts[::-1], 4, params))
    alone = [ids_of(collect(new_sampler(model, tokenizer), [p], 4, params))[0] for p in prompts]
    fewer = ids_of(collect(new_sampler(model, tokenizer), prompts, 2, params))
    assert together == backwards == alone
    assert fewer == [group[:2] for group in together]
    assert len({tuple(ids) for group in together for ids in group}) > 12


@pytest.mark.nightly
def test_a_small_batch_gives_the_same_completions_as_a_large_one(tokenizer):
    model = tiny_model(seed=3)
    params = SamplingParams(max_tokens=16, seed=7)
    expected = ids_of(TransformersSampler(model, tokenizer).sample(TEXTS, 4, params))
    for limit in (1, 3, 9):
        sampler = TransformersSampler(model, tokenizer, max_rows=limit)
        assert ids_of(sampler.sample(TEXTS, 4, params)) == expected


def test_another_seed_gives_other_completions_and_torchs_seed_decides_without_one(new_sampler, tokenizer):
    sampler = new_sampler(tiny_model(), tokenizer)
    one = ids_of(sampler.sample(TEXTS[:1], 2, SamplingParams(max_tokens=8, seed=1)))
    two = ids_of(sampler.sample(TEXTS[:1], 2, SamplingParams(max_tokens=8, seed=2)))
    torch.manual_seed(5)
    free = ids_of(sampler.sample(TEXTS[:1], 2, SamplingParams(max_tokens=8)))
    again = ids_of(sampler.sample(TEXTS[:1], 2, SamplingParams(max_tokens=8)))
    torch.manual_seed(5)
    assert free == ids_of(sampler.sample(TEXTS[:1], 2, SamplingParams(max_tokens=8)))
    assert one != two
    assert free != again


def test_the_same_prompt_twice_gives_two_different_groups(new_sampler, tokenizer):
    twice = prompt("2 + 2 =", uid="0:1", tokenizer=tokenizer)
    first, second = new_sampler(tiny_model(), tokenizer).sample([twice, twice], 2, SamplingParams(max_tokens=8, seed=1))
    assert ids_of([first]) != ids_of([second])


def test_text_messages_and_token_ids_are_prompts(new_sampler, tokenizer):
    text, message = "2 + 2 =", {"role": "user", "content": "2 + 2 ="}
    chat = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    sampler = new_sampler(tiny_model(), tokenizer)
    groups = collect(sampler, [text, [message], tokenizer(text)["input_ids"]], 1, SamplingParams(max_tokens=2))
    plain = tuple(tokenizer(text)["input_ids"])
    assert [group.prompt.token_ids for group in groups] == [plain, tuple(chat), plain]
    assert groups[1].prompt.messages == (message,)


def recompute(model):
    """Turn activation checkpointing on; transformers 5.23 renamed it."""
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")()


def test_each_of_several_eos_ids_ends_a_completion_and_stays_in_it(new_sampler, tokenizer):
    model = favour(tiny_model(), [5, 6, 7])
    sampler = new_sampler(model, tokenizer, eos_ids=[6, 7])
    (group,) = sampler.sample(["a"], 40, SamplingParams(max_tokens=50, seed=0))
    last = {completion.token_ids[-1].item() for completion in group.completions}
    assert last == {6, 7}
    for completion in group.completions:
        assert completion.finish == "stop"
        assert completion.token_ids[:-1].tolist() == [5] * (completion.num_tokens - 1)
        assert completion.logprobs.shape == completion.token_ids.shape


def test_a_pad_token_that_is_the_eos_token_is_no_trouble(new_sampler):
    tokenizer = tiny_tokenizer(pad=False)
    tokenizer.pad_token = tokenizer.eos_token
    model = favour(tiny_model(), [5, tokenizer.eos_token_id])
    (group,) = new_sampler(model, tokenizer).sample(["a"], 30, SamplingParams(max_tokens=40, seed=0))
    for completion in group.completions:
        assert completion.token_ids.tolist().count(tokenizer.eos_token_id) == 1
        assert completion.token_ids[-1] == tokenizer.eos_token_id


def test_a_completion_at_its_limit_was_cut(new_sampler, tokenizer):
    (group,) = new_sampler(favour(tiny_model(), [5]), tokenizer).sample(["a"], 2, SamplingParams(max_tokens=6))
    assert [(c.num_tokens, c.finish) for c in group.completions] == [(6, "length")] * 2


def test_the_models_context_cuts_each_completion_where_its_prompt_leaves_no_room(new_sampler, tokenizer):
    model = favour(tiny_model(max_position_embeddings=12), [5])
    sampler = new_sampler(model, tokenizer)
    short, long = collect(sampler, [list(range(10, 13)), list(range(10, 20))], 2, SamplingParams(max_tokens=50))
    assert {c.num_tokens for c in short.completions} == {9}
    assert {c.num_tokens for c in long.completions} == {2}
    assert all(c.is_truncated for group in (short, long) for c in group.completions)


def test_a_stop_string_ends_a_completion_even_across_tokens(new_sampler, tokenizer):
    x, y = tokenizer("x")["input_ids"][0], tokenizer("y")["input_ids"][0]
    model = favour(tiny_model(), [x, y])
    (group,) = new_sampler(model, tokenizer).sample(["a"], 20, SamplingParams(max_tokens=60, seed=0, stop=("xyx",)))
    for completion in group.completions:
        assert completion.text.endswith("xyx")
        assert completion.text.count("xyx") == 1
        assert completion.finish == "stop"


def test_a_stop_string_beyond_ascii_is_found(new_sampler, tokenizer):
    bytes_of_it = tokenizer("é")["input_ids"]
    assert len(bytes_of_it) == 2
    model = favour(tiny_model(), bytes_of_it)
    (group,) = new_sampler(model, tokenizer).sample(["a"], 10, SamplingParams(max_tokens=60, seed=0, stop=("é",)))
    assert all(completion.text.endswith("é") for completion in group.completions)


def test_tokens_are_never_encoded_again(new_sampler, tokenizer):
    """The ids of a completion may be a spelling that the tokenizer would not choose; they are kept as drawn."""
    model = favour(tiny_model(), [tokenizer(c)["input_ids"][0] for c in "apples "])
    (group,) = new_sampler(model, tokenizer).sample(["a"], 8, SamplingParams(max_tokens=60, seed=0))
    again = [tokenizer(completion.text)["input_ids"] for completion in group.completions]
    drawn = [completion.token_ids.tolist() for completion in group.completions]
    assert again != drawn
    assert [tokenizer.decode(ids) for ids in drawn] == [completion.text for completion in group.completions]


def test_the_text_has_no_special_tokens_and_the_ids_keep_them(new_sampler, tokenizer):
    model = favour(tiny_model(), [tokenizer.eos_token_id])
    (group,) = new_sampler(model, tokenizer).sample(["a"], 1, SamplingParams(max_tokens=4))
    assert group.completions[0].text == ""
    assert group.completions[0].token_ids.tolist() == [tokenizer.eos_token_id]


def test_the_model_is_given_back_as_it_was(new_sampler, tokenizer):
    model = tiny_model(layers=2, attention_dropout=0.5)
    model.train()
    model.model.layers[1].eval()
    recompute(model)
    modes = [module.training for module in model.modules()]
    grouped = new_sampler(model, tokenizer).sample(["a", "b"], 2, SamplingParams(max_tokens=4, seed=1))
    next(grouped)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    list(grouped)
    assert [module.training for module in model.modules()] == modes
    loss = model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert model.config._attn_implementation == "sdpa"


def test_dropout_is_off_and_checkpointing_does_not_matter_while_sampling(new_sampler, tokenizer):
    params = SamplingParams(max_tokens=10, seed=1)
    calm = tiny_model(layers=2, seed=4)
    wild = tiny_model(layers=2, seed=4, attention_dropout=0.5)
    wild.train()
    recompute(wild)
    expected = ids_of(collect(new_sampler(calm, tokenizer), TEXTS, 2, params))
    assert ids_of(collect(new_sampler(wild, tokenizer), TEXTS, 2, params)) == expected


def test_an_interrupt_leaves_the_model_in_its_mode(new_sampler, tokenizer):
    model = tiny_model()
    model.train()
    calls = []

    def interrupt(*args):
        if calls.append(None) or len(calls) > 20:
            raise KeyboardInterrupt

    handle = model.model.layers[0].register_forward_hook(interrupt)
    sampler = new_sampler(model, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        list(sampler.sample(["a"], 2, SamplingParams(max_tokens=40, seed=1)))
    handle.remove()
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert len(list(sampler.sample(["a"], 2, SamplingParams(max_tokens=4)))) == 1


def test_weights_changed_in_place_are_used_after_load(new_sampler, tokenizer):
    model = favour(tiny_model(), [5])
    sampler = new_sampler(model, tokenizer)
    before = next(iter(sampler.sample(["a"], 1, SamplingParams(max_tokens=2))))
    with torch.no_grad():
        model.lm_head.bias[5], model.lm_head.bias[9] = 0.0, 40.0
    sampler.load(model, version=3)
    after = next(iter(sampler.sample(["a"], 1, SamplingParams(max_tokens=2))))
    assert (before.completions[0].token_ids.tolist(), before.completions[0].version) == ([5, 5], 0)
    assert (after.completions[0].token_ids.tolist(), after.completions[0].version) == ([9, 9], 3)


def test_an_adapter_is_active_while_sampling_and_stays_unmerged(new_sampler, tokenizer):
    peft = pytest.importorskip("peft")
    base = tiny_model(layers=2, seed=5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    params = SamplingParams(max_tokens=12, seed=2)
    for group in new_sampler(model, tokenizer).sample(TEXTS[:2], 2, params):
        for completion, expected in zip(group.completions, plain_logprobs(model, group, params), strict=True):
            torch.testing.assert_close(completion.logprobs, expected, atol=1e-4, rtol=0)
    assert not any(module.merged for module in model.modules() if hasattr(module, "merged"))


def test_an_adapter_of_virtual_tokens_is_refused(new_sampler, tokenizer):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ModelError, match="rompt-learning adapters put virtual tokens before the prompt; use LoRA"):
        new_sampler(model, tokenizer)


def test_a_prompt_without_room_or_without_tokens_is_refused_before_any_work(new_sampler, tokenizer):
    sampler = new_sampler(tiny_model(max_position_embeddings=8), tokenizer)
    with pytest.raises(DataError, match="prompt 1 has 8 tokens and the model's context 8"):
        sampler.sample(["a", [5] * 8], 1, SamplingParams())
    with pytest.raises(DataError, match="prompt 0 has no tokens"):
        sampler.sample([""], 1, SamplingParams())
    with pytest.raises(DataError, match="put the single one in a list"):
        sampler.sample("a", 1, SamplingParams())
    with pytest.raises(ConfigError, match="n is 0"):
        sampler.sample(["a"], 0, SamplingParams())


def test_an_eos_id_beyond_the_vocabulary_is_refused(new_sampler, tokenizer):
    with pytest.raises(ModelError, match="99999 is not in the model's vocabulary"):
        new_sampler(tiny_model(), tokenizer, eos_ids=[99999])


def test_logits_that_are_not_finite_are_told_in_a_sentence(new_sampler, tokenizer):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NumericsError, match="not finite"):
        list(new_sampler(model, tokenizer).sample(["a"], 2, SamplingParams(max_tokens=3)))


def test_what_a_batch_computes_beyond_a_completions_end_is_no_error(new_sampler, tokenizer):
    model, own = tiny_model(), tokenizer("a")["input_ids"]
    enders = [token for token in range(1, model.config.vocab_size, 16) if token not in own]

    def broken_after_enders(module, args, kwargs, output):
        output.logits[torch.isin(kwargs["input_ids"][:, -1], torch.tensor(enders))] = torch.nan

    model.register_forward_hook(broken_after_enders, with_kwargs=True)
    groups = collect(new_sampler(model, tokenizer, eos_ids=enders), ["a"], 16, SamplingParams(max_tokens=12))
    completions = groups[0].completions
    assert len({completion.num_tokens for completion in completions}) > 2
    assert all(completion.logprobs.isfinite().all() for completion in completions)


def test_no_prompts_give_no_groups(new_sampler, tokenizer):
    assert list(new_sampler(tiny_model(), tokenizer).sample([], 2, SamplingParams())) == []


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"max_tokens": 3.5}, {"top_k": None}, {"seed": "1"}, {"stop": 3}, {"stop": [1]}]
)
def test_a_value_of_another_type_is_named_in_a_sentence(wrong):
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name} is "):
        SamplingParams(**wrong)


def test_padding_does_not_enter_keys_that_are_compressed_in_blocks():
    """DeepSeek V4 beyond the 128 tokens of a block."""
    sampler = TransformersSampler(build("deepseek_v4"), tiny_tokenizer(), eos_ids=[2], dtype="float32")
    prompts = [Prompt(uid=str(n), token_ids=tuple(5 + 7 * i % 300 for i in range(n))) for n in (9, 130)]
    groups = collect(sampler, prompts, 2, SamplingParams(max_tokens=8, seed=1))
    drawn = [completion for group in groups for completion in group.completions]
    for completion, expected in zip(drawn, forwarded(sampler.model, groups), strict=True):
        torch.testing.assert_close(completion.logprobs, expected, atol=1e-5, rtol=0)


def test_a_finished_row_at_the_end_of_the_context_has_no_position_beyond_it(tokenizer):
    """Learned positions end there, and such rows stay in a batch until a fifth of it has finished."""
    model = tiny_model("gpt2", max_position_embeddings=32)
    long, *short = [Prompt(uid=f"0:{i}", token_ids=tuple(range(3, n))) for i, n in enumerate([31, *[6] * 9])]
    params = SamplingParams(max_tokens=29, seed=3)
    near = {one.prompt.uid: one for one in TransformersSampler(model, tokenizer).sample([long, *short], 1, params)}
    for group in NativeSampler(model, tokenizer, dtype="float32").sample([long, *short], 1, params):
        expected = group.completions[0].token_ids.tolist()
        assert near[group.prompt.uid].completions[0].token_ids.tolist() == expected


def test_a_stop_string_that_ends_with_a_space_is_seen_in_the_token_behind_it(new_sampler):
    """Decoders of SentencePiece strip the space of a single token."""
    words = {"<unk>": 0, "</s>": 1, "Q": 2, ":": 3, "\u2581the": 4} | {f"t{i}": i for i in range(5, 320)}
    core = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    sampler, params = new_sampler(favour(tiny_model(), [3, 4]), tokenizer), SamplingParams(seed=0, stop=(": ",))
    (group,) = sampler.sample([[2, 2]], 6, params)
    for completion in group.completions:
        assert completion.token_ids[-2:].tolist() == [3, 4]
        assert (completion.finish, completion.text.count(": ")) == ("stop", 1)


def test_requests_with_one_seed_have_their_own_answers(tokenizer):
    """Two clients that send the same seed with different prompts."""
    sampler = TransformersSampler(tiny_model(), tokenizer)
    scheduler, params = SampledScheduler(sampler), SamplingParams(max_tokens=1)
    requests = [LiveRequest(Prompt(uid="0", token_ids=ids), (7,), 4, params=params) for ids in ((5, 6), (9, 10, 11))]
    for request in requests:
        scheduler.add(request)
    answers = {}
    while scheduler.is_busy:
        answers |= dict(scheduler.step())
    for request in requests:
        alone = Prompt(uid="7", token_ids=request.prompt.token_ids)
        (group,) = sampler.sample([alone], 1, SamplingParams(max_tokens=4, seed=0))
        assert answers[request].prompt is request.prompt
        assert answers[request].completions[0].token_ids.tolist() == group.completions[0].token_ids.tolist()


def test_requests_that_wait_are_counted_while_another_thread_changes_them(tokenizer):
    class Changing(deque):
        def __iter__(self):
            raise RuntimeError("deque mutated during iteration")

    scheduler = SeeingScheduler(NativeSampler(tiny_model(), tokenizer, dtype="float32"))
    scheduler.live.requests, scheduler.sampled.requests = Changing([1]), Changing([2, 3])
    assert len(scheduler.requests) == 3
