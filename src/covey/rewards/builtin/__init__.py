"""Built-in rewards, one file each; `registry` maps their names."""
