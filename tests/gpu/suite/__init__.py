"""The suite that tests gpumemd on a GPU. See ../README.md."""
