"""Signals of a teacher by token: numbers of other frameworks' own functions, run once on the same inputs, and of hand calculations.

ms-swift 3602360 (rl_core/advantage.py), TRL 1.16.0 (experimental), NeMo-RL 7ea279a (advantage_estimator.py), OPSD 590ec26.
"""

import dataclasses

import pytest
import torch
from signal_cases import LOGP, MASK, batch, gradient, same

from covey import algorithms as alg
from covey.algorithms.check import step_gradients
from covey.algorithms.samples import made_tokens
from covey.errors import ConfigError
from covey.types import Totals

# ms-swift: apply_rlsd_reweight with lam=0.8, clip_range=0.95, and with lam=1, clip_range=0.5, negative_only=True
RLSD = [
    [0.5595562404, 2.112, 2.112, 0.8977755089, 0.4202582582],
    [-1.0837657033, -0.5116631396, -0.9056200627, 0.0, 0.0],
    [0.3242680982, 0.1158556896, 0.2631993895, 0.704, 0.0],
]
RLSD_NEGATIVE = [[1.2] * 5, [-1.05, -0.4645789245, -0.9570250784, 0.0, 0.0], [0.4, 0.4, 0.4, 0.4, 0.0]]
# ms-swift: expand_advantage_to_per_token with teacher_kl_coef=0.7; NeMo-RL: OPDAdvantageEstimator.compute_advantage
OPD_RL = [
    [0.43, 1.7993424348, 2.4628260185, 0.9353512918, 0.0292201143],
    [-1.0653588092, -0.413035785, -0.9189244829, 0.0, 0.0],
    [0.2109617727, -1.1321731147, 0.0095778868, 1.2525083204, 0.0],
]
MOPD = [
    [-1.1, 0.8562034783, 1.8040371692, -0.3780695832, -1.6725426939],
    [-0.521941156, 0.4099488785, -0.3127492613, 0.0, 0.0],
    [-0.2700546104, -2.1888187353, -0.557745876, 1.2178690291, 0.0],
]
# gradients by the log-probabilities. ms-swift: compute_sdar_loss with gate_beta=5; TRL: _compute_iw_opd_loss with gamma=0.5 and
# rollout log-probabilities; TRL: sampled-token SDPO with a ratio capped at 2, the second row without a teacher
SDAR = [
    [-0.0003391781, -0.0822731232, -0.0833217451, -0.0130440344, -1.48712e-05],
    [-0.0077008031, -0.070178478, -0.0201105758, 0.0, 0.0],
    [-0.0113787371, -2.4265e-06, -0.0030085534, -0.0832168251, 0.0],
]
IW_OPD = [
    [0.1375, -0.1002720958, -0.2001995272, 0.0370648945, 0.1594372817],
    [0.0652426445, -0.0440805843, 0.0293368845, 0.0, 0.0],
    [0.0337568263, 0.2677860095, 0.056223624, -0.1160835783, 0.0],
]
SDPO = [
    [0.0298151084, -0.0272121267, -0.06406107, 0.0140157531, 0.0828520181],
    [0.0] * 5,
    [0.0521474827, 0.3406583701, 0.1094872936, -0.219041428, 0.0],
]


@pytest.mark.parametrize(
    "shape, expected",
    [
        (alg.TeacherReweighted(0.8, 0.95), RLSD),
        (alg.TeacherReweighted(1.0, 0.5, negative_only=True), RLSD_NEGATIVE),
        (alg.TeacherAdvantage(0.7, reward=1.0), OPD_RL),
        (alg.TeacherAdvantage(), MOPD),
    ],
    ids=["rlsd", "rlsd of failures", "ms-swift's teacher term", "mopd"],
)
def test_advantages_are_those_of_the_frameworks(shape, expected):
    same(shape(batch()) * MASK, expected)


@pytest.mark.parametrize(
    "algorithm, expected, loss",
    [
        (alg.sdar(weight=1.0).replace(objective=alg.zero), SDAR, 0.3333608845146188),
        (alg.iw_opd(correction=None), IW_OPD, 0.3870564508395012),
    ],
    ids=["sdar", "iw_opd"],
)
def test_gradients_are_those_of_the_frameworks(algorithm, expected, loss):
    value, total = gradient(algorithm, batch())
    same(value, expected)
    assert total == pytest.approx(loss, abs=1e-12)


def test_sdpo_is_trls_sampled_token_loss_with_its_capped_ratio():
    old = LOGP - torch.linspace(-0.9, 1.1, 15, dtype=torch.float64).view(3, 5)
    value, total = gradient(alg.sdpo(), batch(old, [True, False, True]))
    same(value, SDPO)
    assert total == pytest.approx(0.2792860800611297, abs=1e-12)


K = torch.arange(60, dtype=torch.float64).view(3, 5, 4)
STUDENT, OTHER = 1.3 * (0.7 * K).sin(), 1.1 * (0.9 * K + 0.4).cos()


