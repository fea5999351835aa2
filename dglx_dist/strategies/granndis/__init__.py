"""Full-graph training aware of servers: halo exchange, shared preloading, co-batches (GraNNDis)."""
