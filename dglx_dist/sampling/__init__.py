"""Mini-batches: compiled neighbour sampling with keyed draws, blocks, and the loader that runs ahead."""
