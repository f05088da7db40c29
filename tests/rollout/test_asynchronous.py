"""The asynchronous sampler and its process: the native sampler's groups, new weights between tokens, a dead worker replaced."""

import copy
import pickle
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat

import pytest
import torch

from covey.errors import ModelError
from covey.process.world import World
from covey.rollout import NativeSampler, SamplingParams, worker_process
from covey.rollout.asynchronous import AsynchronousSampler, with_columns
from covey.rollout.central import CentralSampler
from covey.rollout.live import LiveRequest, LiveScheduler
from covey.rollout.model_copies import packed, unpacked
from covey.rollout.on_ray import Queues
from covey.rollout.worker import Call, Cancelled, Order, Served, Setup, Writer
from covey.rollout.worker_process import ProcessWorker, decoded
from covey.runs import serialization
from covey.training.build_sampler import worker_devices
from covey.types import Completion, Group, Prompt
from forked import worker_of
from kit import tiny_model, tiny_tokenizer

PARAMS = SamplingParams(max_tokens=24, seed=5)
SETUP = Setup(options={"dtype": "float32"}, device="cpu", threads=1, in_flight=True)


def prompts(n: int = 3) -> list[Prompt]:
    encode = tiny_tokenizer()
    return [
        Prompt(uid=f"0:{i}", token_ids=tuple(encode(f"{i} + {i} =")["input_ids"]), columns={"answer": i})
        for i in range(n)
    ]


def content(groups: Iterator[Group]) -> dict[str, list[tuple[list[int], list[float]]]]:
    return {
        group.prompt.uid: [(one.token_ids.tolist(), one.logprobs.tolist()) for one in group.completions]
        for group in groups
    }


def moved(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model()


def asynchronous(model: torch.nn.Module, workers: int = 1) -> AsynchronousSampler:
    start = lambda model, content, version, tell, place: ProcessWorker(model, content, version, SETUP, tell)
    return AsynchronousSampler(model, tiny_tokenizer(), start, workers)


@pytest.mark.slow
def test_a_process_writes_what_the_native_sampler_writes_after_new_weights_a_kill_and_a_checkpoint(
    model, monkeypatch
) -> None:
    """The first process begins as in a run; those after it are forked, so that they import nothing."""
    starts = chain([worker_process._start], repeat(worker_of("covey.rollout.worker")))
    monkeypatch.setattr(worker_process, "_start", lambda theirs: next(starts)(theirs))
    near, far = NativeSampler(model, tiny_tokenizer(), dtype="float32"), asynchronous(model)
    try:
        assert content(far.sample(prompts(), 4, PARAMS)) == content(near.sample(prompts(), 4, PARAMS))
        first = content(near.sample(prompts(), 4, PARAMS))
        moved(model, seed=1)
        near.load(model, 1)
        far.load(model, 1)
        groups = list(far.sample(prompts(), 4, PARAMS))
        assert content(groups) == content(near.sample(prompts(), 4, PARAMS)) != first
        assert {one.version for group in groups for one in group.completions} == {1}
        assert all(group.prompt.columns for group in groups), "the columns stay with the run"

        far._workers[0].process.kill()
        far.order(prompts(), 4, PARAMS, at_least=1)
        far.finish()
        assert far.replaced == 1
        saved = far.state_dict()
        saved["orders"][0]["groups"] = saved["orders"][0]["groups"][:1]  # as if the others had not arrived
        far.load_state_dict(saved)
        assert not far._workers
        assert content(far.sample(prompts(), 4, PARAMS)) == content(near.sample(prompts(), 4, PARAMS))
        assert far.forget_first() == 0
        assert not far.orders
    finally:
        far.close()


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ("unreadable", "cannot be read (UnpicklingError"),
        ("unknown", "cannot be read (TypeError"),
        ("unwritable", "cannot be written to ("),
        ("parted", "ended while it started (exit code -9)"),
    ],
)
def test_a_learner_does_not_wait_for_a_process_that_lives_and_is_not_heard(model, monkeypatch, event, expected) -> None:
    ends, told = [], queue.SimpleQueue()
    living = lambda theirs: ends.append(theirs) or subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(worker_process, "_start", living)
    monkeypatch.setattr(worker_process, "_END_SECONDS", 0.1)
    options = {"hook": lambda: None} if event == "unwritable" else {}
    worker = ProcessWorker(model, b"", 0, replace(SETUP, options=options), told.put)
    try:
        if event == "parted":
            ends[0].close()
        elif event != "unwritable":
            ends[0].send(("group", 0, b"no pickle" if event == "unreadable" else pickle.dumps(Order)[:-1] + b")R."))
        kind, error = told.get(timeout=20)
        assert kind == "failed"
        assert expected in str(error)
    finally:
        worker.close()


