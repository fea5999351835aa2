"""DGL's own tests/distributed pass here, unedited, but for those that docs/compat.md names.

Whoever runs this fetches them: ``DGL_SOURCE`` is a checkout of DGL at the tag of the installed version.
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
PAGE = (ROOT / "docs" / "compat.md").read_text()
ROWS = re.findall(r"(?m)^\| `(test_\w+)\.py` \| (\d+) of (\d+) \|(.*)$", PAGE)


@pytest.mark.wide
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not SOURCE.name, reason="DGL_SOURCE is not set")
@pytest.mark.skipif(dgl.__version__ != "1.1.3", reason="the table is of DGL 1.1.3")
@pytest.mark.parametrize(("file", "passed", "count", "why"), ROWS, ids=[row[0] for row in ROWS])
def test_what_passes_is_what_the_page_says(
    file: str, passed: str, count: str, why: str, tmp_path: Path
) -> None:
    tests = SOURCE.absolute() / "tests"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.compat.dgl_adapter", "-p", "no:cacheprovider"),
            *("-q", "--timeout", "250", "--rootdir", str(tests), "--override-ini", "addopts="),
            *("--junitxml", str(tmp_path / "report.xml"), str(tests / "distributed" / f"{file}.py")),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tests}"},
        capture_output=True,
        text=True,
    )
    found = [
        one
        for one in ElementTree.parse(tmp_path / "report.xml").iter("testcase")
        if not one.findall("skipped")
    ]
    failed = [one for one in found if [*one.findall("failure"), *one.findall("error")]]
    assert {re.match(r"[\w.]*", one.get("name", ""))[0].split(".")[-1] for one in failed} == set(
        re.findall(r"`(test_\w+)`", why)
    ), done.stdout[-8000:]
    assert (len(found) - len(failed), len(found)) == (int(passed), int(count))
