"""The partitioned dataset on disk: manifest and memory-mapped Arrow files."""
