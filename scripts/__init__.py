"""What stands beside the package: the bench, emulated servers, and scripts for the shell."""
