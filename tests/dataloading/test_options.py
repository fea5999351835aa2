import warnings

import pytest

from dglx_dist.dataloading.step_loader import read_options, whole_number
from dglx_dist.errors import ConfigError


def test_defaults() -> None:
    assert read_options({}).depth == 1


def test_as_many_batches_ahead_as_there_are_threads() -> None:
    assert read_options({"num_threads": 3}).depth == 3
    assert read_options({"num_threads": 3, "depth": 5}).depth == 5
    assert read_options({"num_threads": 0}).depth == 1


@pytest.mark.parametrize("name", ["use_uva", "use_ddp", "num_workers", "pin_memory", "persistent_workers"])
def test_needless_options_of_dgl_are_warned_about_once_they_ask_for_something(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=True has no effect"):
        read_options({name: True})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_options({name: False})


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no option 'num_thread'; did you mean 'num_threads'"):
        read_options({"num_thread": 2})


@pytest.mark.parametrize(("name", "value"), [("depth", 0), ("depth", 1.5), ("num_threads", -1), ("seed", -1)])
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        read_options({name: value})


@pytest.mark.parametrize("device", ["gpu", 1.5])
def test_what_is_no_device_is_refused(device: object) -> None:
    with pytest.raises(ConfigError, match=f"device={device!r} is no device"):
        read_options({"device": device})
    assert read_options({"device": "meta"}).device == "meta"


def test_whole_number() -> None:
    assert whole_number("batch_size", 3, least=1) == 3
    with pytest.raises(ConfigError, match="batch_size=True"):
        whole_number("batch_size", True, least=1)
