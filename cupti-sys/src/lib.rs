//! Numbers and layouts of CUPTI, and of the few driver calls that gpumemd makes.
