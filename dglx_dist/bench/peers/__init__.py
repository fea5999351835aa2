"""Other systems on the same data: programs of their own processes, never imported by the package."""
