"""Every public name of ``dgl.distributed``: what stands for it here, or why it cannot be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dglx_dist.compat import (
    book,
    data_loader,
    embedding,
    graph,
    kvstore,
    loaders,
    optim,
    partition,
    policy,
    sampling,
    session,
    split,
    tensor,
)
from dglx_dist.errors import PeerError
from dglx_dist.records import EDGE_TYPE, NODE_TYPE

_SERVERS = "there are no server processes: every rank serves its share; start the script with torchrun"
_RPC = (
    "no code and no pickles travel between ranks; register a handler of arrays with "
    "dglx_dist.cluster.session.current_session().rpc.register"
)
_GRAPHBOLT = "there is one format for all strategies, and no GraphBolt; leave it out"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("DistGraphServer", "KVServer", "ServerState", "start_server", "connect_to_server"), _SERVERS
        ),
        **dict.fromkeys(("shutdown_servers", "read_ip_config"), _SERVERS),
        **dict.fromkeys(
            ("set_rank", "set_num_machines", "set_machine_id", "set_num_client"),
            "torchrun tells each rank who it is",
        ),
        **dict.fromkeys(
            (
                *("Request", "Response", "register_service", "create_sender", "create_receiver"),
                *("finalize_sender", "finalize_receiver", "wait_for_senders", "connect_receiver"),
                *("send_request", "recv_request", "send_response", "recv_response", "remote_call"),
                *("send_request_to_machine", "remote_call_to_machine", "fast_pull"),
            ),
            _RPC,
        ),
        "copy_data_to_shared_memory": "the ranks of a server share their rows already",
        **dict.fromkeys(("dgl_partition_to_graphbolt", "gb_convert_single_dgl_partition"), _GRAPHBOLT),
        **dict.fromkeys(
            ("NodeCollator", "EdgeCollator"),
            "the distributed loaders make their batches themselves; use these",
        ),
    }
)
"""Name to the reason, which calling the name or deriving from it raises as a ConfigError."""

SUPPORTED: Mapping[str, Any] = MappingProxyType(
    {
        "initialize": session.initialize,
        "exit_client": session.exit_client,
        "get_rank": session.get_rank,
        "get_num_client": session.get_num_client,
        "get_num_machines": session.get_num_machines,
        "get_machine_id": session.get_machine_id,
        "get_group_id": session.get_group_id,
        "client_barrier": session.client_barrier,
        "DistConnectError": PeerError,
        "DistGraph": graph.DistGraph,
        "DistTensor": tensor.DistTensor,
        "DistEmbedding": embedding.DistEmbedding,
        "optim": optim,
        "node_split": split.node_split,
        "edge_split": split.edge_split,
        "DistDataLoader": data_loader.DistDataLoader,
        "DistNodeDataLoader": loaders.DistNodeDataLoader,
        "DistEdgeDataLoader": loaders.DistEdgeDataLoader,
        "partition_graph": partition.partition_graph,
        "load_partition": partition.load_partition,
        "load_partition_book": partition.load_partition_book,
        "load_partition_feats": partition.load_partition_feats,
        "GraphPartitionBook": book.GraphPartitionBook,
        "RangePartitionBook": book.RangePartitionBook,
        "PartitionPolicy": policy.PartitionPolicy,
        "NodePartitionPolicy": policy.NodePartitionPolicy,
        "EdgePartitionPolicy": policy.EdgePartitionPolicy,
        "KVClient": kvstore.KVClient,
        "sample_neighbors": sampling.sample_neighbors,
        "sample_etype_neighbors": sampling.sample_etype_neighbors,
        "in_subgraph": sampling.in_subgraph,
        "find_edges": sampling.find_edges,
    }
)
"""Name to what stands for it."""

CONSTANTS: Mapping[str, Any] = MappingProxyType(
    {"DEFAULT_NTYPE": NODE_TYPE, "DEFAULT_ETYPE": EDGE_TYPE, "MAX_QUEUE_SIZE": session.MAX_QUEUE_SIZE}
)
"""What scripts import from ``dgl.distributed.constants``; from DGL 2.4 on the package has them as well."""

OF_LOADERS = ("DistGraph", "DistDataLoader", "DistNodeDataLoader", "DistEdgeDataLoader")
"""Names that modules of ``dgl.dataloading`` have as well."""


def offered() -> dict[str, Any]:
    """Return every name to what stands for it; a refused one raises when it is used."""
    gone = {name: session.refused(name, reason) for name, reason in REFUSED.items()}
    return {**SUPPORTED, **CONSTANTS, **gone}
