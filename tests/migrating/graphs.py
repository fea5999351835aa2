"""Graphs of the scripts here, as plain DGLGraphs: communities of nodes whose features tell them apart."""

import dgl
import torch

CLASSES = 4


def citations(nodes=600, degree=8, width=16):
    """Return a homogeneous graph with feat, label, three masks and a loop at every node."""
    random = torch.Generator().manual_seed(3)
    label = torch.randint(0, CLASSES, (nodes,), generator=random)
    g = dgl.graph((_partners(label, degree, random), torch.arange(nodes).repeat_interleave(degree)))
    g = dgl.add_self_loop(dgl.remove_self_loop(g))
    g.ndata["label"] = label
    centres = torch.randn(CLASSES, width, generator=random)
    g.ndata["feat"] = centres[label] + 2 * torch.randn(nodes, width, generator=random)
    _split(g, torch.rand(nodes, generator=random))
    return g


class Citations:
    """The same as a dataset that holds one graph and has its splits as ids, like AsNodePredDataset."""

    num_classes = CLASSES

    def __init__(self):
        self.graph = citations()
        masks = (self.graph.ndata[f"{name}_mask"] for name in ("train", "val", "test"))
        self.train_idx, self.val_idx, self.test_idx = (mask.nonzero().squeeze(1) for mask in masks)

    def __getitem__(self, index):
        return self.graph

    def __len__(self):
        return 1


def links():
    """Return the pairs of citations() in both directions, edge i + E/2 the reverse of i, a tenth held out."""
    g = citations()
    u, v = dgl.remove_self_loop(g).edges()
    u, v = torch.unique(torch.stack([torch.minimum(u, v), torch.maximum(u, v)]), dim=1)
    both = dgl.graph((torch.cat([u, v]), torch.cat([v, u])), num_nodes=g.num_nodes())
    both.ndata["feat"] = g.ndata["feat"]
    both.edata["test_mask"] = (torch.arange(len(u)) % 10 == 0).repeat(2)
    both.edata["train_mask"] = ~both.edata["test_mask"]
    return both


def relations(nodes=600, degree=4, num_rels=3):
    """Return a graph whose edges have a type, edata["rel"], and whose nodes have no features."""
    random = torch.Generator().manual_seed(4)
    label = torch.randint(0, CLASSES, (nodes,), generator=random)
    sources = torch.cat([_partners(label, degree, random) for _ in range(num_rels)])
    g = dgl.graph((sources, torch.arange(nodes).repeat_interleave(degree).repeat(num_rels)))
    g.edata["rel"] = torch.arange(num_rels).repeat_interleave(nodes * degree)
    g.ndata["label"] = label
    _split(g, torch.rand(nodes, generator=random))
    return g


def _partners(label, degree, random):
    """Return in-neighbours of every node, four of five of its own class."""
    by_class = [(label == c).nonzero().squeeze(1) for c in range(CLASSES)]
    of_node = label.repeat_interleave(degree)
    away = torch.rand(len(of_node), generator=random) < 0.2
    expected = torch.where(away, torch.randint(0, CLASSES, of_node.shape, generator=random), of_node)
    drawn = torch.randint(0, 1 << 30, of_node.shape, generator=random)
    result = torch.empty_like(of_node)
    for c, members in enumerate(by_class):
        result[expected == c] = members[drawn[expected == c] % len(members)]
    return result


def _split(g, draw):
    g.ndata["train_mask"] = draw < 0.5
    g.ndata["val_mask"] = (draw >= 0.5) & (draw < 0.7)
    g.ndata["test_mask"] = draw >= 0.7
