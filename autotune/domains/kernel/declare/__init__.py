"""What the user says of a kernel, in code, in TOML or by ``triton.autotune``: space, key, reference, inputs."""
