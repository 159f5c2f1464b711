//! Where the daemon stands: what the driver says of pids means something only in the host's PID namespace.

/// Whether this process lives in the host's PID namespace: the kernel numbers its first one so (`PROC_PID_INIT_INO`).
pub(crate) fn is_hosts() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == "pid:[4026531836]")
}
