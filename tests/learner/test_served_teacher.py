"""A distillation's teacher at an endpoint: the same term as with that model in this process, as far as its likeliest tokens tell."""

from dataclasses import replace

import pytest
import torch
from distilled import ROWS, row, trained

from covey import algorithms as alg
from covey.errors import ConfigError, ServerError
from covey.learner import Policy, Teacher
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.training.teaching import build_teacher
from kit import rest_nightly, tiny_model, tiny_tokenizer
from teacher_server import serving


def built(url, policy, tokenizer, **options):
    part = alg.distill(url, served_model_name="big", top_k=5, **options)
    return build_teacher(alg.dapo().replace(regularizers=part), policy, tokenizer, {})


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(Endpoint, "_pause", lambda self, attempt: 0.0)


def gradients(student, teacher):
    student.zero_grad()
    measured = Policy(student, pad_id=0).measure(ROWS, teacher=teacher)
    measured.teacher_distance.sum().backward()
    return measured.teacher_distance.detach(), {name: p.grad.clone() for name, p in student.named_parameters()}


def test_forward_kl_and_its_gradient_are_those_of_the_same_teacher_in_this_process():
    student, teacher, tokenizer = tiny_model("qwen2").eval(), tiny_model("llama", seed=3).eval(), tiny_tokenizer()
    here = alg.Distill("x", divergence="forward_kl", top_k=5)
    wanted, of_wanted = gradients(student, Teacher(Policy(teacher, pad_id=0), here.distance))
    with serving(teacher, tokenizer) as (url, asked):
        found, of_found = gradients(student, built(url, Policy(student, pad_id=0), tokenizer, divergence="forward_kl"))
    assert len(asked) == 2 + len(ROWS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    for name, gradient in of_wanted.items():
        torch.testing.assert_close(of_found[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("divergence", ["reverse_kl", "jsd"])
def test_other_divergences_are_bounds_from_below_and_the_whole_where_all_tokens_are_told(divergence):
    torch.manual_seed(0)
    logp, q = (torch.log_softmax(3 * torch.randn(6, 9, dtype=torch.float64), -1).requires_grad_() for _ in range(2))
    part = alg.Distill("x", divergence=divergence)
    whole = part.distance(logp, q.detach())
    told = {k: part.distance_to_likeliest(logp, *reversed(q.detach().topk(k))) for k in (3, 8)}
    assert bool((told[3] <= told[8] + 1e-12).all())
    torch.testing.assert_close(told[8], whole)  # eight of nine told apart, and one left
    (of_told,), (of_whole,) = (torch.autograd.grad(x.sum(), logp, retain_graph=True) for x in (told[8], whole))
    softmax = logp.detach().exp()
    along = lambda g: g - softmax * g.sum(-1, keepdim=True)  # to the logits
    torch.testing.assert_close(along(of_told), along(of_whole))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
def test_places_where_the_server_tells_fewer_tokens_or_one_that_the_policy_lacks_are_no_tokens(divergence):
    logp = torch.log_softmax(torch.randn(2, 6, dtype=torch.float64), -1).requires_grad_()
    theirs = torch.tensor([[-0.2, -3.0, -4.0]], dtype=torch.float64).expand(2, -1)
    ids = torch.tensor([[1, 4, 99], [1, 4, 0]])
    part = alg.Distill("x", divergence=divergence)
    found = part.distance_to_likeliest(
        logp,
        ids,
        theirs.clone().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(-torch.inf, dtype=torch.float64)),
    )
    wanted = part.distance_to_likeliest(logp, ids[:, :2], theirs[:, :2])
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert bool(logp.grad.isfinite().all())


def test_the_overlap_with_a_served_teacher_is_that_of_the_same_teacher_in_this_process():
    student, teacher, tokenizer = tiny_model("qwen2").eval(), tiny_model("llama", seed=3).eval(), tiny_tokenizer()
    policy = Policy(student, pad_id=0)
    here = policy.measure(ROWS, teacher=Teacher(Policy(teacher, pad_id=0), alg.Distill("x").distance, overlap_k=5))
    with serving(teacher, tokenizer) as (url, _):
        there = policy.measure(ROWS, teacher=built(url, policy, tokenizer, overlap_k=5))
    torch.testing.assert_close(there.teacher_overlap, here.teacher_overlap)
    assert there.teacher_overlap.any()


@pytest.mark.parametrize("part", rest_nightly([None, "forward_kl"], ["forward_kl"]))
def test_several_served_teachers_are_averaged_or_chosen_by_a_column_as_loaded_ones(part, tmp_path):
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    models = [tiny_model("llama", seed=seed).eval() for seed in (3, 4)]
    for name, model in zip("ab", models, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    folders = [str(tmp_path / name) for name in "ab"]
    kinds = zip(ROWS, ("x", "y", "prose"), strict=True)
    rows = [replace(one, prompt=replace(one.prompt, columns={"kind": kind})) for one, kind in kinds]

    def measured(teacher, **options):
        term = {} if part is None else {"divergence": part, "top_k": 5}
        made = alg.mopd(teacher=teacher, **options) if part is None else alg.distill(teacher, **term, **options)
        algorithm = made if part is None else alg.dapo().replace(regularizers=made)
        policy = Policy(student, pad_id=0)
        return policy.measure(rows, teacher=build_teacher(algorithm, policy, tokenizer, {}))

    with serving(models[0], tokenizer) as (one, asked), serving(models[1], tokenizer) as (two, more):
        pairs = [
            (measured(folders), measured([one, two], served_model_name={one: "a", two: "b"})),
            (
                measured({"x": folders[0], "y": folders[1]}, by="kind"),
                measured({"x": one, "y": folders[1]}, by="kind", served_model_name="a"),
            ),
        ]
        assert {body["model"] for body in asked} == {"a"}
        assert {body["model"] for body in more} == {"b"}
    for here, there in pairs:
        torch.testing.assert_close(there.teacher_logp, here.teacher_logp, rtol=1e-4, atol=1e-5)
        assert there.teacher_mask.tolist() == here.teacher_mask.tolist()
        if part is not None:
            torch.testing.assert_close(there.teacher_distance, here.teacher_distance, rtol=1e-4, atol=1e-5)
    assert pairs[1][1].teacher_mask.tolist() == [True, True, False]


def test_a_hint_goes_to_the_server_in_the_prompt():
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    with serving(student, tokenizer) as (url, asked):
        teacher = built(url, Policy(student, pad_id=0), tokenizer, feedback="solution")
        told = row(0, [5, 6, 7], [9, 10], "x")
        Policy(student, pad_id=0).measure([told], teacher=teacher)
    assert asked[-1]["prompt"] == [*teacher.hinted(told.prompt, "x"), 9, 10]
    assert asked[-1]["prompt"] != [5, 6, 7, 9, 10]


def test_a_run_learns_from_a_server(tmp_path):
    with serving(tiny_model("qwen2", seed=7).eval(), tiny_tokenizer()) as (url, asked):
        part = alg.distill(url, served_model_name="big", top_k=20, divergence="forward_kl")
        curve = trained(tmp_path, alg.dapo().replace(objective=alg.zero, regularizers=part))
    assert curve[-1]["distill/forward_kl"] < 0.9 * curve[0]["distill/forward_kl"]
    assert {body["model"] for body in asked} == {"big"}


def test_a_server_that_goes_away_ends_the_run_with_a_checkpoint(tmp_path, quick):
    tokenizer = tiny_tokenizer()
    with serving(tiny_model("qwen2", seed=7).eval(), tokenizer, lasts=2 + 2 * 8) as (url, _):
        part = alg.distill(url, served_model_name="big", top_k=20)
        with pytest.raises(ServerError, match="Start the teacher's server again, and resume the run"):
            trained(tmp_path, alg.dapo().replace(regularizers=part), save_strategy="steps", save_steps=100)
    assert (tmp_path / "checkpoint-2").is_dir()


@pytest.mark.nightly
def test_a_server_that_answers_late_ends_the_run_as_one_that_is_gone(tmp_path, quick):
    with serving(tiny_model("qwen2", seed=7).eval(), tiny_tokenizer(), lasts=2 + 2 * 8, late=60) as (url, _):
        part = alg.distill(url, served_model_name="big", top_k=20, request_seconds=0.5)
        with pytest.raises(ServerError, match="timed out. Start the teacher's server again, and resume the run"):
            trained(tmp_path, alg.dapo().replace(regularizers=part), save_strategy="steps", save_steps=100)
    assert (tmp_path / "checkpoint-2").is_dir()


def test_a_servers_own_log_probabilities_are_those_of_the_model_in_this_process():
    student, teacher, tokenizer = tiny_model("qwen2").eval(), tiny_model("llama", seed=3).eval(), tiny_tokenizer()
    policy = Policy(student, pad_id=0)
    here = policy.measure(ROWS, teacher=Teacher(Policy(teacher, pad_id=0)))
    with serving(teacher, tokenizer) as (url, _):
        served = build_teacher(alg.iw_opd(teacher=url, served_model_name="big"), policy, tokenizer, {})
        measured = policy.measure(ROWS, teacher=served)
    assert measured.teacher_distance is None
    torch.testing.assert_close(measured.teacher_logp, here.teacher_logp, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", rest_nightly(["mopd, reward=1.0", "dapo, regularizer=distill(top_k=20, {})"], 1))
def test_a_run_goes_on_without_a_server_that_goes_away_where_that_is_asked_for(name, tmp_path, quick, caplog):
    tokenizer = tiny_tokenizer()
    with serving(tiny_model("qwen2", seed=7).eval(), tokenizer, lasts=2 + 2 * 8) as (url, asked):
        role = f"teacher='{url}', served_model_name='big', when_lost='skip'"
        text = name.format(role) if "{}" in name else f"{name}, {role}"
        curve = trained(tmp_path, text)
    assert [entry["teacher/informed"] for entry in curve] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert all(entry["grad_norm"] > 0 and entry["loss"] == entry["loss"] for entry in curve[:2])
    assert caplog.text.count("did not answer on 8 of 8 completions") == 1
    assert len(asked) == 18 + 8 * 5 + 3  # retried once, then tried by one request a step


def test_a_server_that_comes_back_teaches_again(quick):
    student, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    policy = Policy(student, pad_id=0)
    with serving(student, tokenizer) as (url, _):
        role = alg.mopd(teacher=url, served_model_name="big", when_lost="skip")
        served = build_teacher(role, policy, tokenizer, {})
        served.is_away = True
        assert policy.measure(ROWS, teacher=served).teacher_mask.all()
        assert not served.is_away


def test_a_server_that_cannot_teach_is_refused_before_anything_is_drawn(quick):
    student, tokenizer, other = tiny_model("qwen2").eval(), tiny_tokenizer(), tiny_tokenizer()
    policy = Policy(student, pad_id=0)
    other.decode = lambda ids: f"<{ids[0]}>"
    with (
        serving(student, other) as (url, _),
        pytest.raises(ConfigError, match="another vocabulary: token 0 is .* and '<0>' there"),
    ):
        built(url, policy, tokenizer)
    with serving(student, tokenizer) as (url, _), pytest.raises(ConfigError, match="set temperature=1"):
        built(url, Policy(student, pad_id=0, temperature=0.7), tokenizer)
    with serving(student, tokenizer, refuse=401) as (url, _), pytest.raises(ConfigError, match=r"401.*OPENAI_API_KEY"):
        built(url, policy, tokenizer)
    with serving(student, tokenizer, refuse=503) as (url, _), pytest.raises(ServerError, match="failed 5 times"):
        built(url, policy, tokenizer)


def test_a_server_that_does_not_score_prompts_is_refused():
    from ensembles.endpoints import endpoint

    policy = Policy(tiny_model("qwen2").eval(), pad_id=0)
    with endpoint(lambda body: "four") as (url, _), pytest.raises(ConfigError, match="does not score a prompt"):
        built(url, policy, tiny_tokenizer())


@pytest.mark.parametrize(
    "options, said",
    [
        ({"teacher": "http://a/v1", "top_k": 5}, "served_model_name='NAME'"),
        ({"teacher": "http://a/v1", "served_model_name": "big"}, "top_k=20"),
        ({"teacher": "big", "served_model_name": "big"}, "belongs to an endpoint"),
    ],
)
def test_an_endpoint_without_what_it_takes_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        alg.Distill(**options)
