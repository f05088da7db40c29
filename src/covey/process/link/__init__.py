"""A process group with the workers of a server, in a folder of its own: `covey serve-vllm` puts only this folder on its import path."""
