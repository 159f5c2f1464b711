//! A file of the format in the target's name, or of its detected format.
#![no_main]

use gpumem_fuzz::import;
use libfuzzer_sys::fuzz_target;

/// Bytes of memory that an import may use, plus `PER_BYTE` for each byte of the file.
const FIXED: usize = 1 << 20;
const PER_BYTE: usize = 2000;

/// Returns an exported run with this body and valid checksums, so that the input reaches the code after the checksum test.
fn exported(body: &[u8]) -> Vec<u8> {
    let sum = |piece: &[u8]| {
        piece.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    let checks: Vec<String> = body.chunks(64 << 10).map(|piece| format!("\"{:016x}\"", sum(piece))).collect();
    let (bytes, checks) = (body.len(), checks.join(","));
    let head =
        format!("{{\"format\":\"gpumem-run\",\"version\":1,\"bytes\":{bytes},\"checks\":[{checks}]}}\n");
    [head.as_bytes(), body].concat()
}

/// Returns the target's format: `tbd-log` for `import_tbd_log`, `None` for `import_guess`.
fn format() -> Option<&'static str> {
    match env!("CARGO_BIN_NAME") {
        "import_recording" => Some("recording"),
        "import_run" => Some("gpumem-run"),
        "import_torch_snapshot" => Some("torch-snapshot"),
        "import_tbd_log" => Some("tbd-log"),
        "import_mxnet2_csv" => Some("mxnet2-csv"),
        "import_mxnet1_trace" => Some("mxnet1-trace"),
        "import_mxnet1_table" => Some("mxnet1-table"),
        "import_tbd_analysis" => Some("tbd-analysis"),
        "import_tbd_mem_csv" => Some("tbd-mem-csv"),
        "import_nvidia_smi_csv" => Some("nvidia-smi-csv"),
        "import_mxnet1_csv" => Some("mxnet1-csv"),
        _ => None,
    }
}

fuzz_target!(|bytes: &[u8]| {
    match format() {
        // Half of the inputs are passed unchanged.
        Some("gpumem-run") if !bytes.starts_with(b"{\"format\"") => {
            import(&exported(bytes), format(), FIXED, PER_BYTE)
        }
        format => import(bytes, format, FIXED, PER_BYTE),
    };
});
