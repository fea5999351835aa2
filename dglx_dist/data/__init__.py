"""Datasets: sources, tables, partitioning and the format on disk."""
