"""Rows that a batch brought are returned when a script asks the graph for them, and are not kept for that."""

from __future__ import annotations

from pathlib import Path

from dglx_dist.comm.session import start_session
from dglx_dist.compat.dist_tensor import attached_rows, remember
from dglx_dist.graph.dist_graph import DistGraph
from tests.strategies.push_pull.test_loader import nodes_of, write_ring


def test_rows_of_a_batch_are_found_when_a_script_has_converted_its_blocks(tmp_path: Path) -> None:
    folder = write_ring(tmp_path / "parts", 1)
    with start_session():
        g = DistGraph(folder)
        batches = 0
        for nodes, _, blocks in nodes_of(g):
            remember(g, nodes, blocks)
            for place, block in enumerate(blocks):
                blocks[place] = block.int()
            del block
            found = attached_rows(g.ndata["feat"], nodes)
            assert found is not None
            assert found.data_ptr() == blocks[0].srcdata["feat"].data_ptr()
            assert attached_rows(g.ndata["feat"], nodes.clone()) is None
            assert attached_rows(g.ndata["small"], nodes) is None
            batches += 1
        assert batches > 3
        del blocks, found
        assert attached_rows(g.ndata["feat"], nodes) is None
        g.close()
