from dataclasses import asdict

import pytest

from dglx_dist.errors import JobError
from scripts.bench.driver import read_measured, read_measurement
from scripts.netlab.calibrate import Measured
from tests.bench.outcomes import epoch, plan_of

(A, _) = plan_of("a", "b").variants
TWO_EPOCHS = [asdict(epoch(0, 1.0)), asdict(epoch(1, 3.0))]


def test_epochs_are_those_of_all_ranks_and_memory_is_the_largest_rank_s() -> None:
    rank = {"epochs": TWO_EPOCHS, "bytes_outside_wire": 100, "accuracy": [[1, 0.5]], "extra": {"steps": 3}}
    found = read_measurement(A, 2, [rank | {"peak_bytes": 5}, rank | {"peak_bytes": 9}])
    assert (found.variant, found.repetition, found.seconds) == ("a", 2, 2.0)
    assert found.epochs == (epoch(0, 1.0), epoch(1, 3.0))
    assert (found.bytes_outside_wire, found.peak_bytes) == (100, 9)
    assert (found.accuracy, found.extra) == (((1.0, 0.5),), {"steps": 3})


def test_a_calibration_sees_one_epoch_of_one_server() -> None:
    report = {"epochs": TWO_EPOCHS, "bytes_outside_wire": 4_400_000}
    assert read_measured(A, [report] * 2) == Measured(seconds=2.0, bytes_per_server=1_100_000.0)
    report["bytes_outside_wire"] = None
    # No card: 2 MB payload per epoch, by two servers.
    assert read_measured(A, [report] * 2) == Measured(seconds=2.0, bytes_per_server=1_000_000.0)


@pytest.mark.parametrize("report", [{"peak_bytes": 5}, {"epochs": [], "peek_bytes": 5}])
def test_reports_of_another_kind_are_refused(report: dict[str, object]) -> None:
    with pytest.raises(JobError, match="it must report epochs, and of others only bytes_outside_wire"):
        read_measurement(A, 0, [report])
