//! Finds the libcupti to use. Must not run before the program initialises CUDA. The first `libcupti.so.12` that a process loads
//! owns that name, and an older one would make a later `import torch` fail.
//!
//! Candidates in order: the configured file; a loaded one; files beside the program's CUDA libraries; toolkits and environments;
//! the loader's path. Of the last three, major versions newer than the driver's are left out.

use crate::base::env::Settings;
use crate::base::loaded_file::find_mapped;
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Returns major versions and sonames, newest first. Before 12, sonames contain the minor version, too.
fn sonames() -> impl Iterator<Item = (u32, String)> {
    let major = [13, 12].map(|major| (major, format!("libcupti.so.{major}")));
    major.into_iter().chain((0..=8).rev().map(|minor| (11, format!("libcupti.so.11.{minor}"))))
}

/// Returns the paths of the libcupti files to try, best first.
pub(crate) fn candidates(settings: &Settings, driver_version: Option<u32>) -> Vec<PathBuf> {
    if let Some(path) = &settings.cupti {
        return vec![path.clone()];
    }
    let objects = loaded_objects();
    let mut found: Vec<PathBuf> =
        objects.iter().filter(|path| name_of(path).starts_with("libcupti.so")).cloned().collect();
    let newest = driver_version.map_or(u32::MAX, |version| version / 1000);
    // A libcupti with the major version of the program's own CUDA runtime is tried first.
    let own = objects
        .iter()
        .find_map(|path| name_of(path).strip_prefix("libcudart.so.")?.split('.').next()?.parse().ok());
    let mut sonames: Vec<_> = sonames().filter(|(major, _)| *major <= newest).collect();
    sonames.sort_by_key(|(major, _)| own != Some(*major)); // stable sort: otherwise newest first
    for directory in directories(settings, &objects) {
        found.extend(sonames.iter().map(|(_, name)| directory.join(name)).filter(|path| path.exists()));
    }
    found.extend(sonames.iter().map(|(_, name)| PathBuf::from(name)));
    let mut seen = Vec::new();
    found.retain(|path| !seen.contains(path) && (seen.push(path.clone()), true).1);
    found
}

fn name_of(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

/// Returns directories that may contain a libcupti of the program's CUDA libraries or of an installation.
fn directories(settings: &Settings, objects: &[PathBuf]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let cuda =
        ["libcudart.so", "libtorch_cuda.so", "libcublas.so", "libcudnn.so", "libnccl.so", "libc10_cuda.so"];
    for object in objects.iter().filter(|path| cuda.iter().any(|name| name_of(path).starts_with(name))) {
        let Some(directory) = object.parent() else { continue };
        found.push(directory.to_owned());
        // Layouts of pip: site-packages/nvidia/<part>/lib/libX beside site-packages/nvidia/cuda_cupti/lib, and
        // site-packages/torch/lib/libtorch_cuda.so beside site-packages/nvidia.
        for up in directory.ancestors().take(4) {
            let nvidia = if up.ends_with("nvidia") { up.to_owned() } else { up.join("nvidia") };
            found.push(nvidia.join("cuda_cupti/lib"));
            found.push(nvidia.join("cu13/lib"));
        }
    }
    let toolkits = settings.cuda_homes.iter().cloned().chain([PathBuf::from("/usr/local/cuda")]);
    for home in toolkits {
        let places = ["extras/CUPTI/lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib64"];
        found.extend(places.map(|place| home.join(place)));
    }
    let conda = ["lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
    found.extend(settings.conda.iter().flat_map(|root| conda.map(|place| root.join(place))));
    found
}

fn loaded_objects() -> Vec<PathBuf> {
    let mut found = Vec::new();
    find_mapped(|file| {
        if !file.path.is_empty() {
            found.push(Path::new(OsStr::from_bytes(file.path)).to_owned());
        }
        false
    });
    found
}

pub(crate) fn c_path(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_majors_than_the_drivers_are_left_out() {
        let names = |version| -> Vec<String> {
            let found = candidates(&Settings::default(), version);
            found
                .iter()
                .filter(|path| path.parent() == Some(Path::new("")))
                .map(|path| name_of(path).to_owned())
                .collect()
        };
        assert_eq!(names(Some(12040))[0], "libcupti.so.12");
        assert_eq!(names(None)[..3], ["libcupti.so.13", "libcupti.so.12", "libcupti.so.11.8"]);
        assert_eq!(names(Some(11080))[0], "libcupti.so.11.8");
    }

    #[test]
    fn an_order_is_an_order() {
        let cupti = Some(PathBuf::from("/opt/libcupti.so.12"));
        let settings = Settings { cupti, ..Settings::default() };
        assert_eq!(candidates(&settings, None), [PathBuf::from("/opt/libcupti.so.12")]);
    }

    #[test]
    fn wheels_keep_theirs_beside_each_other() {
        let objects = [
            PathBuf::from("/v/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12"),
            PathBuf::from("/w/site-packages/torch/lib/libtorch_cuda.so"),
        ];
        let found = directories(&Settings::default(), &objects);
        for expected in ["/v/site-packages/nvidia/cuda_cupti/lib", "/w/site-packages/nvidia/cuda_cupti/lib"] {
            assert!(found.contains(&PathBuf::from(expected)), "{expected}");
        }
    }
}
