"""Training strategies over one partitioned dataset."""
