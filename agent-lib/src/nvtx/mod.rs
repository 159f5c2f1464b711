//! NVTX: ranges of programs that annotate themselves, as scopes.
