"""Other systems, measured beside this package: stock DistDGL, and PyG's NeighborLoader under DDP."""
