from __future__ import annotations

import numpy as np
import pytest

from dglx_dist.errors import ConfigError
from dglx_dist.graph.sparse_gradient import Parcel
from dglx_dist.graph.sparse_gradient_exchange import StepMessage, read_message


def parcel(*ids: int) -> Parcel:
    return Parcel(ids=np.array(ids, np.int64), rows=np.ones((len(ids), 2)), places=np.arange(len(ids)))


def test_what_is_read_is_what_was_sent() -> None:
    sent = StepMessage(sender=3, step=17, used=(True, False), parcels=(parcel(4, 2), parcel()))
    read = read_message(sent.name(), sent.arrays(), 2)
    assert (read.sender, read.step, read.used, read.problem) == (3, 17, (True, False), "")
    assert [part.ids.tolist() for part in read.parcels] == [[4, 2], []]
    assert [part.places.tolist() for part in read.parcels] == [[0, 1], []]
    assert sum(array.nbytes for array in sent.arrays()) == 2 * (8 + 2 * 8)


def test_a_problem_travels_without_rows_and_keeps_its_words() -> None:
    sent = StepMessage(sender=0, step=1, used=(True,), parcels=(), problem="no  targets: set it")
    read = read_message(sent.name(), sent.arrays(), 1)
    assert (read.problem, read.parcels) == ("no  targets: set it", ())


def test_another_number_of_embeddings_is_refused() -> None:
    sent = StepMessage(sender=1, step=1, used=(True,), parcels=(parcel(1),))
    with pytest.raises(ConfigError, match=r"rank 1 sent gradients of 1 embeddings .* optimiser of 2"):
        read_message(sent.name(), sent.arrays(), 2)
