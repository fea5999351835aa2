"""``dglx train``."""


def train() -> None:
    """Train."""
