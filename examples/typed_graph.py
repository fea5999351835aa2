"""The graph of the examples with several types: papers with features and topics, authors without data."""

import dgl
import torch

AUTHORS, PAPERS, VENUES, TOPICS = 1500, 3000, 24, 6


def make_typed_graph():
    """Return authors, papers and venues that mostly keep to one topic; the same at every call."""
    random = torch.Generator().manual_seed(0)

    def draw(high, count):
        return torch.randint(high, (count,), generator=random)

    topic = {"author": draw(TOPICS, AUTHORS), "paper": draw(TOPICS, PAPERS), "venue": draw(TOPICS, VENUES)}

    def join(source, destination, count):
        """Four of five edges stay within a topic."""
        u, v = draw(len(topic[source]), 20 * count), draw(len(topic[destination]), 20 * count)
        stray = torch.rand(len(u), generator=random) < 0.04
        kept = ((topic[source][u] == topic[destination][v]) | stray).nonzero()[:count, 0]
        return u[kept], v[kept]

    writes, cites, printed = (
        join("author", "paper", 6000),
        join("paper", "paper", 9000),
        join("paper", "venue", 3000),
    )
    g = dgl.heterograph(
        {
            ("author", "writes", "paper"): writes,
            ("paper", "written_by", "author"): writes[::-1],
            ("paper", "cites", "paper"): cites,
            ("paper", "cited_by", "paper"): cites[::-1],
            ("paper", "appears_in", "venue"): printed,
            ("venue", "prints", "paper"): printed[::-1],
        },
        num_nodes_dict={ntype: len(topics) for ntype, topics in topic.items()},
    )
    papers, split = g.nodes["paper"].data, torch.rand(PAPERS, generator=random)
    signal = torch.nn.functional.one_hot(topic["paper"], TOPICS).float()
    papers["feat"] = 0.6 * torch.cat([signal, signal], 1) + torch.randn(PAPERS, 2 * TOPICS, generator=random)
    g.nodes["venue"].data["feat"] = torch.randn(VENUES, 4, generator=random)
    papers["label"] = topic["paper"]
    papers["train_mask"], papers["val_mask"], papers["test_mask"] = (
        split < 0.15,
        (split >= 0.15) & (split < 0.3),
        split >= 0.3,
    )
    return g
