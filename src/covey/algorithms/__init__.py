"""GRPO and its family as composed pure functions of tensors. `from covey import algorithms as alg`.

`alg.dapo()` is a preset, `alg.grpo().replace(advantage=mine)` changes a part, `alg.from_name("gspo")` looks a name up.
"""

from covey.algorithms.advantages import GroupNormalized
from covey.algorithms.aggregation import (
    Constant,
    RowMean,
    SequenceMean,
    SequenceSum,
    batch_token_mean,
    prompt_mean,
    token_mean,
)
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.baselines import (
    GPG,
    OPO,
    GroupFiltered,
    LeaveOneOut,
    LengthPenalty,
    MaxRL,
    NormalizeThenSum,
    Shaped,
    SliceNormalized,
    SoftOverlong,
)
from covey.algorithms.control import Controller, WarmUp
from covey.algorithms.covariance import ClipCov, KLCov
from covey.algorithms.critic import ClippedError, Critic
from covey.algorithms.distillation import Distill, distill, zero
from covey.algorithms.examples import SFT, sft
from covey.algorithms.future_kl import FutureKL
from covey.algorithms.importance import VACO, Correction, MemberWeight, OffPolicyMask, Rejection
from covey.algorithms.kl import ESTIMATORS, KL, AdaptiveKL, BoundedK3, StraightThrough, abs_kl, full, k1, k2, k3
from covey.algorithms.labels import RewardsAsLabels
from covey.algorithms.naming import from_name
from covey.algorithms.needs import Needs
from covey.algorithms.newer_presets import (
    cfpo,
    decoupled_ppo,
    dro,
    fipo,
    gdpo,
    gfpo,
    gigpo,
    maxrl,
    otb,
    pkpo,
    real,
    tpo,
)
from covey.algorithms.objectives import Clipped, policy_gradient
from covey.algorithms.options import from_options
from covey.algorithms.pass_at_k import PKPO, PassAtK
from covey.algorithms.presets import (
    PRESETS,
    bnpo,
    cispo,
    dapo,
    dppo,
    dr_grpo,
    gmpo,
    gpg,
    grpo,
    gspo,
    gspo_token,
    luspo,
    opo,
    ppo,
    reinforce_pp,
    remax,
    rloo,
    sapo,
    vespo,
)
from covey.algorithms.reference import EMA, Every, FrozenAt, WhenFar, keep
from covey.algorithms.regularizers import AdaptiveEntropy, Echo, EntropyBonus, TopEntropy, entropy_bonus
from covey.algorithms.roles import RoleConditioned, SampleRouted
from covey.algorithms.surrogates import CISPO, DPPO, DRO, GMPO, SAPO, VESPO, GSPOToken, QuadraticPenalty
from covey.algorithms.target_policy import TargetPolicy
from covey.algorithms.teacher_presets import iw_opd, mopd, opsd, rlsd, sdar, sdft, sdpo
from covey.algorithms.teacher_signals import (
    GatedDistill,
    PositionWeighted,
    Reshaped,
    TeacherAdvantage,
    TeacherReweighted,
    teacher_gap,
)
from covey.algorithms.teachers import TeacherRole
from covey.algorithms.token_advantages import GAE, OptimalTokenBaseline, ReinforcePlusPlus, ReMax
from covey.algorithms.turn_advantages import GiGPO

__all__ = [
    "CISPO", "DPPO", "DRO", "EMA", "ESTIMATORS", "GAE", "GMPO", "GPG", "KL", "OPO", "PKPO", "PRESETS", "SAPO",
    "SFT", "VACO", "VESPO", "AdaptiveEntropy", "AdaptiveKL", "Algorithm", "BoundedK3", "ClipCov", "Clipped",
    "ClippedError", "Constant", "Controller", "Correction", "Critic", "Distill", "Echo", "EntropyBonus",
    "Every", "FrozenAt", "FutureKL", "GSPOToken", "GatedDistill", "GiGPO", "GroupFiltered", "GroupNormalized",
    "KLCov", "LeaveOneOut", "LengthPenalty", "MaxRL", "MemberWeight", "Needs", "NormalizeThenSum",
    "OffPolicyMask", "OptimalTokenBaseline", "PassAtK", "PositionWeighted", "QuadraticPenalty", "ReMax",
    "ReinforcePlusPlus", "Rejection", "Reshaped", "RewardsAsLabels", "RoleConditioned", "RowMean",
    "SampleRouted", "SequenceMean", "SequenceSum", "Shaped", "SliceNormalized", "SoftOverlong",
    "StraightThrough", "TargetPolicy", "TeacherAdvantage", "TeacherReweighted", "TeacherRole", "TopEntropy",
    "WarmUp", "WhenFar", "abs_kl", "batch_token_mean", "bnpo", "cfpo", "cispo", "dapo", "decoupled_ppo",
    "distill", "dppo", "dr_grpo", "dro", "entropy_bonus", "fipo", "from_name", "from_options", "full", "gdpo",
    "gfpo", "gigpo", "gmpo", "gpg", "grpo", "gspo", "gspo_token", "iw_opd", "k1", "k2", "k3", "keep", "luspo",
    "maxrl", "mopd", "opo", "opsd", "otb", "pkpo", "policy_gradient", "ppo", "prompt_mean", "real",
    "reinforce_pp", "remax", "rloo", "rlsd", "sapo", "sdar", "sdft", "sdpo", "sft", "teacher_gap", "token_mean",
    "tpo", "vespo", "zero",
]  # fmt: skip
