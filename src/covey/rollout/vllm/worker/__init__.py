"""A folder of its own: `covey serve-vllm` puts it on the server's path, so that nothing else of Covey is importable there."""
