"""Print the results of ``dgl.distributed`` as JSON, once with DGL's own and once with its replacement.

The graphs are in one part, so that edges keep the ids that they had.
"""

import argparse
import json
import warnings

import dgl
import dgl.distributed as dist
import numpy as np
import torch as th
from dgl.dataloading import DistEdgeDataLoader, DistNodeDataLoader


def refuses(action):
    try:
        action()
    except Exception:
        return True
    return False


def numbers(value):
    if isinstance(value, th.Tensor):
        # DGL keeps masks as uint8.
        is_mask = value.dtype in (th.bool, th.uint8)
        return [value.long().tolist(), "mask"] if is_mask else [value.tolist(), str(value.dtype)]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    if isinstance(value, dict):
        return {str(key): numbers(item) for key, item in value.items()}
    return value


def ends(graph, etype=None):
    # DGL leaves out the types of which nothing was drawn.
    if etype not in (None, *graph.etypes):
        return []
    columns = [*graph.edges(etype=etype), graph.edges[etype or "_E"].data[dgl.EID]]
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def about_graph(g):
    nodes = th.tensor([3, 0, 7])
    schemes = {
        name: [list(node_attr_scheme.shape), str(node_attr_scheme.dtype)]
        for name, node_attr_scheme in g.node_attr_schemes().items()
    }
    return {
        "sizes": [g.num_nodes(), g.num_edges(), g.number_of_nodes(), g.number_of_edges()],
        "of one type": [g.num_nodes("_N"), g.num_edges("_E"), g.num_edges(("_N", "_E", "_N"))],
        "types": [g.ntypes, g.etypes, g.canonical_etypes, g.to_canonical_etype("_E")],
        "type ids": [g.get_ntype_id(None), g.get_ntype_id("_N"), g.get_etype_id("_E")],
        "dtypes": [str(g.idtype), str(g.device), g.is_pinned(), g.rank()],
        "names": [sorted(g.ndata), sorted(g.edata), "features" in g.ndata, "nothing" in g.ndata],
        "schemes": {name: scheme for name, scheme in schemes.items() if not name.endswith("mask")},
        "edge schemes": list(g.edge_attr_schemes()["mark"].shape),
        "in degrees": [g.in_degrees(), g.in_degrees(nodes), g.in_degrees(nodes[:1])],
        "out degrees": [g.out_degrees(), g.out_degrees(nodes)],
        "local": [g.local_partition.num_nodes(), g.local_partition.num_edges()],
        "views": [len(g.ndata), g.nodes["_N"].data["labels"][nodes], g.ndata["features"].shape],
        "wrong": [
            refuses(lambda: g.num_nodes("nobody")),
            refuses(lambda: g.to_canonical_etype("nothing")),
            refuses(lambda: g.edge_subgraph(nodes, store_ids=False)),
        ],
    }


def about_edges(g):
    order, some = th.arange(g.num_edges()), th.tensor([8, 1, 40, 2, 5, 30, 7, 0, 3])
    written = dist.DistTensor(
        (g.num_edges(),), th.int64, "written", part_policy=g.get_edge_partition_policy("_E")
    )
    written[some] = th.arange(9)
    induced, block = g.edge_subgraph(some), g.edge_subgraph(some, relabel_nodes=False)
    source, destination = induced.edges()
    return {
        "ends": g.find_edges(order),
        "ends by function": dist.find_edges(g, order),
        "marks": [g.edata["mark"][some], g.edata["mark"][3:7], g.edata["mark"].local_partition],
        "written": [written[order], written.local_partition, g._client.pull(written.kvstore_key, some)],
        "local": sorted(
            zip(
                *(item.tolist() for item in (*g.local_partition.edges(), g.local_partition.edata[dgl.EID])),
                strict=True,
            )
        ),
        "induced": sorted(
            zip(
                induced.ndata[dgl.NID][source].tolist(),
                induced.ndata[dgl.NID][destination].tolist(),
                strict=True,
            )
        ),
        "induced nodes": [induced.num_nodes(), block.num_nodes(), sorted(induced.ndata[dgl.NID].tolist())],
        "whole": ends(block),
    }


