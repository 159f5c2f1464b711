"""The suite that proves gpumemd on a GPU. See ../README.md."""