def test_completions_go_on_under_new_weights_and_say_which_wrote_each_token(model) -> None:
    tokens = 0
    later = copy.deepcopy(model)
    moved(later, seed=2)

    def between_tokens() -> None:
        nonlocal tokens
        tokens += 1
        if tokens == 4:  # three tokens are written
            model.load_state_dict(later.state_dict())
            sampler.change_weights(8)

    before = copy.deepcopy(model)
    sampler = NativeSampler(model, tiny_tokenizer(), dtype="float32", check_stop=between_tokens)
    sampler.load(model, 7)
    (group,) = sampler.sample(prompts(1), 4, PARAMS)
    (old,) = NativeSampler(before, tiny_tokenizer(), dtype="float32").sample(prompts(1), 4, PARAMS)
    for one, was in zip(group.completions, old.completions, strict=True):
        assert one.token_ids[:3].tolist() == was.token_ids[:3].tolist()
        assert one.version == 7
        if one.num_tokens > 3:
            assert one.versions == ((3, 8),)
            assert one.token_versions.tolist() == [7] * 3 + [8] * (one.num_tokens - 3)
    assert any(one.num_tokens > 3 for one in group.completions)
    assert content([group]) != content([old])


def test_hooks_of_gradient_checkpointing_stay_behind() -> None:
    model = tiny_model()
    model.enable_input_require_grads()
    copied, _ = unpacked(packed(model, tiny_tokenizer()), "cpu")
    assert not any(module._forward_hooks for module in copied.modules())
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(copied(ids).logits, model.eval()(ids).logits)


def test_a_users_hook_that_would_stay_behind_is_refused() -> None:
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ModelError, match=r"lm_head has the forward hook .*<lambda>.* leave async_rollouts out"):
        packed(model, tiny_tokenizer())


class Slow:
    """A worker that takes what it was published a moment later."""

    def __init__(self, tell) -> None:
        self.tell, self.is_free, self.published = tell, True, []

    def publish(self, version: int) -> bool:
        if not self.is_free:
            return False
        self.is_free = False
        self.published.append(version)
        threading.Timer(0.02, self.take, [version]).start()
        return True

    def take(self, version: int) -> None:
        self.is_free = True
        self.tell(("took", version, 0.0))

    def send(self, order: Order) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_weights_of_an_order_are_published_before_the_next_ones_where_runs_repeat(model) -> None:
    workers = []

    def start(model, content, version, tell, place) -> Slow:
        workers.append(Slow(tell))
        return workers[0]

    far = AsynchronousSampler(model, tiny_tokenizer(), start, takes_newest=False)
    far.order(prompts(1), 4, PARAMS, at_least=0)
    for version in (1, 2):
        far.load(model, version)  # the second while the worker still takes the first
    far.order(prompts(2), 4, PARAMS, at_least=2)
    assert workers[0].published == [1, 2], "the learner's next update would be the third"


def test_a_worker_without_a_share_of_an_order_is_not_waited_for(model) -> None:
    class Asleep(Slow):
        def publish(self, version: int) -> bool:
            is_free, self.is_free = self.is_free, False
            return is_free

        def send(self, order: Order) -> None:
            self.is_free = True

    def check_stop() -> None:
        polls.append(0)
        assert len(polls) < 4, "it waits for weights that nobody takes"

    polls: list[int] = []
    start = lambda model, content, version, tell, place: Asleep(tell)
    far = AsynchronousSampler(model, tiny_tokenizer(), start, 2, check_stop, takes_newest=False)
    far.order(prompts(2), 4, PARAMS, at_least=0)
    for version in (1, 2):
        far.load(model, version)
    far.order(prompts(1), 4, PARAMS, at_least=2)


def test_a_checkpoint_holds_episodes_whose_values_can_be_kept(model, tmp_path) -> None:
    """An agent's scores, and no environment."""
    far = AsynchronousSampler(model, tiny_tokenizer(), lambda model, content, version, tell, place: Slow(tell))
    far.order(prompts(), 1, PARAMS, at_least=0)
    (group,) = NativeSampler(model, tiny_tokenizer()).sample(prompts(1), 1, PARAMS)
    for prompt, value in zip(prompts(), (0.5, "north", object()), strict=True):
        done = replace(group.completions[0], columns={"agent_score": value, "role": None})
        far._hear(0, ("group", 0, replace(group, prompt=prompt, completions=(done,))))
    serialization.write(far.state_dict(), tmp_path / "state")
    again = AsynchronousSampler(model, tiny_tokenizer(), far.start)
    again.load_state_dict(serialization.read(tmp_path / "state"))
    (order,) = again.orders.values()
    values = {uid: group.completions[0].columns["agent_score"] for uid, group in order.groups.items()}
    assert values == {"0:0": 0.5, "0:1": "north"}


