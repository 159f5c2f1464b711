//! Checks whether the process can load the library. Its mount namespace may have other files, or none.

use super::proc_snapshot::ProcSnapshot;
use crate::command::doctor::elf::Elf;
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// Returns the problem and its remedy; `None` if there is none.
pub(super) fn wrong(process: &ProcSnapshot, path: &str) -> Option<(String, String)> {
    if !path.starts_with('/') {
        let text =
            format!("{path} is no absolute path: CUDA looks for it where the loader looks for libraries");
        return Some((text, "give the whole path, as gpumemctl run does".to_owned()));
    }
    let file = process.within(path);
    let is_elsewhere = mounts_differ(process.pid);
    let place = if is_elsewhere { "in its mount namespace (a container?)" } else { "any more" };
    let mount = format!("mount {} into the container at the same path", parent(path));
    match Elf::read(&file) {
        Ok(elf) => {
            let program = process.program.as_ref().and_then(|program| program.as_ref().ok());
            if let Some(program) = program.filter(|program| program.machine != elf.machine) {
                let text = format!(
                    "{path} is for {}, the program for {}",
                    elf.machine_name(),
                    program.machine_name()
                );
                return Some((text, "mount the library of the program's architecture".to_owned()));
            }
        }
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            return Some((format!("{path} is no library"), "install it again".to_owned()));
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let text = format!("{path} cannot be read there");
            return Some((text, format!("chmod a+rx {path} and the folders above it")));
        }
        Err(_) => {
            let fix =
                if is_elsewhere { mount } else { "install it again, or start the process again".to_owned() };
            return Some((format!("{path} is not there {place}"), fix));
        }
    }
    // root can read more files than the process.
    let mode = file.metadata().ok()?;
    let readable = match process.uid? {
        0 => true,
        uid if uid == mode.uid() => mode.permissions().mode() & 0o400 != 0,
        _ => mode.permissions().mode() & 0o044 != 0,
    };
    (!readable).then(|| {
        let text =
            format!("{path} has mode {:04o}: its user may not read it", mode.permissions().mode() & 0o7777);
        (text, format!("chmod a+r {path}"))
    })
}

fn parent(path: &str) -> String {
    Path::new(path).parent().unwrap_or(Path::new("/")).display().to_string()
}

/// Returns whether the process has another mount namespace than ours.
pub(super) fn mounts_differ(pid: u32) -> bool {
    let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/mnt")).ok();
    let (its, ours) = (of(&pid.to_string()), of("self"));
    its.is_some() && its != ours
}
