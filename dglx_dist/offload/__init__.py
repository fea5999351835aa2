"""Stateless tensor workers, the parameter servers they talk to, and who pays for them (Dorylus)."""
