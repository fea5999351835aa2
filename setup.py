"""Packaging of dglx_dist: `pip install .`, or `scripts/setup.sh` for the pinned environment."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

OGB = ["ogb>=1.3.6"]
AWS = ["boto3>=1.28"]
REPORT = ["plotly>=6"]
TENSORBOARD = ["tensorboard>=2.14"]
DEV = [
    # Strategy "lambda" in a cloud is tested against a local service, in which AWS's own runtime client runs.
    *AWS,
    *REPORT,
    *TENSORBOARD,
    "moto>=5",
    "awslambdaric>=3",
    "pytest>=8",
    "pytest-timeout>=2.2",
    "pytest-xdist>=3.5",
    "hypothesis>=6.90",
    "ruff>=0.5",
    "mypy>=1.10",
    "pandas-stubs",
    "scipy-stubs",
    "types-psutil",
]

setup(
    name="dglx_dist",
    version="0.1.0",
    description="Train a DGL model on many processes, with the strategy that suits graph and network",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["dglx_dist", "dglx_dist.*"]),
    package_data={"dglx_dist": ["py.typed"]},
    install_requires=[
        "torch>=2.4",
        "dgl>=1.1.3",
        # DGL imports them without asking for them: 1.1.3 packaging, 2.1.0 pandas.
        "packaging",
        "pandas>=2",
        "numpy>=1.26",
        "scipy>=1.11",
        "pyarrow>=14",
        "numba>=0.59",
        "pyzmq>=25",
        "pymetis>=2025.2.1",
        "kaminpar>=3.5",
        "psutil>=5.9",
        "safetensors>=0.4.5",
        "rich>=13.8",
        "typer>=0.16",
        "matplotlib>=3.8",
    ],
    extras_require={"ogb": OGB, "aws": AWS, "report": REPORT, "tensorboard": TENSORBOARD, "dev": DEV},
    entry_points={
        "console_scripts": ["dglx = dglx_dist.cli:main"],
        # Other packages announce plugins in these groups, as "name = package.module:Class":
        #   dglx_dist.partitioners   subclasses of dglx_dist.data.partition.base.Partitioner
        #   dglx_dist.strategies     subclasses of dglx_dist.strategies.base.Strategy
        #   dglx_dist.datasets       subclasses of dglx_dist.data.sources.DatasetSource
        # docs/extending.md shows one of each.
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