@pytest.mark.parametrize(("takes_newest", "version"), [(False, 1), (True, 2)])
def test_a_worker_that_is_late_writes_with_the_weights_of_the_order_where_runs_repeat(
    model, takes_newest, version
) -> None:
    """The learner is a step ahead by the time that a slow worker begins."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    waiting = [(1, weights), (2, {name: weight + 0.1 for name, weight in weights.items()})]
    setup = replace(SETUP, in_flight=False, takes_newest=takes_newest)
    writer = Writer(packed(model, tiny_tokenizer()), setup, 0, lambda: waiting.pop(0) if waiting else None)
    writer.take_newest()
    groups = list(writer.write(Order(0, tuple(prompts()), 2, PARAMS, at_least=1)))
    assert {one.version for group in groups for one in group.completions} == {version}


def messages_of(line: Queues, last: str, count: int = 1) -> list[tuple]:
    """Messages up to the given number of messages of this kind."""
    messages: list[tuple] = []
    while sum(one[0] == last for one in messages) < count:
        messages.append(decoded(line.outbox.get(timeout=60)))
    return messages


def serve(line: Queues, model: torch.nn.Module, setup: Setup) -> None:
    """Begin to serve this line, in a thread."""
    served = Served(line, packed(model, tiny_tokenizer()), setup, 0, lambda announced: announced)
    threading.Thread(target=served.serve, daemon=True).start()


@pytest.mark.parametrize(("takes_newest", "version"), [(False, 1), (True, 2)])
def test_an_actor_that_is_late_does_too(model, takes_newest, version) -> None:
    """The line of an actor, in this process."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    line = Queues()
    line.put("message", pickle.dumps(Order(0, tuple(prompts()), 2, PARAMS, at_least=1)))
    line.put("weights", 1, weights)
    line.put("weights", 2, {name: weight + 0.1 for name, weight in weights.items()})
    serve(line, model, replace(SETUP, in_flight=False, takes_newest=takes_newest))
    for number, expected in ((0, version), (1, 2)):
        groups = [one[2] for one in messages_of(line, "done") if one[0] == "group"]
        assert {one.version for group in groups for one in group.completions} == {expected}
        line.put("message", pickle.dumps(Order(number + 1, tuple(prompts()), 2, PARAMS, at_least=2)))


def test_an_order_that_a_thread_sends_late_is_written_by_its_weights(model) -> None:
    """Weights of the learner's next step are there before it: an environment was reset, or the thread had waited."""
    weights = {name: weight + 0.1 for name, weight in model.named_parameters()}
    line, one_token = Queues(), replace(PARAMS, max_tokens=1)
    serve(line, model, replace(SETUP, in_flight=False, takes_newest=False, has_turns=True))
    line.put("weights", 1, weights)
    for number in range(2):
        line.put("message", pickle.dumps(Order(number, tuple(prompts()), 2, one_token, at_least=number)))
        groups = [one[2] for one in messages_of(line, "done") if one[0] == "group"]
        assert {one.version for group in groups for one in group.completions} == {number}


def call(number: int, key: int, limit: int = 24) -> Call:
    return Call(number, LiveRequest(prompts()[number % 3], (key,), limit, params=SamplingParams(max_tokens=1)))


def answers(messages: list[tuple]) -> dict[int, list[int]]:
    return {one[1]: one[2].completions[0].token_ids.tolist() for one in messages if one[0] == "answered"}


def test_calls_are_answered_side_by_side_by_the_weights_of_their_order(model) -> None:
    weights = {name: weight + 0.1 for name, weight in model.named_parameters()}
    alone = LiveScheduler.of(NativeSampler(model, tiny_tokenizer(), dtype="float32"))
    expected = {}
    for number in range(3):
        alone.add(call(number, 7 + number).request)
        while alone.is_busy:
            for _, group in alone.step():
                expected[number] = group.completions[0].token_ids.tolist()
    line = Queues()
    for number in range(3):
        line.put("message", pickle.dumps(call(number, 7 + number)))
    line.put("message", pickle.dumps(call(3, 3)))
    line.put("message", pickle.dumps(Cancelled(3)))
    serve(line, model, replace(SETUP, in_flight=False, takes_newest=False, has_calls=True))
    assert answers(messages_of(line, "answered", 3)) == expected
    line.put("weights", 1, weights)  # of the next rollout: calls of this one go on with theirs
    line.put("message", pickle.dumps(call(0, 7)))
    assert answers(messages_of(line, "answered")) == {0: expected[0]}
    line.put("message", pickle.dumps(Order(0, (), 1, PARAMS, at_least=1)))
    line.put("message", pickle.dumps(call(0, 7)))
    messages = messages_of(line, "answered")
    assert [one[2].completions[0].version for one in messages if one[0] == "answered"] == [1]
    assert answers(messages) != {0: expected[0]}


