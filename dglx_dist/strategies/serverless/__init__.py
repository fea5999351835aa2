"""Strategy "lambda": graph servers and stateless workers (Dorylus)."""
