"""What runs inside a worker; needs NumPy and pyzmq only."""
