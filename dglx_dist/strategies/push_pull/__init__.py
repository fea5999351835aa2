"""Push-pull parallelism as in P3: layer 1 split by input columns, the rest data parallel."""
