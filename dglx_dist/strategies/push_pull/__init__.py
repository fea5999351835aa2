"""Push-pull parallelism (P3)."""
