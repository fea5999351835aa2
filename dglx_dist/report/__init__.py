"""Make tables, pictures and pages from run records."""
