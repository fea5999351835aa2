"""Control groups that limit cores."""

from pathlib import Path

import pytest

from scripts.netlab import cgroups
from tests.helpers.cgroups import quota_of


def _as_files(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("0")
    return folder


V1, V2 = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",)


@pytest.mark.parametrize("names", [V1, V2], ids=["version 1", "version 2"])
@pytest.mark.parametrize(
    ("share", "quota_us", "period_us"), [(0.25, 2_500, 10_000), (1.5, 15_000, 10_000), (0.02, 1_000, 50_000)]
)
def test_periods_are_short_and_no_quota_is_below_a_millisecond(
    names: tuple[str, ...], share: float, quota_us: int, period_us: int, tmp_path: Path
) -> None:
    """Both versions of the kernel's files, as plain files."""
    folder = _as_files(tmp_path / "group", names)
    cgroups.set_quota(folder, share)
    written = " ".join((folder / name).read_text() for name in names)
    assert written == f"{quota_us} {period_us}"
    assert quota_of(folder) == pytest.approx(share)


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("cgroup {root}/cpu cgroup rw,cpu,cpuacct 0 0\n", ["cpu/jobs/one", "cpu"]),
        ("cgroup {root}/memory cgroup rw,memory 0 0\n", []),
        ("cgroup2 {root}/unified cgroup2 rw,nsdelegate 0 0\n", ["unified/session", "unified"]),
        ("tmpfs {root} tmpfs rw 0 0\n", []),
    ],
)
def test_groups_are_made_below_our_own_or_at_the_top(
    mounts: str, expected: list[str], tmp_path: Path
) -> None:
    for folder in ("cpu/jobs/one", "memory", "unified/session"):
        (tmp_path / folder).mkdir(parents=True)
    own = "4:cpu,cpuacct:/jobs/one\n3:memory:/\n0::/session\n"
    result = cgroups.parents(mounts.format(root=tmp_path), own)
    assert result == [tmp_path / folder for folder in expected]
