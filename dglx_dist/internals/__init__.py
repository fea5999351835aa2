"""Every use of private parts of PyTorch and DGL, and the versions that each was tested on."""
