"""Training loop, evaluation, inference, checkpoints and metrics."""
