"""Ingestion of tables larger than memory."""
