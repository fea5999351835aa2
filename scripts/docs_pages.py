"""Puts the pages of the documentation site into a folder: docs/, the README, and references from the code.

python scripts/docs_pages.py build/docs

MkDocs builds the site from that folder (scripts/docs.sh). Links to files outside of it become plain text.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from os.path import normpath, relpath
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import dglx_dist  # noqa: E402

_FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "SECURITY.md": "development/security.md",
    "CHANGELOG.md": "development/changelog.md",
}
"""Pages of the site that are files of the repository's root."""
_LEFT_OUT = shutil.ignore_patterns("raw", "*.json", "notes.md", "mkdocs.yml")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
GROUPS = {
    "Sessions and graphs": "init shutdown local_device distribute distribute_dataset DistGraph PartitionBook "
    "local_graph original_ids reverse_edge_ids node_split edge_split",
    "Partitioning": "partition_graph register_partitioner",
    "Loading": "DataLoader DistNodeDataLoader DistEdgeDataLoader TemporalNeighborSampler ClusterGCNSampler "
    "negative gather_pair_rows",
    "Plain PyTorch": "Halo",
    "Training": "wrap fit FitConfig FitResult reduce_mean global_mean nn",
    "Strategies": "choose_strategy register_strategy strategy_names",
    "Tensors and embeddings": "DistTensor DistEmbedding optim",
    "Evaluation and results": "evaluate layerwise_inference Predictor write_embeddings",
    "Checkpoints": "checkpoints save load Stopped",
    "Errors": "DglxError ConfigError DatasetError StorageError CheckpointError PeerError RemoteError "
    "UnknownNameError",
}
"""Public names by section of the API reference."""


def make_pages(folder: Path) -> None:
    """Write all pages of the site to ``folder``, which is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=_LEFT_OUT)
    for source, target in _FROM_ROOT.items():
        shutil.copy(ROOT / source, folder / target)
    (folder / "reference" / "api.md").write_text(make_api_page(), encoding="utf-8")
    (folder / "reference" / "cli.md").write_text(make_cli_page(), encoding="utf-8")
    for page in folder.rglob("*.md"):
        name = str(page.relative_to(folder))
        sources = {target: source for source, target in _FROM_ROOT.items()}
        text = page.read_text(encoding="utf-8")
        page.write_text(adapt_links(text, name, sources.get(name, f"docs/{name}"), folder), encoding="utf-8")


def adapt_links(text: str, name: str, source: str, folder: Path) -> str:
    """Return the text of page ``name`` with links as the site needs them.

    Args:
        name: Path of the page in the site.
        source: Path of the page in the repository, which its links are relative to.
        folder: Folder of the site's pages.
    """

    def adapt(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        inside = normpath(f"{Path(source).parent}/{path}")
        place = _FROM_ROOT.get(inside, inside.removeprefix("docs/") if inside.startswith("docs/") else "")
        if not place or not (folder / place).is_file():
            return str(label)
        if mark and place.endswith(".svg"):
            drawing = re.sub(r"<style>.*?</style>\n", "", (folder / place).read_text(), flags=re.DOTALL)
            return f'<div markdown="0">\n{drawing}</div>'
        return f"{mark}[{label}]({relpath(place, Path(name).parent)}{hash_mark}{anchor})"

    pieces, end = [], 0
    for fence in [*_FENCE.finditer(text), None]:
        pieces.append(_LINK.sub(adapt, text[end : fence.start() if fence else len(text)]))
        if fence:
            pieces.append(fence[0])
            end = fence.end()
    return "".join(pieces)


def remove_code(text: str) -> str:
    """Return the text of a page without its blocks of code."""
    return _FENCE.sub("", text)


def make_api_page() -> str:
    """Return the page with every public name, which mkdocstrings fills in."""
    parts = [
        "# API\n\nUse the names as `import dglx_dist as dx`. "
        "[Collective calls](collective_calls.md) lists the calls that every rank must make."
    ]
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [f"::: {find_path(name)}" for name in names.split()]
    return "\n\n".join(parts) + "\n"


def find_path(name: str) -> str:
    """Return the dotted path of the definition of a public name."""
    value = getattr(dglx_dist, name)
    if isinstance(value, ModuleType):
        return value.__name__
    module = sys.modules[getattr(value, "__module__", "dglx_dist.api")]
    return f"{module.__name__ if getattr(module, name, None) is value else 'dglx_dist.api'}.{name}"


def make_cli_page() -> str:
    """Return the page with every command and option."""
    from typer.main import get_command

    from dglx_dist.cli.app import app

    head = (
        "# Command line\n\nEvery command shows this text with `--help`. `--debug` shows tracebacks. "
        "Options of the ranks are the same under `torchrun ... -m dglx_dist.cli train`."
    )
    return "\n\n".join([head, *_describe(get_command(app), "dglx")]) + "\n"


def _describe(command: Any, name: str) -> Iterator[str]:
    if name != "dglx":
        yield f"## {name}"
        text = re.sub(r"\n +", "\n", command.help or "").replace("\f", "")
        yield text.strip()
    rows = [
        _describe_parameter(parameter)
        for parameter in command.params
        if not getattr(parameter, "hidden", False)
    ]
    rows = [row for row in rows if row]
    if rows:
        yield "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])
    for child, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _describe(inner, f"{name} {child}")


def _describe_parameter(parameter: Any) -> str:
    shown = ", ".join(f"`{text}`" for text in parameter.opts)
    if parameter.param_type_name == "argument":
        shown = f"`{parameter.metavar or parameter.name.upper()}`"
    if parameter.name == "help":
        return ""
    help_text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    if callable(default) or default in (None, False, "", ()):
        default = "required" if parameter.required else ""
    return f"| {shown} | {help_text} | {default if default in ('', 'required') else f'`{default}`'} |"


if __name__ == "__main__":
    make_pages(Path(sys.argv[1]))
