import pytest

from dglx_dist.errors import UnknownNameError
from dglx_dist.training.models import MODEL_KINDS, RELATIONAL_KINDS, check_kind


def test_known_kinds_pass() -> None:
    for kind in MODEL_KINDS:
        check_kind(kind)


def test_a_wrong_kind_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="no model 'sag'; did you mean 'sage'"):
        check_kind("sag")


def test_a_relational_kind_passes_where_such_are_known_only() -> None:
    check_kind("rgcn", MODEL_KINDS + RELATIONAL_KINDS)
    with pytest.raises(UnknownNameError, match="known: sage, gcn, sgc, gat, mlp"):
        check_kind("rgcn")
