"""Where workers run: here, on this machine, or in somebody's cloud."""