def about_sampling(g):
    nodes = th.tensor([3, 0, 7, 20])
    every = dist.sample_neighbors(g, nodes, -1)
    few = dist.sample_neighbors(g, nodes, 2, replace=False)
    many = dist.sample_neighbors(g, nodes, 4, replace=True)
    weighed = dist.sample_neighbors(g, nodes, -1, prob="weight")
    source, destination = few.edges()
    edges = g.find_edges(few.edata[dgl.EID])
    return {
        "all": ends(every),
        "all by method": ends(g.sample_neighbors(nodes, -1)),
        "all by type": ends(dist.sample_etype_neighbors(g, nodes, -1)),
        "in subgraph": ends(dist.in_subgraph(g, nodes)),
        "of a dict": ends(dist.sample_neighbors(g, {"_N": nodes}, -1)),
        "few": [few.in_degrees().tolist(), few.num_nodes()],
        "ids are right": bool((edges[0] == source).all() and (edges[1] == destination).all()),
        "with replacement": many.in_degrees().tolist(),
        "weight 0 is never drawn": ends(weighed),
    }


def about_tensors(g):
    number = g.num_nodes()
    zeros = dist.DistTensor((number, 2), th.float32)
    ones = dist.DistTensor((number,), th.int64, "ones", lambda shape, dtype: th.ones(shape, dtype=dtype))
    again = dist.DistTensor((number,), th.int64, "ones")
    policy = g.get_node_partition_policy("_N")
    named = dist.DistTensor((number, 3), th.float32, "named", part_policy=policy, persistent=True)
    named[th.tensor([1, 4])] = th.tensor([[1.0, 2, 3], [4, 5, 6]])
    again[2:5] = th.tensor([7, 8, 0])
    first = dist.DistTensor((number,), th.bool, "first")
    second = dist.DistTensor((number,), th.bool, "second")
    first[th.tensor([0, 3])] = th.tensor([True, True])
    second[th.tensor([3, 5])] = th.tensor([True, True])
    both = first | second
    return {
        "zeros": [zeros[th.tensor([0, 5])], zeros.shape, len(zeros), str(zeros.dtype)],
        "ones": [ones[0:6], ones.count_nonzero(), ones.name, ones.tensor_name],
        "named": [named[[1, 4, 4]], named[np.array([0])], named[4], named.shape],
        "same rows": [again[th.arange(6)], ones[th.arange(6)]],
        "or": [both[th.arange(7)], both.count_nonzero()],
        "policy": [policy.policy_str, policy.type_name, policy.part_id, policy.get_size(), policy.is_node],
        "policy's ids": [
            policy.to_partid(th.arange(3)),
            policy.to_local(th.arange(3)),
            policy.get_part_size(),
        ],
        "local": named.local_partition[4],
        "wrong": [
            refuses(lambda: dist.DistTensor((number + 1,), th.float32)),
            refuses(lambda: dist.DistTensor((number,), th.float32, "ones")),
            refuses(lambda: dist.DistTensor((number, 2), th.int64, "ones")),
            refuses(lambda: dist.DistTensor((number,), th.float32, persistent=True)),
        ],
    }


def about_splits(g):
    book, number = g.get_partition_book(), g.num_nodes()
    mask = g.ndata["train_mask"][th.arange(number)]
    every = th.ones(g.num_edges(), dtype=th.bool)
    chosen = dist.DistTensor((g.num_edges(),), th.bool, part_policy=g.get_edge_partition_policy("_E"))
    chosen[th.tensor([31, 2, 17])] = every[:3]
    return {
        "nodes": [
            dist.node_split(g.ndata["train_mask"], book),
            dist.node_split(g.ndata["train_mask"]),
            dist.node_split(g.ndata["train_mask"], book, force_even=False),
            dist.node_split(mask.bool(), book),
        ],
        "number of edges": [len(dist.edge_split(every, book)), len(dist.edge_split(every, book, rank=0))],
        "edges": [
            dist.edge_split(th.arange(g.num_edges()) % 7 < 2, book),
            dist.edge_split(chosen, book),
        ],
        "book": [book.partid, book.num_partitions(), book.metadata(), book.ntypes, book.canonical_etypes],
        "wrong": [
            refuses(lambda: dist.node_split(mask[:-1].bool(), book)),
            refuses(lambda: dist.node_split(mask.bool(), book, ntype="nobody")),
        ],
    }


