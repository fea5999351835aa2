from dglx_dist.data.partition.base import PartitionOptions
from dglx_dist.data.partition.simple import Feature, Hash
from tests.data.partition.graphs import AUTHORS_AND_PAPERS, flat


def test_structure_by_hash_and_features_by_column() -> None:
    assignment = Feature(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    hashed = Hash(PartitionOptions()).assign(AUTHORS_AND_PAPERS, 3, 0)
    assert flat(assignment.part_of) == flat(hashed.part_of)
    assert assignment.parameters["features"] == "columns"
    assert "features" not in hashed.parameters
