import pytest

from dglx_dist.data.sources import refuse_unknown, whole_number
from dglx_dist.errors import ConfigError


def test_known_options_pass_and_others_get_the_nearest_name() -> None:
    refuse_unknown({"index": 1}, ["index", "split"], "dgl")
    with pytest.raises(ConfigError, match="'dgl' has no option 'indx'; did you mean 'index'"):
        refuse_unknown({"indx": 1}, ["index", "split"], "dgl")
    with pytest.raises(ConfigError, match="known: none"):
        refuse_unknown({"index": 1}, [], "npz")


def test_whole_numbers_come_as_numbers_or_as_text() -> None:
    assert whole_number({"index": "12"}, "index") == 12
    assert whole_number({"index": 0}, "index") == 0
    assert whole_number({}, "index") is None
    for wrong in (-1, 1.5, "first"):
        with pytest.raises(ConfigError, match="must be a whole number, 0 or more"):
            whole_number({"index": wrong}, "index")
