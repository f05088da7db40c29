"""Models: loading them, their inputs of other modalities (`modalities/`), merging them, writing them as GGUF."""

from covey.models.loading import (
    SharedBase,
    accepts,
    as_model_errors,
    auto_class,
    config_of,
    context_limit,
    decoder_of,
    disable_dropout,
    dtype_of,
    encoder_of,
    evaluating,
    first_line,
    float32_stream,
    load_model,
    load_tokenizer,
    quiet_bars,
    reads_media,
    resolve_source,
    short_name,
    unwrapped,
    widens_stream,
)

__all__ = [
    "SharedBase", "accepts", "as_model_errors", "auto_class", "config_of", "context_limit", "decoder_of",
    "disable_dropout", "dtype_of", "encoder_of", "evaluating", "first_line", "float32_stream", "load_model",
    "load_tokenizer", "quiet_bars", "reads_media", "resolve_source", "short_name",
    "unwrapped", "widens_stream",
]  # fmt: skip
