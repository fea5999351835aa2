"""The names that `import dglx_dist as dx` offers."""

import subprocess
import sys
from pathlib import Path

import pytest

import dglx_dist
from dglx_dist import dataloading


@pytest.mark.parametrize("name", dglx_dist.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(dglx_dist, name).__doc__


def test_a_wrong_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = dglx_dist.no_such_thing
    assert not hasattr(dglx_dist, "__wrapped__")


def test_dir_lists_the_names() -> None:
    assert set(dglx_dist.__all__) < set(dir(dglx_dist))


def test_dgls_names_of_the_loaders_are_the_same_things() -> None:
    assert dglx_dist.DistNodeDataLoader is dglx_dist.DataLoader is dataloading.DataLoader
    assert dglx_dist.DistEdgeDataLoader is dataloading.DistEdgeDataLoader


def test_what_does_not_stand_in_for_dgl_says_so_when_it_is_imported() -> None:
    with pytest.raises(ImportError, match=r"SAINTSampler .* import it from dgl\.dataloading"):
        _ = dataloading.SAINTSampler
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = dataloading.no_such_thing


def test_importing_loads_neither_dgl_nor_torch() -> None:
    code = "import sys, dglx_dist; print(sorted({'dgl', 'torch', 'numba'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_no_public_name_is_that_of_a_room() -> None:
    # Importing a room sets it as an attribute of the package, which would hide the name.
    rooms = {path.stem for path in Path(dglx_dist.__file__).parent.iterdir()}
    assert not rooms & set(dglx_dist.__all__)
