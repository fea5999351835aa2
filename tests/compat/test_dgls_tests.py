"""DGL's own tests/distributed pass here, unedited, but for those that docs/reference/compat.md names.

Whoever runs this fetches them: ``DGL_SOURCE`` is a checkout of DGL at the tag of the installed version, or at
v2.4.0 with DGL 2.1.0 installed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import dgl
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(os.environ.get("DGL_SOURCE", ""))
PAGE = (ROOT / "docs" / "reference" / "compat.md").read_text()
COLUMNS = {"1.1.3": "1.1.3", "2.1.0": "2.1.0", "2.4.0": "2.1.0"}
"""Version of the sources, in the order of the page, to the installed one."""
ROWS = re.findall(r"(?m)^\| `(test_\w+)\.py` \| ([\d of|-]+?) \|( [^\d-].*)$", PAGE)


@pytest.mark.wide
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not SOURCE.name, reason="DGL_SOURCE is not set")
@pytest.mark.parametrize(("file", "counts", "why"), ROWS, ids=[row[0] for row in ROWS])
def test_what_passes_is_what_the_page_says(file: str, counts: str, why: str, tmp_path: Path) -> None:
    version = re.search(r'__version__ = "(.*)"', (SOURCE / "python/dgl/_ffi/libinfo.py").read_text())[1]
    if COLUMNS.get(version) != dgl.__version__:
        pytest.skip(f"no column for the sources of {version} with DGL {dgl.__version__}")
    counted = counts.split("|")[[*COLUMNS].index(version)].strip()
    if counted == "-":
        pytest.skip("not counted yet")
    passed, count = counted.split(" of ")
    tests = SOURCE.absolute() / "tests"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.compat.dgl_adapter", "-p", "no:cacheprovider"),
            *("-q", "--timeout", "550", "--rootdir", str(tests), "--override-ini", "addopts="),
            *("--junitxml", str(tmp_path / "report.xml"), str(tests / "distributed" / f"{file}.py")),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tests}"},
        capture_output=True,
        text=True,
    )
    results = [
        item
        for item in ElementTree.parse(tmp_path / "report.xml").iter("testcase")
        if not item.findall("skipped")
    ]
    failed = [result for result in results if [*result.findall("failure"), *result.findall("error")]]
    assert {re.match(r"[\w.]*", item.get("name", ""))[0].split(".")[-1] for item in failed} <= set(
        re.findall(r"`(test_\w+)`", why)
    ), done.stdout[-8000:]
    assert (len(results) - len(failed), len(results)) == (int(passed), int(count))