@pytest.mark.parametrize(
    "divergence, beta, trl, opsd",
    [
        ("forward_kl", 0.5, [0.7638341864613114, 0.7636728895807738, 0.8230510931436146], 0.25789691026798583),
        ("jsd", 0.5, [0.16660759806014247, 0.19044001869793506, 0.15667444447590562], 0.05955412465360451),
        ("jsd", 0.3, [0.14366988487648774, 0.15689689837186624, 0.14071070975046243], None),
        ("reverse_kl", 0.5, [0.7023932159933074, 0.9552922215355708, 0.5894795644707813], 0.2541026576544131),
    ],
)
def test_divergences_of_sdft_and_opsd_are_those_of_trl_and_of_the_papers_code(divergence, beta, trl, opsd):
    """TRL: compute_divergence; OPSD: generalized_jsd_loss at temperature 1.1, the mean over the tokens that count."""
    for preset in (alg.sdft, alg.opsd):
        term = preset(divergence=divergence, beta=beta).regularizers[0]
        value = term.distance(STUDENT.log_softmax(-1)[0], OTHER.log_softmax(-1)[0])
        assert value[:3].tolist() == pytest.approx(trl, abs=1e-12)
        warm = term.distance((STUDENT / 1.1).log_softmax(-1)[MASK], (OTHER / 1.1).log_softmax(-1)[MASK])
        assert opsd is None or warm.mean().item() == pytest.approx(opsd, abs=1e-12)


def test_rlsds_strength_warms_up_and_decays_as_ms_swifts():
    """_rlsd_effective_lambda with rlsd_lambda=0.8, warmup_steps=4, decay_steps=5, at global steps 0 to 10."""
    from covey.types import StepReport

    algorithm = alg.rlsd(strength=0.8, warmup_steps=4, decay_steps=5)
    values, used = algorithm.initial_controllers(), []
    for step in range(11):
        now = algorithm.resolve(values)
        used.append(now.objective.shape.strength)
        same(now.objective.shape(batch()), alg.TeacherReweighted(used[-1])(batch()).tolist())
        values = algorithm.advance(values, StepReport(step=step + 1, metrics={}))
    assert used == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 0.64, 0.48, 0.32, 0.16, 0.0, 0.0])
    assert list(values) == ["objective.shape.strength"]
    assert alg.from_name("rlsd, warmup_steps=4").resolve({}).objective.shape.strength == 0.0
    assert alg.rlsd().initial_controllers() == {}
    with pytest.raises(ConfigError, match="must be a whole number"):
        alg.rlsd(warmup_steps=1.5)
    with pytest.raises(ConfigError, match="strength=1.5 must be at least 0 and at most 1"):
        alg.rlsd(strength=1.5, warmup_steps=3)


def test_an_ema_teacher_moves_as_trls():
    """TRL's teacher_update_rate=0.05 at every teacher_sync_steps=2: `(1 - rate) teacher + rate student`."""
    from covey.algorithms.reference import mixed
    from covey.types import StepReport

    rule = alg.sdpo(teacher_sync_steps=2).role.rule
    value = torch.tensor(1.0, dtype=torch.float64)
    for step in range(1, 5):
        value = mixed(value, torch.tensor(float(step), dtype=torch.float64), rule(StepReport(step=step, metrics={})))
    assert value.item() == pytest.approx(0.95 * (0.95 * 1.0 + 0.05 * 2.0) + 0.05 * 4.0)
    assert alg.opsd().role.rule is alg.keep
    assert alg.rlsd().role.rule is None
    frozen = alg.TeacherRole("policy", feedback="best", teacher_model_kind=alg.FrozenAt(3)).rule
    assert [frozen(StepReport(step=step, metrics={})) for step in (2, 3, 4)] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("preset", [alg.mopd, alg.iw_opd, alg.sdpo, alg.rlsd, alg.sdar])
def test_a_completion_without_a_teacher_learns_from_the_reward_alone(preset):
    tokens = batch(LOGP, [False, True, False])
    value, _ = gradient(preset(), tokens)
    plain, _ = gradient(preset().replace(objective=alg.Clipped(), regularizers=()), batch(LOGP))
    keeps_reward = preset in (alg.rlsd, alg.sdar)
    for row in (0, 2):
        torch.testing.assert_close(value[row], plain[row] if keeps_reward else torch.zeros_like(value[row]))
    assert not torch.allclose(value[1], plain[1])


