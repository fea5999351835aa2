"""Tables, pictures and pages from run records."""
