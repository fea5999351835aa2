"""The site builds without a warning, loads nothing from elsewhere, and its references are complete."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dglx_dist
from dglx_dist.cli.app import app
from scripts import diagrams, docs_pages
from tests.helpers.sources import ROOT

GENERATED = ("docs/reference/api.md", "docs/reference/cli.md")
"""Pages that exist in the site only."""


class Loads(HTMLParser):
    """Collects what a browser loads for a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        name = {"script": "src", "img": "src", "iframe": "src", "link": "href"}.get(tag)
        if name and values.get(name) and values.get("rel") != "canonical":
            self.addresses.append(str(values[name]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocstrings", reason="it needs Python 3.11")
    folder = tmp_path_factory.mktemp("site")
    docs_pages.make_pages(folder / "pages")
    config = (ROOT / "docs" / "mkdocs.yml").read_text()
    places = {
        "../build/docs": "pages",
        "../build/site": "site",
        "[..]": f"[{ROOT}]",
        "../scripts": f"{ROOT}/scripts",
    }
    for written, here in places.items():
        config = config.replace(written, here)
    (folder / "mkdocs.yml").write_text(config)
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(folder / "mkdocs.yml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 35
    foreign = set()
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        foreign |= {address for address in loads.addresses if re.match(r"(https?:)?//", address)}
    assert foreign == set()
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", sheets) == []


def test_every_public_name_is_described(site: Path) -> None:
    named = {name for names in docs_pages.GROUPS.values() for name in names.split()}
    assert named == set(dglx_dist.__all__)
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert ":func:" not in page
    assert [name for name in named if f'id="{docs_pages.find_path(name)}"' not in page] == []


def test_every_command_and_option_is_described() -> None:
    page = docs_pages.make_cli_page()
    names = [str(command.name or command.callback.__name__) for command in app.registered_commands]
    assert [name for name in names if f"## dglx {name}\n" not in page] == []
    for option in ("--install-dgl", "--strategy", "--version", "--bandwidth-external", "--python"):
        assert f"`{option}`" in page


def test_diagrams_are_those_of_the_script() -> None:
    files = diagrams.make_files()
    assert {path.name for path in diagrams.FOLDER.iterdir()} == set(files)
    assert [name for name, text in files.items() if (diagrams.FOLDER / name).read_text() != text] == []


def test_every_link_leads_to_a_file() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", docs_pages.remove_code(page.read_text()))
        if not re.match(r"[a-z]+:", target)
        and not (page.parent / target).exists()
        and str((page.parent / target).resolve().relative_to(ROOT)) not in GENERATED
    ]
    assert broken == []
