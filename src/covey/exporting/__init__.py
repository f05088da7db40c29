"""Export of models to formats of other programs: GGUF, for llama.cpp and tools built on it."""
