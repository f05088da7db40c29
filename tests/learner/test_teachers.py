"""Teachers of a run: their log-probabilities at the policy's tokens, several of them, and those that follow the policy."""

from dataclasses import replace

import pytest
import torch
from distilled import ROWS, row, trained, trainer_of

from covey import algorithms as alg
from covey.data.hints import with_hint
from covey.errors import ConfigError, ModelError
from covey.learner import FrozenCopy, Policy
from covey.learner.teacher import Member, Teacher, Teachers
from covey.learner.token_batches import Draws, batch_of
from covey.models import load_model
from covey.training.build_algorithm import check_teacher
from covey.training.teaching import build_teacher, hints_of
from covey.types import Prompt, StepReport, Totals
from kit import completion, group, learner_of, rest_nightly, tiny_model, tiny_tokenizer


def logp_of(model, one, prompt=None, temperature=1.0):
    """Straight from the logits, [T]."""
    given = [*(prompt or one.prompt.token_ids)]
    ids = torch.tensor([[*given, *one.completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(given) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, one.completion.token_ids[:, None]).squeeze(-1)


def expect(measured, rows, values):
    for i, (one, value) in enumerate(zip(rows, values, strict=True)):
        torch.testing.assert_close(measured[i, : one.completion.num_tokens], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("distance", [None, alg.Distill("x").distance], ids=["alone", "beside a divergence"])
def test_a_teachers_log_probabilities_are_those_of_its_logits_at_the_sampling_temperature(distance):
    student, teacher = tiny_model("qwen2").eval(), tiny_model("llama", seed=3, hidden=48).eval()
    own = Policy(student, pad_id=0, temperature=0.7, logits_chunk=2)
    at = Teacher(Policy(teacher, pad_id=0, temperature=0.7), distance)
    measured = own.measure(ROWS, teacher=at)
    expect(measured.teacher_logp, ROWS, [logp_of(teacher, one, temperature=0.7) for one in ROWS])
    assert not measured.teacher_logp.requires_grad
    assert measured.teacher_mask.tolist() == [True, True, True]
    assert (measured.teacher_distance is None) == (distance is None)


def test_a_policy_with_feedback_teaches_only_where_there_is_feedback():
    model = tiny_model("qwen2").eval()
    rows = [row(0, [5, 6, 7], [9, 10, 11], "a"), row(0, [5, 6, 7], [15, 16]), row(1, [8, 9], [20, 21], "b")]
    longer = {"a": (5, 6, 7, 30, 31), "b": (8, 9, 40)}
    at = Teacher(Policy(model, pad_id=0), hinted=lambda prompt, hint: longer[hint], needs_hint=True)
    measured = Policy(model, pad_id=0).measure(rows, teacher=at)
    expect(measured.teacher_logp, rows, [logp_of(model, one, longer.get(one.hint)) for one in rows])
    assert measured.teacher_mask.tolist() == [True, False, True]


@pytest.mark.parametrize("distance", [None, alg.Distill("x", divergence="jsd").distance], ids=["logp", "distance"])
def test_a_column_chooses_the_teacher_of_each_prompt_and_shares_average_them(distance):
    student, models = tiny_model("qwen2").eval(), [tiny_model("llama", seed=seed).eval() for seed in (3, 4)]
    rows = [
        replace(one, prompt=replace(one.prompt, columns={"domain": domain}))
        for one, domain in zip(ROWS, ("math", "math", "code"), strict=True)
    ]
    rows.append(replace(rows[0], group=2, prompt=replace(rows[0].prompt, columns={"domain": "prose"})))
    made = [Teacher(Policy(model, pad_id=0), distance) for model in models]
    policy = Policy(student, pad_id=0)

    def measured(teacher):
        return policy.measure(rows, teacher=teacher)

    alone = [measured(teacher) for teacher in made]
    by = measured(Teachers((Member(made[0], value="math"), Member(made[1], value="code")), by="domain"))
    assert by.teacher_mask.tolist() == [True, True, True, False]
    mean = measured(Teachers((Member(made[0], 0.75), Member(made[1], 0.25))))
    assert mean.teacher_mask.all()
    for name in ("teacher_logp", "teacher_distance")[: 1 if distance is None else 2]:
        a, b = (getattr(one, name) for one in alone)
        expect(getattr(by, name), rows[:2], [a[0, :3], a[1, :1]])
        torch.testing.assert_close(getattr(by, name)[2], b[2], rtol=1e-4, atol=1e-5)
        assert not getattr(by, name)[3].any()
        torch.testing.assert_close(getattr(mean, name), 0.75 * a + 0.25 * b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [alg.mopd(teacher="x", reward=1.0), alg.dapo().replace(regularizers=alg.Distill("x"))],
    ids=["logp", "distance"],
)
def test_prompts_of_which_no_column_names_a_teacher_learn_from_the_reward_alone(algorithm):
    """Also where a whole micro-batch has none."""
    student, teacher = tiny_model("qwen2").eval(), tiny_model("llama", seed=3).eval()
    parts = [part for part in algorithm.regularizers if isinstance(part, alg.Distill)]
    at = Teacher(Policy(teacher, pad_id=0), parts[0].distance if parts else None)
    teachers = Teachers((Member(at, value="math"), Member(at, value="code")), by="domain")

    def gradient(algorithm, teacher, domain):
        rows = [
            replace(one, advantage=torch.tensor(a), prompt=replace(one.prompt, columns={"domain": domain}))
            for one, a in zip(ROWS, (1.0, -1.0, 0.5), strict=True)
        ]
        student.zero_grad()
        tokens = batch_of(rows, Policy(student, pad_id=0).measure(rows, teacher=teacher), None, Draws())
        algorithm.loss(tokens, Totals.of(tokens.mask, tokens.group, 8)).backward()
        return torch.cat([p.grad.flatten() for p in student.parameters()])

    plain = algorithm.replace(regularizers=(), objective=alg.policy_gradient, teacher=None)
    torch.testing.assert_close(gradient(algorithm, teachers, "prose"), gradient(plain, None, "prose"))
    assert not torch.allclose(gradient(algorithm, teachers, "math"), gradient(plain, None, "math"))


def test_a_teacher_that_is_an_average_follows_and_is_restored():
    model, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    policy = Policy(model, pad_id=0)
    algorithm = alg.sdpo(teacher_update_rate=0.25, teacher_sync_steps=2)
    teacher = build_teacher(algorithm, policy, tokenizer, {})
    name, weight = next(iter(model.named_parameters()))
    start = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1.0)
    one = learner_of(policy, torch.optim.SGD(model.parameters(), lr=0.0), teacher=teacher, max_completion_length=8)
    for step in (1, 2):
        one.follow(algorithm, StepReport(step=step, metrics={}))
    own = dict(teacher.following.copy.policy.model.named_parameters())[name]
    torch.testing.assert_close(own, start + 0.25)
    again = build_teacher(algorithm, Policy(tiny_model("qwen2").eval(), pad_id=0), tokenizer, {})
    again.load_state_dict(teacher.state_dict())
    torch.testing.assert_close(dict(again.following.copy.policy.model.named_parameters())[name], own)


def test_a_teacher_of_the_start_stays_and_is_the_frozen_reference_where_there_is_one():
    model, tokenizer = tiny_model("qwen2").eval(), tiny_tokenizer()
    policy = Policy(model, pad_id=0)
    before = [logp_of(model, one) for one in ROWS]
    algorithm = alg.opsd(feedback="solution").replace(kl=0.1)
    reference = FrozenCopy.of(policy)
    teacher = build_teacher(algorithm, policy, tokenizer, {}, reference=reference)
    assert teacher.policy.model is reference.policy.model
    assert teacher.state_dict() == {}
    alone = build_teacher(alg.opsd(feedback="solution"), policy, tokenizer, {})
    with torch.no_grad():
        next(model.parameters()).add_(0.5)
    for one in (teacher, alone):
        expect(policy.measure(ROWS, teacher=one).teacher_logp, ROWS, before)


@pytest.fixture
def adapted(tmp_path):
    """A model with an adapter of rank 4, and the folder of another adapter, of rank 2 and other layers, on the same base."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    from covey.models import load_model

    lora = lambda **options: LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    torch.manual_seed(0)
    other = get_peft_model(load_model(str(tmp_path / "base")), lora(r=2, lora_alpha=8, target_modules=["q_proj"]))
    other.save_pretrained(tmp_path / "other")
    own = get_peft_model(
        load_model(str(tmp_path / "base")), lora(r=4, lora_alpha=4, target_modules=["q_proj", "v_proj"])
    )
    return own.eval(), other.eval(), tmp_path


def test_an_adapter_teaches_on_the_policys_base_without_a_second_copy(adapted):
    own, other, folder = adapted
    policy = Policy(own, pad_id=0)
    teacher = build_teacher(alg.mopd(teacher=str(folder / "other")), policy, tiny_tokenizer(), {})
    assert teacher.policy.model is own
    mine = policy.measure(ROWS).logp.detach()
    measured = policy.measure(ROWS, teacher=teacher)
    expect(measured.teacher_logp, ROWS, [logp_of(other, one) for one in ROWS])
    torch.testing.assert_close(measured.logp.detach(), mine)
    assert (measured.teacher_logp - mine).abs().max() > 1e-3
    assert teacher.state_dict() == {}


def test_an_adapter_of_a_larger_rank_is_loaded_with_its_base(adapted, caplog):
    from peft import LoraConfig, get_peft_model

    from covey.models import load_model

    _, other, folder = adapted
    small = get_peft_model(load_model(str(folder / "base")), LoraConfig(r=1, target_modules=["q_proj"]))
    policy = Policy(small.eval(), pad_id=0)
    teacher = build_teacher(alg.mopd(teacher=str(folder / "other")), policy, tiny_tokenizer(), {})
    assert "its base is loaded once more" in caplog.text
    expect(policy.measure(ROWS, teacher=teacher).teacher_logp, ROWS, [logp_of(other, one) for one in ROWS])


def test_an_adapter_that_trains_rows_of_the_embeddings_is_loaded_with_its_base(adapted, caplog):
    from peft import LoraConfig, get_peft_model

    from covey.models import load_model

    _, other, folder = adapted
    lora = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[30, 31, 32, 33])  # as many as ranks
    policy = Policy(get_peft_model(load_model(str(folder / "base")), lora).eval(), pad_id=0)
    teacher = build_teacher(alg.mopd(teacher=str(folder / "other")), policy, tiny_tokenizer(), {})
    assert "its base is loaded once more" in caplog.text
    expect(policy.measure(ROWS, teacher=teacher).teacher_logp, ROWS, [logp_of(other, one) for one in ROWS])


def test_a_teacher_is_loaded_as_it_is_stored_or_in_the_type_that_is_named(tmp_path, caplog):
    tiny_model("llama", seed=3, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    policy, dtypes = Policy(tiny_model("qwen2"), pad_id=0), []
    for source, dtype in ((str(tmp_path), "auto"), (str(tmp_path), "float32"), (tmp_path, "float32")):
        algorithm = alg.dapo().replace(regularizers=alg.distill(source, dtype=dtype))
        dtypes.append(build_teacher(algorithm, policy, tiny_tokenizer(), {}).policy.model.dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert caplog.text.count("The teacher computes in bfloat16, as it is stored, and the policy in float32") == 1


def test_a_run_in_bfloat16_teaches_a_float32_policy(tmp_path):
    run = tmp_path / "teacher"
    tiny_model("qwen2", seed=3, dtype=torch.bfloat16).save_pretrained(run / "model")
    tiny_tokenizer().save_pretrained(run / "model")
    with pytest.raises(ModelError, match="give '.*/teacher/model', what this run ended with"):
        load_model(str(run))
    rounded, exact = (
        trained(tmp_path / dtype, alg.dapo().replace(regularizers=alg.distill(run, dtype=dtype)), max_steps=1)[0][
            "distill/reverse_kl"
        ]
        for dtype in ("auto", "float32")
    )
    assert rounded == pytest.approx(exact, rel=0.05)


def test_feedback_of_a_success_of_a_tool_and_of_values_that_are_no_text():
    answers = group(
        ["4", "5", "6", "four"], rewards=[[1.0], [0.0], [1.0], [0.5]], columns={"steps": ["a"], "none": " "}
    )
    answers = replace(answers, totals=torch.tensor([1.0, 0.0, 1.0, 0.5]))
    assert hints_of(answers, "successful") == ["6", "4", "4", "4"]
    assert hints_of(answers, "successful", 0.5) == ["6", "4", "4", "4"]
    assert hints_of(answers, "successful", 2.0) == [None] * 4
    assert hints_of(answers, "none") == [None] * 4
    with pytest.raises(ConfigError, match="'steps' holds list, no text"):
        hints_of(answers, "steps")
    told = (
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "error: 8"},
    )
    episode = replace(answers, completions=(replace(completion("x"), messages=told), *answers.completions[1:]))
    assert hints_of(episode, "tool_result") == ["error: 8", None, None, None]


@pytest.mark.parametrize(
    "name",
    rest_nightly(
        ["sdar, feedback=solution, teacher_model_kind=ema", "opsd, feedback=solution", "rlsd, feedback=solution"], 1
    ),
)
def test_a_run_learns_from_itself_and_says_what_its_teacher_does(name, tmp_path):
    curve = trained(tmp_path, name)
    assert all(entry["teacher/informed"] == 1.0 for entry in curve)
    assert all(-1.0 <= entry["teacher/agreement"] <= 1.0 for entry in curve if "teacher/agreement" in entry)
    assert curve[0]["teacher/gap"] != 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("preset", rest_nightly([alg.iw_opd, alg.mopd], 1))
def test_on_policy_distillation_by_the_policy_gradient_brings_the_policy_to_its_teacher(preset, tmp_path):
    teacher = tiny_model("qwen2", seed=7).eval()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(8.0)  # far from uniform, which the policy nearly is
    options = {"per_device_train_batch_size": 256, "max_completion_length": 1}  # a sum of many draws: noise is small
    trainer = trainer_of(tmp_path, preset(teacher=teacher), **options)
    before = divergence(trainer.model, teacher)
    trainer.train()
    assert divergence(trainer.model, teacher) < 0.8 * before


def divergence(policy, teacher):
    """KL from policy to teacher at the first token of a completion, nats."""
    ids = torch.tensor([tiny_tokenizer()("Tom has 3 apples.").input_ids])
    with torch.no_grad():
        p, q = (model(ids).logits[0, -1].log_softmax(-1) for model in (policy.eval(), teacher))
    return (p.exp() * (p - q)).sum().item()


@pytest.mark.parametrize(
    ("algorithm", "columns", "said"),
    [
        ("rlsd, feedback=solution", {"solution": ["", " "]}, "has no text in the first 2 rows"),
        ("rlsd, feedback=solution", {"solution": [["a"], ["b"]]}, "'solution' holds list, no text"),
        ("rlsd, feedback=best", {"image": ["a.png", None]}, "cannot be put into prompts with images"),
        ("sdpo", {"audio": [None, "a.wav"]}, "cannot be put into prompts with images"),
        ("mopd, teacher={'math': 'a', 'code': 'b'}, by=domain", {"answer": ["4", "5"]}, "is no column of the data set"),
        ("mopd, teacher={'math': 'a', 'code': 'b'}, by=domain", {"domain": ["prose", "law"]}, "it holds law, prose"),
    ],
)
def test_columns_that_a_teacher_cannot_use_are_refused_before_anything_is_loaded(algorithm, columns, said):
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": ["2 + 2 =", "2 + 3 ="], **columns})
    with pytest.raises(ConfigError, match=said):
        check_teacher(alg.from_name(algorithm).role, dataset)


def test_feedback_is_refused_beside_an_agent_whose_prompt_is_its_own():
    with pytest.raises(ConfigError, match="the prompt that an agent shows"):
        check_teacher(alg.from_name("sdpo").role, None, has_agent=True)
    check_teacher(alg.from_name("mopd, teacher=demo, feedback=None").role, None, has_agent=True)


def test_feedback_follows_the_parts_of_a_message_as_a_part():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "2 + 2"}, {"type": "text", "text": " ="}]
    prompt = Prompt(uid="0:0", token_ids=(1,), messages=({"role": "user", "content": parts},))
    ids = with_hint(prompt, "4", "\n{feedback}", tokenizer, {})
    assert tokenizer.decode(ids) == "2 + 2 =\n4"
    assert len(parts) == 2


def test_columns_of_a_teacher_that_hold_something_are_fine():
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": ["a", "b"], "solution": ["", "4"], "domain": ["math", "prose"]})
    check_teacher(alg.from_name("rlsd, feedback=solution").role, dataset)
    check_teacher(alg.from_name("rlsd, feedback=made_by_a_reward").role, dataset)
    check_teacher(alg.from_name("mopd, teacher={'math': 'a', 'code': 'b'}, by=domain").role, dataset)
    check_teacher(None, dataset)
