"""Tables larger than memory -> a dataset on disk, as a GraphStorm-style description says."""