def about_loaders(g):
    nodes = th.tensor([3, 0, 7, 20, 21])
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(2)
    batches = []
    for inputs, outputs, blocks in DistNodeDataLoader(g, nodes, sampler, batch_size=2, shuffle=False):
        sizes = [[block.num_src_nodes(), block.num_dst_nodes(), block.num_edges()] for block in blocks]
        same = bool(
            (blocks[0].srcdata[dgl.NID] == inputs).all() and (blocks[-1].dstdata[dgl.NID] == outputs).all()
        )
        batches.append([outputs, sorted(inputs.tolist()), sizes, same, str(inputs.dtype)])
    last = [
        len(outputs)
        for _, outputs, _ in DistNodeDataLoader(g, nodes, sampler, batch_size=2, drop_last=True, shuffle=True)
    ]
    by_hand = DistNodeDataLoader(g, nodes, sampler, batch_size=2, drop_last=True)
    iter(by_hand)
    again = [len(next(by_hand)[1]), by_hand.expected_idxs, len(next(by_hand)[1])]
    # Until iter() begins another epoch.
    again += [refuses(lambda: next(by_hand)), refuses(lambda: next(by_hand)), len(list(by_hand))]
    th.manual_seed(5)
    plain = dist.DistDataLoader(nodes, 2, shuffle=True, collate_fn=lambda items: items)
    shuffled = [list(plain), list(plain)]
    pairs = []
    order = th.tensor([8, 1, 40, 2, 5])
    negative = dgl.dataloading.negative_sampler.Uniform(2)
    for loader in (
        DistEdgeDataLoader(g, order, sampler, batch_size=5),
        DistEdgeDataLoader(g, order, sampler, batch_size=5, negative_sampler=negative),
    ):
        for batch in loader:
            positive, blocks = batch[1], batch[-1]
            seeds, (source, destination) = positive.ndata[dgl.NID], positive.edges()
            pairs.append(
                [
                    sorted(zip(seeds[source].tolist(), seeds[destination].tolist(), strict=True)),
                    sorted(g.edata["mark"][positive.edata[dgl.EID]].tolist()),
                    [
                        sorted(graph.edata[dgl.EID].tolist())
                        for graph in (positive, *blocks)
                        if len(batch) == 3
                    ],
                    bool((seeds == blocks[-1].dstdata[dgl.NID]).all()),
                    [graph.num_edges() for graph in batch[1:-1]],
                ]
            )
    pairs[0].append(sorted(seeds.tolist()) if len(pairs) == 1 else [])
    return {"nodes": batches, "dropped": last, "by hand": again, "plain": shuffled, "edges": pairs}


def about_embeddings(g):
    number = g.num_nodes()
    embedding = dist.DistEmbedding(number, 3, "embedding")
    second = dist.DistEmbedding(number, 3, "other", lambda shape, dtype: th.full(shape, 0.5, dtype=dtype))
    adagrad = dist.optim.SparseAdagrad([embedding], lr=0.1)
    adam = dist.optim.SparseAdam([second], lr=0.1, betas=(0.8, 0.9))
    optimizers = [adagrad, adam]
    ids, weights = th.tensor([4, 0, 9]), th.tensor([1.0, -2.0, 3.0])
    for _ in range(3):
        loss = ((embedding(ids) + second(ids)) * weights).sum()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        # On CPUs DGL's Adagrad keeps the root of what it should keep, so its second step is another one.
        optimizers = [adam]
        embedding.reset_trace()
    with th.no_grad():
        rows = embedding(th.arange(11))
    return {
        "adagrad": [[round(item, 5) for item in row] for row in rows.tolist()],
        "adam": [[round(item, 5) for item in row] for row in second.weight[th.arange(11)].tolist()],
        "facts": [embedding.name, embedding.num_embeddings, embedding.embedding_dim, embedding.weight.shape],
        "requires grad": [embedding(ids).requires_grad, rows.requires_grad],
    }


def about_store(g):
    client = g._client
    client.barrier()
    name = g.ndata["labels"].kvstore_key
    dtype, shape, _ = client.get_data_meta(name)
    return {
        "meta": [str(dtype), list(shape), name in client.data_name_list(), name in client.gdata_name_list()],
        "rows": client.pull(name, th.tensor([2, 1])),
        "nonzero": client.count_nonzero(name),
    }


def about_files(config):
    results = {}
    for part in range(2):
        graph, nodes, edges, _, name, ntypes, etypes = dist.load_partition(config, part)
        inner = graph.ndata["inner_node"].bool()
        results[f"part {part}"] = [
            [graph.num_nodes(), graph.num_edges(), graph.ndata[dgl.NID][inner], name, ntypes, etypes],
            {key: rows.double() for key, rows in sorted(nodes.items())},
            {key: rows.double() for key, rows in sorted(edges.items())},
        ]
        results[f"feats {part}"] = [sorted(dist.load_partition_feats(config, part, load_edges=False)[0])]
        results[f"book {part}"] = about_book(dist.load_partition_book(config, part))
    results["wrong"] = refuses(lambda: dist.load_partition(config, 2))
    return results


