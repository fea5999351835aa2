"""Training in intervals on graph servers, with bounded asynchrony (Dorylus)."""
