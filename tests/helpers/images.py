"""Small images, as build contexts of functions."""

from pathlib import Path


def write_image(folder: Path, code: str) -> Path:
    """Write an image whose handler is ``ours.handler`` of ``code``."""
    target = folder / "ours"
    target.mkdir()
    (target / "ours.py").write_text(code)
    (target / "Dockerfile").write_text('FROM scratch\nCMD ["ours.handler"]\n')
    return target
