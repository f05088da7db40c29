"""Models written as other programs read them: GGUF, for llama.cpp and what is built on it."""
