"""Programs that measure one part each; ``suites.PROGRAMS`` has their names."""
