"""A repeated index adds its gradients in order: equal steps give equal bits with any number of threads."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch
import transformers
from datasets import Dataset
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode

from covey import algorithms as alg
from covey.learner import Policy, ValueModel
from covey.learner.packing import pick_rows, rows_of
from covey.process.ordered_sums import ordered_sums
from covey.rewards.surroundings import Surroundings
from covey.training.teaching import build_supervised
from covey.types import Completion, Group, Prompt
from kit import learner_of, rest_nightly, threads, tiny_model, tiny_tokenizer

HIDDEN, TOKENS = 48, 24
ATOMIC = 32_768
"""Elements from which PyTorch's CPU build adds by atomics."""
CPU = torch.device("cpu")


def experts():
    config = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=HIDDEN, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # experts are left as they were allocated
            parameter.normal_(0, 0.1)
    return model


MODELS = {
    "a shared prompt": lambda: tiny_model("qwen2", hidden=HIDDEN),
    "windows": lambda: tiny_model("mistral", hidden=HIDDEN, sliding_window=8),
    "experts": experts,
    "a critic": lambda: tiny_model("qwen2", hidden=HIDDEN),
    "supervised examples": lambda: tiny_model("gpt2", hidden=HIDDEN),
}
"""A learner's step of each kind."""


def groups(size=16, tokens=TOKENS):
    """Two groups of `size` completions, of which every third is short."""
    draw = torch.Generator().manual_seed(0)
    ids = lambda i: torch.randint(3, 300, (3 if i % 3 == 0 else tokens,), generator=draw)
    return [
        Group(
            prompt=Prompt(uid=f"0:{number}", token_ids=tuple(range(5 + number, 25))),
            completions=tuple(Completion(token_ids=ids(i), text="", finish="stop") for i in range(size)),
            advantages=torch.linspace(-1, 1, size)[:, None].expand(-1, tokens),
            returns=torch.linspace(-1, 1, size)[:, None].expand(-1, tokens),
        )
        for number in range(2)
    ]


def step(kind, drawn):
    """The bits of all weights after one step."""
    model = MODELS[kind]()
    policy, given, algorithm = Policy(model, pad_id=0), {}, alg.dapo()
    if kind == "a critic":
        algorithm, given = alg.ppo(kl=None), {"critic": ValueModel.of(policy)}
        torch.nn.init.normal_(given["critic"].linear.weight, generator=torch.Generator().manual_seed(1))
    if kind == "supervised examples":
        rows = Dataset.from_list([{"prompt": "2 + 2 =", "completion": " 4"}] * 2)
        algorithm = algorithm.replace(regularizers=alg.sft(rows, 0.1, 2))
        given = {"supervised": build_supervised(algorithm, policy, tiny_tokenizer(), (1,), {}, 0)}
    weights = [*policy.parameters(), *(given["critic"].parameters() if kind == "a critic" else [])]
    learner = learner_of(policy, torch.optim.SGD(weights, lr=0.1), max_rows=99, max_completion_length=TOKENS, **given)
    drawn = learner.annotate(drawn, algorithm)
    learner.step(drawn, algorithm, 1)
    return b"".join(weight.detach().numpy().tobytes() for weight in weights)


@pytest.mark.parametrize(
    "kind, count",
    rest_nightly(product(MODELS, (2, 4)), {(kind, 2) for kind in ("a shared prompt", "experts")}),
)
def test_equal_steps_on_several_threads_give_equal_bits(kind, count):
    drawn = groups(size=48)
    assert sum(one.num_tokens for group in drawn for one in group.completions) * HIDDEN > ATOMIC
    with threads(count):
        assert len({step(kind, drawn) for _ in range(6)}) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_has_no_operation_without_a_deterministic_form(kind):
    drawn = groups(size=4)
    plain = step(kind, drawn)
    torch.use_deterministic_algorithms(True)
    try:
        assert step(kind, drawn) == plain
    finally:
        torch.use_deterministic_algorithms(False)


class UnorderedSums(TorchDispatchMode):
    """The operations that add by a repeated index outside of torch's deterministic mode; of any size, on any number of threads."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index_put" in func._schema.name and ((len(args) > 3 and args[3]) or (kwargs or {}).get("accumulate")):
            index = torch.stack(
                [one.flatten() for one in torch.broadcast_tensors(*[i for i in args[1] if i is not None])]
            )
            repeats = index.unique(dim=1).shape[1] < index.shape[1]
            if repeats and not torch.are_deterministic_algorithms_enabled():
                self.seen.append(f"{func} on {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MODELS)
def test_no_gradient_of_a_step_is_summed_in_the_order_of_threads(kind):
    """What a run of tiny models on one thread can show."""
    with UnorderedSums() as sums:
        step(kind, groups(size=4))
    assert sums.seen == []


def test_the_sums_that_are_looked_for_are_seen():
    model = experts()
    with UnorderedSums() as sums:
        Policy(model, pad_id=0).measure(rows_of(groups(size=4))).logp.sum().backward()
    assert sums.seen


def test_picked_rows_sum_their_gradients_in_order():
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(4, 16, 64, generator=draw, requires_grad=True)
    index = torch.randint(0, 64, (2048,), generator=draw)
    gradient = torch.randn(2048, 64, generator=draw)
    expected = torch.zeros(64, 64)
    for row, one in zip(index.tolist(), gradient, strict=True):
        expected[row] += one
    with threads(4):
        for _ in range(8):
            values.grad = None
            picked = pick_rows(values, index)
            picked.backward(gradient)
            assert torch.equal(picked, values.flatten(0, 1)[index])
            assert torch.equal(values.grad.flatten(0, 1), expected)


@pytest.mark.parametrize("mode, fills", [(0, True), (1, False), (2, True)])
def test_the_setting_outside_is_as_it_was(mode, fills):
    before = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode(mode)
    deterministic.fill_uninitialized_memory = fills
    try:
        with ordered_sums.on(CPU), ordered_sums.on(CPU):
            assert torch.get_deterministic_debug_mode() == max(1, mode)
            assert deterministic.fill_uninitialized_memory == (mode > 0 and fills)
        with ordered_sums.on(torch.device("meta")):
            assert torch.get_deterministic_debug_mode() == mode
        assert (torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory) == (mode, fills)
    finally:
        torch.set_deterministic_debug_mode(before[0])
        deterministic.fill_uninitialized_memory = before[1]


def test_a_reward_called_during_a_step_did_not_change_the_setting():
    changed = []

    def reward(around):
        inside = ordered_sums.on(CPU)
        inside.__enter__()
        around.append(Surroundings.now())
        inside.__exit__(None, None, None)
        changed.extend(around[0].put_back())

    other = threading.Thread(target=reward, args=([],))
    other.start()
    other.join()
    assert changed == []
    assert torch.get_deterministic_debug_mode() == 0
