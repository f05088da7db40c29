"""Distillation: the number and the gradient of the definition over the whole vocabulary, whoever teaches."""

import itertools

import pytest
import torch
from distilled import ROWS, row, trained

from covey import algorithms as alg
from covey.algorithms.composing import NO_TOTALS
from covey.algorithms.samples import made_scores
from covey.data.hints import hints_of, with_hint
from covey.errors import ConfigError
from covey.learner import Policy, Teacher
from covey.learner.logprobs import Head
from covey.learner.signals import Other, compared
from covey.training.teaching import build_teacher
from covey.types import TokenBatch
from kit import group, prompt, rest_nightly, tiny_model, tiny_tokenizer

PARTS = {
    "reverse": alg.Distill("x"),
    "forward": alg.Distill("x", divergence="forward_kl"),
    "jsd": alg.Distill("x", divergence="jsd", beta=0.3),
}


def definition(name, p, q):
    """Straight from probabilities [m, V]."""
    kl = lambda a, b: (a * (a / b).log()).sum(-1)
    if name == "jsd":
        middle = 0.3 * q + 0.7 * p
        return 0.3 * kl(q, middle) + 0.7 * kl(p, middle)
    return kl(p, q) if name == "reverse" else kl(q, p)


def whole(model, one, temperature, prompt=None):
    ids = torch.tensor([[*(prompt or one.prompt.token_ids), *one.completion.token_ids.tolist()]])
    start = len(prompt or one.prompt.token_ids) - 1
    return torch.softmax(model(ids).logits[0, start:-1] / temperature, -1)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("architecture", rest_nightly(["qwen2", "gemma2"], ["gemma2"]))
