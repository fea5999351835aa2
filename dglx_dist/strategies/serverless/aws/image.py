"""Build context of the container image in which workers run as AWS Lambda functions."""

import importlib.metadata
import shutil
from pathlib import Path

import dglx_dist
from dglx_dist.errors import ConfigError

HANDLER = "dglx_dist.strategies.serverless.aws.function.handler"
_LIBRARIES = ("numpy", "numba", "pyzmq", "safetensors")
_DOCKERFILE = """\
# Workers of dglx_dist {version}. About 1 GB; AWS accepts 10 GB.
FROM public.ecr.aws/lambda/python:{python}
RUN pip install --no-cache-dir torch=={torch} --index-url https://download.pytorch.org/whl/cpu \\
 && pip install --no-cache-dir {libraries}
COPY dglx_dist ${{LAMBDA_TASK_ROOT}}/dglx_dist
# A function can write to /tmp only.
ENV OMP_NUM_THREADS=1 NUMBA_CACHE_DIR=/tmp/numba
CMD ["{handler}"]
"""


def write_context(folder: Path, python: str = "3.12") -> None:
    """Write a Dockerfile and the package's code to ``folder``, which must not exist or be empty.

    Args:
        python: Version of Python in the image.

    Raises:
        ConfigError: the folder has files.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; give another folder, or remove its files")
    source = Path(dglx_dist.__file__).parent
    shutil.copytree(source, folder / "dglx_dist", ignore=shutil.ignore_patterns("__pycache__"))
    versions = {name: importlib.metadata.version(name) for name in ("torch", *_LIBRARIES)}
    text = _DOCKERFILE.format(
        version=dglx_dist.__version__,
        python=python,
        torch=versions["torch"].partition("+")[0],
        libraries=" ".join(f"{name}=={versions[name]}" for name in _LIBRARIES),
        handler=HANDLER,
    )
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
