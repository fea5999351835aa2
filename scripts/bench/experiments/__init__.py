"""One small file per experiment."""
