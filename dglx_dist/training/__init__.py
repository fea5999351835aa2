"""Training loop, exact evaluation, metrics, checkpoints and ready-made models."""