def test_value_and_gradient_are_those_of_the_definition(name, architecture):
    student, teacher = tiny_model(architecture).eval(), tiny_model("llama", seed=3, hidden=48).eval()
    policy = Policy(student, pad_id=0, temperature=0.7, logits_chunk=2)
    taught = Teacher(Policy(teacher, pad_id=0), PARTS[name].distance)
    measured = policy.measure(ROWS, teacher=taught)
    measured.teacher_distance.sum().backward()
    got = {name: p.grad.clone() for name, p in student.named_parameters()}
    student.zero_grad()
    wanted = [definition(name, whole(student, one, 0.7), whole(teacher, one, 0.7).detach()) for one in ROWS]
    torch.cat(wanted).sum().backward()
    for i, want in enumerate(wanted):
        torch.testing.assert_close(measured.teacher_distance[i, : len(want)], want, rtol=1e-4, atol=1e-6)
    for key, parameter in student.named_parameters():
        torch.testing.assert_close(got[key], parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("name", PARTS)
def test_top_k_counts_the_rest_as_one_outcome_and_is_the_whole_at_the_end(name):
    torch.manual_seed(0)
    logp, q = (torch.log_softmax(3 * torch.randn(5, 12, dtype=torch.float64), -1) for _ in range(2))
    full = PARTS[name].distance(logp, q)
    by_k = [PARTS[name].__class__(**{**vars(PARTS[name]), "top_k": k}).distance(logp, q) for k in range(1, 12)]
    torch.testing.assert_close(by_k[-1], full)  # 11 of 12 told apart, and one left
    for small, large in itertools.pairwise(by_k):
        assert bool((small <= full + 1e-9).all())
        assert bool((small >= -1e-9).all())
        assert bool((small <= large + 1e-9).all())


def test_a_policy_that_is_told_more_teaches_the_one_that_is_not():
    """The teacher's distribution is that of the same weights behind the longer prompt, without gradient."""
    model = tiny_model("qwen2").eval()
    rows = [row(0, [5, 6, 7], [9, 10, 11], "a"), row(0, [5, 6, 7], [15, 16]), row(1, [8, 9], [20, 21], "b")]
    longer = {"a": (5, 6, 7, 30, 31), "b": (8, 9, 40)}
    taught = Teacher(Policy(model, pad_id=0), alg.Distill("x").distance, None, lambda prompt, hint: longer[hint])
    measured = Policy(model, pad_id=0).measure(rows, teacher=taught)
    measured.teacher_distance.sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    wanted = [
        definition("reverse", whole(model, one, 1.0), whole(model, one, 1.0, longer.get(one.hint)).detach())
        for one in rows
    ]
    torch.cat(wanted).sum().backward()
    for i, want in enumerate(wanted):
        torch.testing.assert_close(measured.teacher_distance[i, : len(want)], want, rtol=1e-4, atol=1e-6)
    assert measured.teacher_distance[0].abs().max() > 1e-5
    assert measured.teacher_distance[1].abs().max() < 1e-6
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(got[key], parameter.grad, rtol=1e-3, atol=1e-5)


def test_no_logits_larger_than_a_chunk_exist_for_either_model():
    seen = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim >= 2 and out.shape[-1] in (997, 1000):
                seen.append(out.numel() // out.shape[-1])
            return out

    own, other = torch.nn.Linear(4, 997), torch.nn.Linear(4, 1000)  # the teacher's embedding is padded further
    hidden = torch.randn(64, 4, requires_grad=True)
    with Watched():
        measure = alg.Distill("x", divergence="jsd", top_k=5).distance
        targets = torch.zeros(64, dtype=torch.long)
        compared(
            hidden, Head(own), Other(torch.randn(64, 4), Head(other), measure), targets, chunk=8
        ).distance.sum().backward()
    assert seen
    assert max(seen) <= 8


def test_feedback_comes_from_a_reward_a_column_or_the_best_sibling():
    answers = group(["4", "5", "6"], rewards=[[1.0], [0.0], [1.0]], columns={"solution": "2 + 2 = 4"})
    from dataclasses import replace

    answers = replace(answers, totals=torch.tensor([1.0, 0.0, 1.0]), extras={"said": ["right", "wrong: 5", None]})
    assert hints_of(answers, "solution") == ["2 + 2 = 4"] * 3
    assert hints_of(answers, "said") == ["right", "wrong: 5", None]
    assert hints_of(answers, "best") == [None, "4", None]
    with pytest.raises(ConfigError, match="'advice' is no column here"):
        hints_of(answers, "advice")


def test_a_hint_follows_the_prompt_or_the_users_last_message():
    tokenizer = tiny_tokenizer()
    text = tokenizer.decode(with_hint(prompt("2 + 2 ="), "it is 4", " ({feedback})", tokenizer, {}))
    assert text == "2 + 2 = (it is 4)"
    chat = prompt([{"role": "user", "content": "2 + 2?"}], tokenizer=tokenizer)
    told = tokenizer.decode(with_hint(chat, "it is 4", "\n\n{feedback}", tokenizer, {}))
    assert told.endswith("2 + 2?\n\nit is 4<|im_end|>\n<|im_start|>assistant\n")


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    tokenizer, other = tiny_tokenizer(), tiny_tokenizer()
    other.add_tokens(["<extra>"])
    tokenizer.add_tokens(["<more>"])
    teacher = tiny_model("llama", vocab_size=len(other))
    teacher.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    policy = Policy(tiny_model("qwen2"), pad_id=0)
    algorithm = alg.dapo().replace(regularizers=alg.distill(str(tmp_path)))
    with pytest.raises(
        ConfigError, match=r"another vocabulary: '<more>' is token \d+ of the policy and is unknown there"
    ):
        build_teacher(algorithm, policy, tokenizer, {})
    loaded = tiny_model("llama", vocab_size=999)
    with pytest.raises(ConfigError, match="knows 999 tokens"):
        build_teacher(alg.dapo().replace(regularizers=alg.distill(loaded)), policy, tokenizer, {})


@pytest.mark.parametrize("vocab_size", [None, 999])
def test_a_teachers_folder_without_a_tokenizer_counts_as_the_policys(vocab_size, tmp_path):
    tokenizer = tiny_tokenizer()
    tiny_model("qwen2", vocab_size=vocab_size or len(tokenizer)).save_pretrained(tmp_path)
    policy = Policy(tiny_model("qwen2", vocab_size=len(tokenizer)), pad_id=0)
    algorithm = alg.dapo().replace(regularizers=alg.distill(str(tmp_path)))
    if vocab_size is None:
        assert build_teacher(algorithm, policy, tokenizer, {}).alignment is None
    else:
        with pytest.raises(ConfigError, match="knows 999 tokens"):
            build_teacher(algorithm, policy, tokenizer, {})


@pytest.mark.parametrize(
    "options, said",
    [
        ({"teacher": "policy"}, "nothing to teach without feedback"),
        ({"teacher": "x", "divergence": "reverse_lk"}, "Did you mean.*reverse_kl"),
        ({"teacher": "x", "top_k": 0}, "at least 1"),
        ({"teacher": "x", "divergence": "jsd", "beta": 1.0}, "between 0 and 1"),
        ({"teacher": "x", "template": "more"}, "no {feedback}"),
        ({"teacher": "x", "weight": 0.0}, "above 0"),
        ({"teacher": "policy", "feedback": "solution", "threshold": 0.5}, "for feedback='best'"),
        ({"teacher": "x", "entropy_sensitivity": 1.0}, "takes a teacher with feedback"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        alg.Distill(**options)


def test_a_string_makes_it_with_its_parameters():
    named = alg.from_name("dapo, objective=zero, regularizer=distill(teacher='big, really', divergence='jsd', top_k=8)")
    assert named.regularizers == (alg.Distill("big, really", divergence="jsd", top_k=8),)
    assert named.objective is alg.zero
    assert alg.from_name("grpo, advantage=PKPO(k=2)").advantage == alg.PKPO(2)
    with pytest.raises(ConfigError, match="its parameters are k, baseline"):
        alg.from_name("grpo, advantage=PKPO(size=2)")
    with pytest.raises(ConfigError, match="write parameters as name=value"):
        alg.from_name("grpo, advantage=PKPO(2)")


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "grpo, regularizer=distill(wieght=1)",
            r"it has no parameter wieght; its parameters are teacher, weight, .*top_k.*mean weight\?",
        ),
        (
            "grpo, regularizer=distill(weight=1)",
            "missing a required argument: 'teacher'; its parameters are teacher, weight,",
        ),
        ("grpo, advantage=PKPO(k=2", r"write parameters as name=value"),
        ("grpo(high=0.3)", "write the options of grpo behind commas"),
        ("dapo high=0.3", "write the options of dapo behind commas"),
        ("grpo, critic=nowhere", "is not a built-in critic. Give your own"),
    ],
)
def test_a_name_that_makes_no_algorithm_is_refused_with_what_it_takes(name, message):
    with pytest.raises(ConfigError, match=message):
        alg.from_name(name)


@pytest.mark.parametrize(
    "slot", ["advantage", "objective", "aggregate", "regularizer", "weight", "reference", "teacher"]
)
def test_the_parts_that_a_message_names_are_public(slot):
    with pytest.raises(ConfigError) as caught:
        alg.from_name(f"grpo, {slot}=nowhere")
    named = str(caught.value).partition("Known: ")[2].partition("; or")[0].split(", ")
    assert set(named) < set(alg.__all__)


def test_on_policy_distillation_alone_brings_the_policy_to_its_teacher(tmp_path):
    algorithm = alg.dapo().replace(objective=alg.zero, regularizers=alg.distill(tiny_model("qwen2", seed=7)))
    curve = [entry["distill/reverse_kl"] for entry in trained(tmp_path, algorithm)]
    assert curve[-1] < 0.7 * curve[0]


def test_a_policy_learns_from_itself_with_the_solution_in_its_prompt(tmp_path):
    algorithm = alg.dapo().replace(objective=alg.zero, regularizers=alg.distill("policy", feedback="solution"))
    assert all(entry["distill/reverse_kl"] > 0 and entry["grad_norm"] > 0 for entry in trained(tmp_path, algorithm))


def test_failed_completions_with_a_right_sibling_are_routed_from_the_reward_to_the_teacher():
    from dataclasses import replace

    rewards = torch.tensor([[1.0, 0.0, 0.6, 0.2], [0.4, 0.0, 0.1, 0.2]])
    scores = made_scores(rewards[..., None])
    plain, routed = alg.GroupNormalized()(scores), alg.SampleRouted()(scores)
    assert routed[0].tolist() == [plain[0, 0].item(), 0.0, plain[0, 2].item(), 0.0]
    assert routed[1].tolist() == plain[1].tolist()  # none is right, so there is nothing to learn from but the reward
    answers = group(["a", "b", "c", "d"], rewards=rewards[0][:, None].tolist())
    almost = torch.tensor([[0.9, 0.0]]).nextafter(torch.zeros(1))  # a sum of rewards that is 0.9
    assert alg.SampleRouted(threshold=0.9)(made_scores(almost[..., None]))[0, 1] == 0
    assert hints_of(replace(group(["a", "b"]), totals=almost[0]), "best", threshold=0.9) == [None, "a"]
    for scored, told in ((rewards[0], [None, "a", None, "a"]), (rewards[1], [None] * 4)):
        assert hints_of(replace(answers, totals=scored), "best", threshold=0.5) == told


def test_tokens_weigh_by_the_teachers_entropy_over_the_mean_of_the_step():
    """Against the definition on whole distributions, in one micro-batch or two."""
    model = tiny_model("qwen2").eval()
    rows = [row(0, [5, 6, 7], [9, 10, 11], "a"), row(0, [5, 6, 7], [15, 16]), row(1, [8, 9], [20, 21], "b")]
    longer = {"a": (5, 6, 7, 30, 31), "b": (8, 9, 40)}
    part = alg.distill("policy", weight=2.0, feedback="best", entropy_sensitivity=1.5)
    taught = Teacher(Policy(model, pad_id=0), part.distance, None, lambda prompt, hint: longer[hint], 1.5)

    def batch(some):
        measured = Policy(model, pad_id=0).measure(some, teacher=taught)
        given = {"teacher_distance": measured.teacher_distance, "teacher_weight": measured.teacher_weight}
        mask = measured.rows.spread(torch.ones_like(measured.rows.target, dtype=torch.float)) > 0
        zeros = torch.zeros_like(measured.logp)
        return TokenBatch(
            logp=measured.logp, old_logp=zeros, advantages=zeros, mask=mask, group=torch.tensor([r.group for r in some]), **given
        )  # fmt: skip

    q = [whole(model, one, 1.0, longer.get(one.hint)).detach() for one in rows]
    raw = [torch.exp(-1.5 * -(one * one.log()).sum(-1)) * (r.hint is not None) for one, r in zip(q, rows, strict=True)]
    mean = torch.cat([raw[0], raw[2]]).mean()
    step = batch(rows)
    fitted = part.prepare(step.detached(), NO_TOTALS)
    for some, at in ((rows, (0, 1, 2)), (rows[:1], (0,)), (rows[2:], (2,))):
        found = fitted(batch(some))
        for place, i in enumerate(at):
            want = 2.0 * definition("reverse", whole(model, rows[i], 1.0), q[i]) * raw[i] / mean
            torch.testing.assert_close(found[place, : len(want)], want, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(part(step), fitted(step))  # unprepared, the batch at hand is the step


def test_srpo_trains_from_its_string(tmp_path):
    algorithm = alg.from_name(
        "dapo, advantage=SampleRouted(threshold=10), regularizer=distill(teacher='policy', feedback='best', "
        "divergence='jsd', threshold=10, entropy_sensitivity=1.0)"
    )
    curve = [entry["distill/jsd"] for entry in trained(tmp_path, algorithm, num_generations=4)]
    assert all(value >= 0 for value in curve)
    assert max(curve) > 0


@pytest.mark.parametrize("name", PARTS)
def test_overlap_is_the_share_of_the_policys_likeliest_tokens_among_the_teachers(name):
    """As `overlap_ratio` in the code of arXiv 2604.13016: k likeliest tokens of both, and how many of them are the same."""
    student, teacher = tiny_model("qwen2").eval(), tiny_model("llama", seed=3, hidden=48).eval()
    at = Teacher(Policy(teacher, pad_id=0), PARTS[name].distance, overlap_k=40)
    measured = Policy(student, pad_id=0, logits_chunk=2).measure(ROWS, teacher=at)
    for i, one in enumerate(ROWS):
        mine, theirs = (whole(model, one, 1.0).topk(40).indices.tolist() for model in (student, teacher))
        shares = [len(set(a) & set(b)) / 40 for a, b in zip(mine, theirs, strict=True)]
        assert measured.teacher_overlap[i, : len(shares)].tolist() == pytest.approx(shares)
        assert any(0 < share < 1 for share in shares)
    plain = Policy(student, pad_id=0).measure(ROWS, teacher=Teacher(Policy(teacher, pad_id=0), PARTS[name].distance))
    assert plain.teacher_overlap is None
    torch.testing.assert_close(plain.teacher_distance, measured.teacher_distance)


@pytest.mark.nightly
def test_a_run_reports_the_overlap_where_it_is_asked_for(tmp_path):
    term = alg.distill(tiny_model("qwen2", seed=7), overlap_k=8)
    curve = trained(tmp_path, alg.dapo().replace(objective=alg.zero, regularizers=term))
    assert 0 < curve[0]["teacher/overlap"] < curve[-1]["teacher/overlap"] <= 1
    with pytest.raises(ConfigError, match="at most its top_k=5"):
        alg.distill("http://a/v1", served_model_name="big", top_k=5, overlap_k=6)