def test_any_function_of_policy_teacher_and_reference_shapes_an_objective():
    """The advantage of a token where teacher and reference agree against the policy, by hand."""

    def agreed(tokens):
        toward, away = tokens.teacher_logp - tokens.old_logp, tokens.ref_logp - tokens.old_logp
        return torch.where(toward * away > 0, tokens.advantages, 0.0)

    tokens = made_tokens()
    own = alg.Algorithm(objective=alg.Reshaped(agreed, alg.policy_gradient), teacher=alg.TeacherRole("big"))
    value = step_gradients(own, tokens)["logp"]
    toward, away = tokens.teacher_logp - tokens.old_logp, tokens.ref_logp - tokens.old_logp
    expected = -tokens.advantages * (toward * away > 0) * tokens.mask / tokens.mask.sum()
    torch.testing.assert_close(value, expected.detach())
    assert own.needs.teacher_logp
    assert own.role.teacher == "big"


def test_agreement_says_on_which_side_of_the_reward_a_teacher_stands():
    def measured(gap):
        tokens = dataclasses.replace(
            made_tokens(), advantages=torch.tensor([1.0, -1.0] * 6, dtype=torch.float64)[:, None], teacher_mask=None
        )
        tokens = dataclasses.replace(tokens, teacher_logp=tokens.old_logp + gap * tokens.advantages)
        metrics = alg.rlsd().metrics(tokens, Totals.of(tokens.mask, tokens.group, 7))
        return metrics["teacher/agreement"].value, metrics["teacher/informed"].value

    assert measured(0.3) == (pytest.approx(1.0), 1.0)
    assert measured(-0.3) == (pytest.approx(-1.0), 1.0)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"teacher_model_kind": "emma"}, "Did you mean.*ema"),
        ({"teacher_model_kind": "ema", "teacher": "big"}, "is about teacher='policy'"),
        ({"teacher_model_kind": alg.EMA}, "neither a word nor a rule"),
        ({"teacher_update_rate": 0.0}, "above 0"),
        ({"teacher_sync_steps": 0}, "teacher_sync_steps=0 must be at least 1"),
        ({"teacher": {"math": "a"}, "by": None}, "the share 'a'"),
        ({"teacher": ["a", "b"], "by": "domain"}, "and it is a list"),
        ({"teacher": "a", "by": "domain"}, "names a column"),
        ({"teacher": []}, "empty list"),
        ({"teacher": ["a", "policy"]}, "teaches itself alone"),
        ({"teacher": ["a", "http://b/v1"]}, "The teacher http://b/v1 is an endpoint: say which model it serves"),
        (
            {"teacher": {"x": "http://b/v1", "y": "a"}, "by": "kind", "served_model_name": {"y": "m"}},
            "say which model it serves",
        ),
        (
            {"teacher": ["a", "http://b/v1"], "served_model_name": "m", "when_lost": "skip"},
            "the mean of the others would be another one",
        ),
        ({"teacher": "big", "when_lost": "skip"}, "acts for a teacher at an endpoint"),
        ({"threshold": 0.5, "feedback": "solution"}, "feedback='best' or 'successful'"),
    ],
)
def test_roles_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        alg.TeacherRole(**{"feedback": "best", **options})


def test_options_of_a_role_go_through_the_name():
    named = alg.from_name("rlsd, feedback=solution, strength=0.3, teacher_model_kind=ema, teacher_update_rate=0.1")
    assert named.role == alg.TeacherRole(
        "policy", feedback="solution", teacher_model_kind="ema", teacher_update_rate=0.1
    )
    assert named.objective.shape.strength == 0.3
    by = alg.from_name("mopd, teacher={'math': 'a', 'code': 'b'}, by=domain").role
    assert by.shares() == [("a", 1.0, "math"), ("b", 1.0, "code")]
    assert alg.from_name("mopd, teacher={'a': 3, 'b': 1}").role.shares() == [("a", 0.75, None), ("b", 0.25, None)]
    assert alg.from_name("iw_opd, teacher=runs/big").role.feedback is None
    part = alg.from_name("grpo, teacher=TeacherRole(teacher='big'), regularizer=GatedDistill(beta=2.0)")
    assert (part.role.teacher, part.regularizers[0].beta) == ("big", 2.0)
    shaped = alg.from_name("grpo, objective=TeacherReweighted(strength=0.3), teacher=TeacherRole(teacher='big')")
    assert shaped.objective == alg.Reshaped(alg.TeacherReweighted(0.3))
    with pytest.raises(ConfigError, match="Did you mean.*feedback"):
        alg.from_name("rlsd, feedbak=solution")


def test_a_part_without_a_teacher_and_two_teachers_are_refused():
    with pytest.raises(ConfigError, match="has no teacher; add one"):
        _ = alg.grpo().replace(objective=alg.Reshaped(alg.TeacherReweighted())).role
    two = alg.rlsd().replace(regularizers=alg.distill("big"))
    with pytest.raises(ConfigError, match="several teachers; give them as one"):
        _ = two.role
    one = alg.rlsd(teacher="big").replace(regularizers=alg.distill("big"))
    assert one.role.teacher == "big"
