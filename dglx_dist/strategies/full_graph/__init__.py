"""Full-graph training with halo exchange, shared preloading and cooperative batches (GraNNDis)."""
