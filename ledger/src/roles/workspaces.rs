//! Sizes of the workspaces that PyTorch allocates for cuBLAS: one for each handle (thread) and stream, until the process ends.

/// Workspaces of PyTorch without a setting, in bytes: cuBLAS on Hopper and later (`:4096:8`), cuBLAS on other GPUs (`:4096:2:16:8`),
/// cuBLASLt in PyTorch 2.9 to 2.11.
const DEFAULT_BYTES: [u64; WORKSPACE_SIZES] = [33_554_432, 8_519_680, 1_048_576];
pub(crate) const WORKSPACE_SIZES: usize = 3;

/// Sizes in bytes; 0 in a place that the process does not use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkspaceSizes([u64; WORKSPACE_SIZES]);

impl Default for WorkspaceSizes {
    fn default() -> Self {
        WorkspaceSizes(DEFAULT_BYTES)
    }
}

impl WorkspaceSizes {
    /// Returns the sizes in a process whose `CUBLAS_WORKSPACE_CONFIG` is `setting`: pairs `:KIB:COUNT`. PyTorch ignores a setting
    /// without such a pair.
    pub fn with_setting(setting: Option<&str>) -> Self {
        let numbers: Vec<&str> = setting.unwrap_or_default().split(':').skip(1).collect();
        let product = |pair: &[&str]| -> Option<u64> {
            let (kib, count) = (pair.first()?.parse::<u64>().ok()?, pair.get(1)?.parse::<u64>().ok()?);
            kib.checked_mul(count)?.checked_mul(1024)
        };
        let sums: Option<Vec<u64>> = numbers.chunks(2).map(product).collect();
        match sums.filter(|sums| !sums.is_empty()) {
            Some(sums) => {
                WorkspaceSizes([sums.into_iter().fold(0, u64::saturating_add), 0, DEFAULT_BYTES[2]])
            }
            None => WorkspaceSizes::default(),
        }
    }

    /// Returns the index of this size, if it is a workspace's.
    pub fn index(&self, bytes: u64) -> Option<usize> {
        self.0.iter().position(|&size| size == bytes && size > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_replaces_the_sizes_of_cublas() {
        let sizes = |setting| WorkspaceSizes::with_setting(Some(setting)).0;
        assert_eq!(sizes(":4096:8"), [32 << 20, 0, 1 << 20]);
        assert_eq!(sizes(":4096:2:16:8"), [(8 << 20) + (128 << 10), 0, 1 << 20]);
        assert_eq!(sizes(":16:8"), [128 << 10, 0, 1 << 20]);
        assert_eq!(sizes(":0:0"), [0, 0, 1 << 20]);
        for unusable in ["", ":", "4096", ":4096", ":4096:8:16", ":4096:many", ":18446744073709551615:2"] {
            assert_eq!(sizes(unusable), DEFAULT_BYTES, "{unusable}");
        }
        assert_eq!(WorkspaceSizes::with_setting(None).0, DEFAULT_BYTES);
        assert_eq!(WorkspaceSizes::with_setting(Some(":0:0")).index(0), None);
    }
}
