//! `gpumemctl nvml release`

use crate::args::{Nvml, NvmlCommand};
use crate::client::Daemon;
use crate::output::print;
use anyhow::Result;

/// Asks the daemon to close NVML, so that a GPU can be reset or its MIG mode changed.
pub(crate) fn run(args: &Nvml) -> Result<()> {
    let NvmlCommand::Release(release) = &args.command;
    let daemon = Daemon::find(release.socket.as_deref())?;
    let released = daemon.release(release.seconds)?;
    print(&format!(
        "NVML is closed for {} s: GPUs can be reset and MIG changed; used is not known until then\n",
        released.for_s
    ))
}
