//! Result codes of CUPTI, with a message for each.

/// A CUptiResult. A plain integer, because newer libraries define more values.
pub type CuptiResult = u32;

/// Returns what a result means for a user whose process is not covered. Not cuptiGetResultString, which returns nothing if a
/// library of CUDA 13.3 or later cannot start.
pub fn friendly(result: CuptiResult) -> &'static str {
    match result {
        0 => "ok",
        1 => "CUPTI refused a parameter",
        2 => "this libcupti does not know this GPU: install a newer one",
        15 => "libcupti and the driver do not fit, or there is no GPU",
        23 => "another profiler has disabled CUPTI",
        27 => "this libcupti does not support it here",
        33 => "profiling is not supported on this virtual GPU",
        35 => "no permission to use CUPTI",
        39 => "another CUPTI client holds the subscription",
        40 => "profiling is not allowed on this virtual GPU",
        41 => "tracing is not allowed under confidential computing",
        43 => "CUPTI is not supported on this MIG instance",
        45 => "CUPTI is not supported on this WSL",
        46 => "this libcupti does not know this chip",
        47 => "hardware event tracing and MPS exclude each other",
        999 => "CUPTI failed (it says so too when there is no driver)",
        _ => "CUPTI failed",
    }
}
