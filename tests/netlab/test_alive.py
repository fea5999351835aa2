import os
import subprocess
import sys
from pathlib import Path

from scripts.netlab import alive


def test_who_never_came_has_not_ended(tmp_path: Path) -> None:
    assert not alive.has_ended(tmp_path / "sign")


def test_who_holds_lives_and_who_lets_go_has_ended(tmp_path: Path) -> None:
    held = alive.hold(tmp_path / "sign")
    assert not alive.has_ended(tmp_path / "sign")
    os.close(held)
    assert alive.has_ended(tmp_path / "sign")


def test_a_killed_process_has_ended(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from scripts.netlab import alive; "
    program += "alive.hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "sign")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert not alive.has_ended(tmp_path / "sign")
        process.kill()
        process.wait(timeout=30)
        assert alive.has_ended(tmp_path / "sign")


def test_children_do_not_hold_what_their_parent_held(tmp_path: Path) -> None:
    held = alive.hold(tmp_path / "sign")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        os.close(held)
        assert alive.has_ended(tmp_path / "sign")
        assert child.poll() is None