def test_calls_are_answered_with_fewer_rows_where_memory_runs_out(model, monkeypatch) -> None:
    tried, step = [], LiveScheduler.step

    def scarce(self):
        tried.append(self.max_rows)
        if len(tried) == 3:
            raise torch.OutOfMemoryError
        return step(self)

    writer = Writer(packed(model, tiny_tokenizer()), SETUP, 0, lambda: None)
    expected = dict(writer.answer(deque([call(0, 5), call(1, 6)]), lambda: None))
    monkeypatch.setattr(LiveScheduler, "step", scarce)
    groups = dict(writer.answer(deque([call(0, 5), call(1, 6)]), lambda: None))
    assert tried[3] == tried[2] // 2
    for number, group in expected.items():
        assert group.completions[0].token_ids.tolist() == groups[number].completions[0].token_ids.tolist()


def test_calls_of_several_completions_keep_room_for_them_where_memory_runs_out(model, monkeypatch) -> None:
    tried, step = [], LiveScheduler.step

    def scarce(self):
        tried.append(self.max_rows)
        if len(tried) == 2 or (self.max_rows == 3 and sum(size == 3 for size in tried) > 4):
            raise torch.OutOfMemoryError
        return step(self)

    request = LiveRequest(prompts()[0], (5, 6, 7), 4, params=SamplingParams(max_tokens=1))
    writer = Writer(
        packed(model, tiny_tokenizer()), replace(SETUP, options={**SETUP.options, "max_rows": 5}), 0, lambda: None
    )
    monkeypatch.setattr(LiveScheduler, "step", scarce)
    (answered,) = dict(writer.answer(deque([Call(0, request)]), lambda: None)).values()
    assert len(answered.completions) == 3
    assert set(tried) == {5, 3}
    with pytest.raises(torch.OutOfMemoryError):
        list(writer.answer(deque([Call(0, request)]), lambda: None))


class Echo:
    """A worker that writes the uid of a prompt as its only completion, at once."""

    def __init__(self, tell, place: int) -> None:
        self.tell, self.place = tell, place

    def send(self, order: Order) -> None:
        for prompt in order.prompts:
            completion = Completion(token_ids=torch.tensor([len(prompt.uid)]), text=prompt.uid, finish="stop")
            self.tell(("group", order.number, Group(prompt=prompt, completions=(completion,))))

    def publish(self, version: int) -> bool:
        return True

    def close(self) -> None: ...


def echoing(kind=AsynchronousSampler, workers: int = 2, **options):
    start = lambda model, content, version, tell, place: Echo(tell, place)
    return kind(tiny_model(), tiny_tokenizer(), start, workers, pack=lambda model, tokenizer: b"", **options)


def test_a_prompt_that_is_drawn_twice_gets_two_groups_of_its_own() -> None:
    first, second = prompts(2)
    groups = list(echoing().sample([first, second, first], 1, PARAMS))
    assert sorted(group.completions[0].text for group in groups) == ["0:0", "0:0#1", "0:1"]
    assert sorted(group.prompt.uid for group in groups) == ["0:0", "0:0", "0:1"]
    assert all(group.prompt.columns for group in groups)


class Halves(World):
    """Each of two processes, one after the other, that draw the same texts, whose uids are the same there."""

    def interleave(self, items):
        return [(rank, item[1]) for item in items for rank in (0, 1)]

    def broadcast(self, value):
        if self.rank == 0:
            Halves.sent = value
        return Halves.sent

    def max(self, count):
        return count


def test_a_group_keeps_the_tools_that_its_worker_showed() -> None:
    shown = Prompt(uid="a", token_ids=(1, 2), tools=({"name": "wait"},))
    group = with_columns(Group(prompt=shown, completions=[]), Prompt(uid="a", token_ids=(1,), columns={"answer": 3}))
    assert group.prompt.tools == shown.tools
    assert (group.prompt.token_ids, group.prompt.columns) == ((1, 2), {"answer": 3})


def test_processes_whose_prompts_share_uids_get_groups_of_their_own() -> None:
    written = []
    for rank in (0, 1):
        sampler = echoing(CentralSampler, world=Halves(rank=rank, size=2), collect=lambda policy, version: policy)
        written.append([g.completions[0].text for g in sampler.sample(["a text", "another"], 1, PARAMS)])
    assert written == [["0", "1"], ["0#1", "1#1"]]


@pytest.mark.parametrize(
    ("count", "processes", "expected"), [(4, 1, ["cuda:1", "cuda:2", "cuda:3"]), (4, 4, ["cuda:0"]), (1, 1, ["cuda:0"])]
)
def test_workers_take_the_devices_behind_the_learners_in_turn(count, processes, expected, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert worker_devices(None, torch.device("cuda", 0)) == expected
    assert worker_devices(None, torch.device("cpu")) == ["cpu"]
    assert worker_devices("cpu", torch.device("cuda", 0)) == ["cpu"]
