"""Worker extension, in a folder of its own: `covey serve-vllm` puts only this folder on the server's import path."""
