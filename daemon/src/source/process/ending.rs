//! The status with which a process ended, though it is nobody's child here.
//!
//! Until its parent has waited for it, /proc tells it to who may look; afterwards the pidfd does, since Linux 6.15, to everybody
//! who holds one. In between, and on older kernels, it is not known.

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use std::os::fd::OwnedFd;

/// What `PIDFD_GET_INFO` tells (linux/pidfd.h, its first 64 bytes).
#[repr(C)]
#[derive(Debug, Default)]
struct Info {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const GET_INFO: Opcode = opcode::read_write::<Info>(0xff, 11);
/// The exit code is wanted, and is there.
const EXIT: u64 = 1 << 3;

/// As waitpid gives it; `None` where it is not known (yet).
pub(crate) fn status(pidfd: &OwnedFd) -> Option<u64> {
    let mut info = Info { mask: EXIT, ..Info::default() };
    // SAFETY: the kernel writes at most the 64 bytes of `Info` that the opcode names; whatever it writes is a value of these
    // integers, and a kernel that does not know the call refuses it.
    unsafe { ioctl(pidfd, Updater::<GET_INFO, Info>::new(&mut info)) }.ok()?;
    (info.mask & EXIT != 0).then_some(u64::from(info.exit_code as u32 & 0xffff))
}
