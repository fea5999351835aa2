"""All code that uses private parts of PyTorch and DGL. Each module names the versions it was tested on."""
