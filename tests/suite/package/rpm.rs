//! The RPM, installed by `rpm --root` into a clean root. The root is a Debian: its shell and its systemd run the scripts.

use super::deb::{PATHS, VERSION, carrier, files, has, package};
use super::root::{Folder, Root, done, project};
use super::sbom;
use gpumem_tests::live::programs::programs;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes the RPM of the programs as built, with this version.
fn rpm(out: &Path, version: &str) -> PathBuf {
    let mut make = Command::new(project().join("packaging/rpm.sh"));
    make.arg(&programs().ours).arg(out).env("VERSION", version).env("SOURCE_DATE_EPOCH", "1800000000");
    // Debug builds are large, and the packages are temporary.
    done(make.env("PAYLOAD", "w1.gzdio")).trim().into()
}

/// Runs rpm on the root's own database. The root's packages are Debian's, so the database does not have them.
fn rpm_in(root: &Root, words: &[&str]) -> String {
    let folder = root.folder().to_string_lossy().into_owned();
    let rpm = ["rpm", "--force-debian", "--root", &folder, "--dbpath", "/var/lib/rpm"];
    done(&mut root.outside(&[&rpm[..], words].concat()))
}

#[test]
fn rpm_installs_upgrades_and_removes_as_the_debian_package_does() {
    if !has("rpmbuild") {
        return;
    }
    let Some(root) = Root::new("rpm") else { return };
    let out = Folder::new("rpm-out");
    let (old, new) = (rpm(&out.0, "0.0.9"), rpm(&out.0, VERSION));
    let [old, new] = [&old, &new].map(|package| package.to_string_lossy().into_owned());
    let before = root.sh(PATHS);
    rpm_in(&root, &["--nodeps", "-i", &old]);
    assert_eq!(root.sh("gpumemd --check"), "the configuration is valid\n");
    assert_eq!(rpm_in(&root, &["-V", "--nodeps", "gpumemd"]), "", "all files are as they were packed");
    let library = "/usr/lib/gpumem/0.0.9/libgpumem.so";
    let stat = "stat -c '%U:%G %a %N' /etc/gpumemd/gpumemd.toml /usr/bin/gpumemd /run/gpumemd";
    assert_eq!(
        root.sh(&format!("{stat} {library} /usr/lib/gpumem/current | tr -d \"'\"")),
        format!(
            "root:root 644 /etc/gpumemd/gpumemd.toml\nroot:root 755 /usr/bin/gpumemd\n\
             gpumemd:gpumemd 755 /run/gpumemd\nroot:root 644 {library}\n\
             root:root 777 /usr/lib/gpumem/current -> 0.0.9\n"
        )
    );
    let enabled = "cd /etc/systemd/system; find . -name 'gpumemd*' | LC_ALL=C sort";
    assert_eq!(
        root.sh(enabled),
        "./multi-user.target.wants/gpumemd.service\n./sockets.target.wants/gpumemd-agent.socket\n\
         ./sockets.target.wants/gpumemd-control.socket\n./sockets.target.wants/gpumemd-http.socket\n"
    );
    assert!(root.sh("man gpumemctl-run").contains("EXIT STATUS"));
    let requires = rpm_in(&root, &["-q", "--requires", "gpumemd"]);
    assert!(requires.contains("libc.so.6(GLIBC_") && requires.contains("systemd\n"), "{requires}");
    assert!(!requires.contains("python"), "documents require no programs: {requires}");

    // An upgrade keeps the library that a process uses, changed settings, and the choice of units.
    let mapped = carrier(&root, "LD_PRELOAD", "0.0.9");
    root.sh("echo '# mine' >> /etc/gpumemd/gpumemd.toml; systemctl disable gpumemd-http.socket 2> /dev/null");
    let upgrade = rpm_in(&root, &["--nodeps", "-U", &new]);
    let listed = format!("libgpumem.so 0.0.9 is needed by 1 process:\n  {mapped} sleep\n");
    assert!(upgrade.contains(&listed), "{upgrade}");
    assert_eq!(
        root.sh("cd /usr/lib/gpumem; readlink current; ls -d [0-9]*"),
        format!("{VERSION}\n0.0.9\n{VERSION}\n")
    );
    assert!(root.sh("tail -n 1 /etc/gpumemd/gpumemd.toml") == "# mine\n", "settings stay");
    assert!(!root.sh(enabled).contains("gpumemd-http.socket"), "a disabled unit stays disabled");
    // Removal keeps runs, changed settings, and the library in use.
    root.sh("mkdir -p /var/lib/gpumemd && touch /var/lib/gpumemd/runs.sqlite");
    let removal = rpm_in(&root, &["-e", "gpumemd"]);
    assert!(removal.contains("kept for them: /usr/lib/gpumem/0.0.9"), "{removal}");
    root.sh(&format!(
        "[ -e {library} ] && ! [ -e /usr/lib/gpumem/current ] && kill {mapped} && rm -r /usr/lib/gpumem /var/lib/gpumemd"
    ));
    root.sh("rm /etc/gpumemd/gpumemd.toml.rpmsave && rmdir /etc/gpumemd && getent passwd gpumemd");
    let after = root.sh(PATHS);
    let is_new =
        |path: &&str| !before.lines().any(|other| other == *path) && !path.starts_with("/var/lib/rpm");
    let left: Vec<&str> = after.lines().filter(is_new).collect();
    assert!(left.iter().all(|path| path.starts_with("/etc/") && path.ends_with('-')), "{left:?}");
}

#[test]
fn rpm_is_reproducible_and_has_the_files_of_the_debian_package() {
    if !has("rpmbuild") {
        return;
    }
    let (one, two) = (Folder::new("rpm-one"), Folder::new("rpm-two"));
    let [first, second] = [&one, &two].map(|out| rpm(&out.0, VERSION));
    let same = std::fs::read(&first).expect("read") == std::fs::read(&second).expect("read");
    assert!(same, "two packages of the same files differ");

    let [ours, debian] = ["rpm", "deb"].map(|name| one.0.join(name));
    let unpack = "mkdir \"$2\" && rpm2archive - < \"$1\" | tar -xz -C \"$2\"";
    done(Command::new("sh").args(["-c", unpack, "sh"]).arg(&first).arg(&ours));
    done(Command::new("dpkg-deb").arg("-x").arg(package()).arg(&debian));
    let of = |path: &str| ours.join("usr").join(path);
    let list = std::fs::read(of("share/doc/gpumem/sbom.cdx.json")).expect("a list of components");
    let programs = ["gpumemd", "gpumemctl", "gpumem-mcp"].map(|name| (name, of("bin").join(name)));
    let library = ("libgpumem.so", of("lib/gpumem/agent/libgpumem.so"));
    let named: Vec<(&str, &Path)> =
        programs.iter().chain([&library]).map(|(name, path)| (*name, path.as_path())).collect();
    sbom::check(&list, "pkg:rpm/gpumemd", &named);
    let same_place = |path: &String| path.replace("zsh/vendor-completions", "zsh/site-functions");
    let debian: BTreeSet<String> = files(&debian).iter().map(same_place).collect();
    let ours = files(&ours);
    let is_shared = |path: &&String| !path.contains("doc/gpumem") && !path.contains("lintian");
    let different: Vec<_> = ours.symmetric_difference(&debian).filter(is_shared).collect();
    assert!(different.is_empty(), "{different:?}");
}
