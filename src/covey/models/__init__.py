"""Models: loading them, their inputs of other modalities (`modalities/`), merging them, writing them as GGUF."""

from covey.models.loading import (
    SharedBase,
    as_model_errors,
    auto_class,
    config_of,
    dtype_of,
    first_line,
    load_model,
    load_tokenizer,
    quiet_bars,
    resolve_source,
    short_name,
)
from covey.models.longrope import can_take_long, context_limit, rope_factors, short_rope_limit, take_factors
from covey.models.passes import (
    accepts,
    computing,
    decoder_of,
    disable_dropout,
    dropouts,
    encoder_of,
    evaluating,
    float32_stream,
    reads_media,
    unwrapped,
    widens_stream,
)
from covey.models.products import (
    autocast_dtype,
    compute_with,
    expert_weights,
    experts_forward,
    multiplies_in_float32,
    settle_products,
)

__all__ = [
    "SharedBase", "accepts", "as_model_errors", "auto_class", "autocast_dtype", "can_take_long", "compute_with",
    "computing", "config_of", "context_limit", "decoder_of", "disable_dropout", "dropouts", "dtype_of", "encoder_of", "evaluating", "expert_weights",
    "experts_forward", "first_line", "float32_stream", "load_model", "load_tokenizer", "multiplies_in_float32",
    "quiet_bars", "reads_media", "resolve_source", "rope_factors", "settle_products", "short_name", "short_rope_limit",
    "take_factors", "unwrapped", "widens_stream",
]  # fmt: skip
