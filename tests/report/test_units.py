import pytest

from dglx_dist.report.tables import plural, readable_bytes, readable_count, readable_percent, readable_seconds


@pytest.mark.parametrize(
    ("num_bytes", "written"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1536, "1.54 KB"),
        (999_600, "1 MB"),
        (12_345_678_901, "12.3 GB"),
    ],
)
def test_bytes(num_bytes: int, written: str) -> None:
    assert readable_bytes(num_bytes) == written


def test_counts_have_blanks_between_thousands() -> None:
    assert readable_count(1234567.8) == "1 234 568"


def test_seconds_keep_the_digits_that_matter() -> None:
    assert (readable_seconds(0.0123), readable_seconds(75.31)) == ("0.012", "75.3")


def test_a_share_that_was_not_measured_is_blank() -> None:
    assert (readable_percent(None), readable_percent(0.8125)) == ("", "81.2 %")


def test_one_is_no_plural() -> None:
    assert [plural(count, "rank") for count in (0, 1, 2, "?")] == ["0 ranks", "1 rank", "2 ranks", "? ranks"]