def about_book(loaded):
    book, name, ntypes, etypes = loaded
    nodes = [book.partid2nids(part, ntype) for part in range(2) for ntype in ntypes]
    edges = [book.partid2eids(part, etype) for part in range(2) for etype in etypes]
    every = th.arange(sum(len(node) for node in nodes))
    kinds = [[ntype, th.arange(book.partid2nids(1, ntype)[-1] + 1)] for ntype in ntypes]
    own = [[ntype, book.partid2nids(book.partid, ntype)] for ntype in ntypes]
    return {
        "facts": [book.partid, book.num_partitions(), book.metadata(), book.is_homogeneous, name],
        "types": [book.ntypes, book.etypes, book.canonical_etypes, ntypes, list(etypes.values())],
        "ids": [nodes, edges],
        "owners": [[ntype, book.nid2partid(ids, ntype)] for ntype, ids in kinds],
        "homogeneous": [[ntype, book.map_to_homo_nid(ids, ntype)] for ntype, ids in kinds],
        "typed": book.map_to_per_ntype(every),
        "edge owners": [book.eid2partid(edges[-1], list(etypes)[-1])],
        "edges": [book.map_to_homo_eid(edges[-1], list(etypes)[-1]), book.map_to_per_etype(th.arange(9))],
        "owners of homogeneous": [book.nid2partid(every), book.partid2nids(1), book.partid2eids(1)],
        "local": [[ntype, book.nid2localnid(ids, book.partid, ntype)] for ntype, ids in own],
        "local of homogeneous": book.nid2localnid(book.partid2nids(book.partid), book.partid),
        "offsets": [book.local_ntype_offset, book.local_etype_offset],
        "wrong": [
            refuses(lambda: book.partid2nids(1, "nobody")),
            refuses(lambda: book.to_canonical_etype("nothing")),
        ],
    }


def about_types(g):
    seeds = {"paper": th.tensor([2, 0, 5])}
    every, more = dist.sample_neighbors(g, seeds, -1), g.sample_neighbors(seeds, -1)
    homogeneous = g.get_partition_book().map_to_homo_nid(seeds["paper"], "paper")
    by_id = dist.sample_etype_neighbors(g, homogeneous, -1)
    order = th.arange(g.num_edges("writes"))
    part = g.edge_subgraph({"writes": order[:4]}, relabel_nodes=False)
    return {
        "types": [g.ntypes, sorted(g.etypes), sorted(g.canonical_etypes), g.get_ntype_id("paper")],
        "sizes": [g.num_nodes(), g.num_nodes("paper"), g.num_edges(), g.num_edges("writes")],
        "names": [sorted(g.nodes[ntype].data) for ntype in g.ntypes],
        "ends": g.find_edges(order, "writes"),
        "sampled": {name: [ends(case, name) for case in (every, more, by_id)] for name in g.etypes},
        "sampled of some": {
            name: ends(
                dist.sample_etype_neighbors(
                    g, seeds, {etype: -1 if etype == "writes" else 0 for etype in g.etypes}
                ),
                name,
            )
            for name in g.etypes
        },
        "induced": ends(part, "writes"),
        "local": [
            str(data[name].dtype)
            for data, names in (
                (g.local_partition.ndata, (dgl.NID, dgl.NTYPE, "inner_node")),
                (g.local_partition.edata, (dgl.EID, dgl.ETYPE, "inner_edge")),
            )
            for name in names
        ],
        "split": dist.node_split(g.nodes["paper"].data["train_mask"], g.get_partition_book(), "paper"),
        "wrong": [
            refuses(lambda: g.ndata),
            refuses(lambda: g.find_edges(order)),
            refuses(lambda: dist.sample_etype_neighbors(g, seeds, {"writes": 1})),
            refuses(lambda: dist.DistTensor((g.num_nodes("nobody"),), th.float32)),
        ],
    }


def main(args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.initialize("no such file")
    request = (about_graph, about_edges, about_sampling, about_tensors, about_splits, about_loaders)
    g = dist.DistGraph("one", part_config=args.one)
    results = {ask.__name__: ask(g) for ask in (*request, about_embeddings, about_store)}
    dist.exit_client()
    dist.initialize(None)
    results["about_types"] = about_types(dist.DistGraph("typed", part_config=args.typed))
    results["about_files"] = about_files(args.two)
    results["about_typed_files"] = about_files(args.typed_two)
    with open(args.out, "w") as file:
        json.dump(numbers(results), file)
    dist.exit_client()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("one", "two", "typed", "typed_two", "out"):
        parser.add_argument(f"--{name}")
    main(parser.parse_args())
