//! Installations: the Debian package in a clean Debian, the archive in any folder, `make install`. tests/systemd tests the
//! boot with systemd.

use super::root::{self, Folder, Root, done, project};
use super::sbom;
use gpumem_tests::live::programs::programs;
use gpumem_tests::live::prometheus::free_address;
use gpumem_tests::live::{Machine, until};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The package of the programs as built, with this version.
fn deb(out: &Path, version: &str) -> PathBuf {
    let mut make = Command::new(project().join("packaging/deb.sh"));
    make.arg(&programs().ours).arg(out).env("VERSION", version).env("SOURCE_DATE_EPOCH", "1800000000");
    // Debug builds are large, and the packages are temporary.
    make.env("DPKG_DEB_COMPRESSOR_TYPE", "gzip").env("DPKG_DEB_COMPRESSOR_LEVEL", "1");
    done(&mut make).trim().into()
}

/// Returns the package of this version, built once for all tests.
pub fn package() -> &'static Path {
    static PACKAGE: OnceLock<PathBuf> = OnceLock::new();
    PACKAGE.get_or_init(|| deb(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("package"), VERSION))
}

/// Returns whether the machine has this program of Debian. With GPUMEM_TOOLS_REQUIRED it must.
pub fn has(program: &str) -> bool {
    let has = Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !has {
        gpumem_test_support::skip(&format!("there is no {program}"), "");
    }
    has
}

/// Command that lists all paths of the root, except those that every package installation creates.
pub const PATHS: &str = r"find / -xdev \( -path /proc -o -path /run -o -path /tmp -o -path /dev -o -path /var/cache \
    -o -path /var/log -o -path /var/lib/dpkg \) -prune -o -print | LC_ALL=C sort";

#[test]
fn package_is_complete_and_removed_completely() {
    let Some(root) = Root::new("whole") else { return };
    let before = root.sh(PATHS);
    let package = root.take(package());
    root.sh(&format!("dpkg -i {package}"));

    let library = format!("/usr/lib/gpumem/{VERSION}/libgpumem.so");
    assert_eq!(root.sh("gpumemd --check"), "the configuration is valid\n");
    assert_eq!(root.sh("gpumemctl --version"), format!("gpumemctl {VERSION}\n"));
    let doctor = root.sh("gpumemctl doctor || true");
    assert!(doctor.contains(&format!("libgpumem.so: {library}")), "{doctor}");
    // Who owns what, and who may do what.
    let stat =
        format!("stat -c '%U:%G %a %N' /etc/gpumemd/gpumemd.toml /usr/bin/gpumemd {library} /run/gpumemd");
    assert_eq!(
        root.sh(&format!("{stat} /usr/lib/gpumem/current | tr -d \"'\"")),
        format!(
            "root:root 644 /etc/gpumemd/gpumemd.toml\nroot:root 755 /usr/bin/gpumemd\nroot:root 644 {library}\n\
             gpumemd:gpumemd 755 /run/gpumemd\nroot:root 777 /usr/lib/gpumem/current -> {VERSION}\n"
        )
    );
    assert_eq!(root.sh("dpkg -V gpumemd"), "", "all that the package has is as it was packed");
    let enabled = root.sh("cd /etc/systemd/system; find . -name 'gpumemd*' | LC_ALL=C sort");
    assert_eq!(
        enabled,
        "./multi-user.target.wants/gpumemd.service\n./sockets.target.wants/gpumemd-agent.socket\n\
         ./sockets.target.wants/gpumemd-control.socket\n./sockets.target.wants/gpumemd-http.socket\n"
    );

    // Each page without a warning, one for each command that --help lists, and one of the daemon with each of its options.
    let pages = "for page in $(dpkg -L gpumemd | grep man/); do [ -d $page ] || \
                 { zcat $page | groff -man -Tutf8 -ww -z; basename $page .gz; }; done 2>&1";
    let pages: BTreeSet<String> = root.sh(pages).lines().map(str::to_owned).collect();
    let mut wanted: BTreeSet<String> =
        ["gpumemctl.1", "gpumemctl-nvml-release.1", "gpumemd.8", "gpumem-mcp.1"].map(str::to_owned).into();
    let help = root.sh("gpumemctl --help");
    let commands = help.lines().skip_while(|line| !line.ends_with("ommands:"));
    let commands = commands.take_while(|line| *line != "Options:");
    let named = commands.filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next());
    wanted.extend(named.map(|name| format!("gpumemctl-{name}.1")));
    assert!(wanted.len() > 10 && pages == wanted, "{pages:?}\n{wanted:?}");
    let page = root.sh("MANWIDTH=100 man gpumemd");
    let help = root.sh("gpumemd --help");
    let options: Vec<&str> = help.split([' ', '\n', ',']).filter(|word| word.starts_with("--")).collect();
    assert!(options.len() > 4 && options.iter().all(|option| page.contains(option)), "{options:?}\n{page}");
    assert!(root.sh("man gpumemctl-run").contains("EXIT STATUS"));

    // Completions load, and know the commands and their options.
    let complete = |words: &str, at: usize| {
        root.sh(&format!(
            ". /usr/share/bash-completion/completions/gpumemctl; COMP_WORDS=({words}) COMP_CWORD={at}; w=({words}); \
             _gpumemctl gpumemctl \"${{w[{at}]}}\" \"${{w[{at} - 1]}}\" || true; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        ))
    };
    assert_eq!(complete("gpumemctl rep", 1), "report\n");
    assert_eq!(complete("gpumemctl report --grow", 2), "--growth\n");
    assert_eq!(complete("gpumemctl det", 1).trim(), "", "hidden commands are not offered");

    // Its files are removed; the user stays, because other files may belong to it.
    root.sh("mkdir -p /var/lib/gpumemd && touch /var/lib/gpumemd/runs.sqlite && dpkg -r gpumemd");
    root.sh(
        "[ -e /var/lib/gpumemd/runs.sqlite ] && [ -e /etc/gpumemd/gpumemd.toml ] && ! [ -e /usr/lib/gpumem ]",
    );
    root.sh("dpkg -P gpumemd && getent passwd gpumemd");
    let after = root.sh(PATHS);
    let left: Vec<&str> = after.lines().filter(|path| !before.lines().any(|other| other == *path)).collect();
    assert!(left.iter().all(|path| path.starts_with("/etc/") && path.ends_with('-')), "{left:?}");
    assert!(!root.sh("ls /run").contains("gpumemd"));
}

/// Starts a process with the library loaded, or with only its path set. Returns its pid in the root.
pub fn carrier(root: &Root, variable: &str, version: &str) -> String {
    let start = format!(
        "{variable}=/usr/lib/gpumem/{version}/libgpumem.so setsid sleep 500 > /dev/null 2>&1 & echo $!"
    );
    let pid = root.sh(&start).trim().to_owned();
    until(20, "sleep", || {
        let program = root.sh(&format!("readlink /proc/{pid}/exe"));
        program.contains("/sleep").then_some(())
    });
    pid
}

#[test]
fn library_version_stays_until_unused() {
    let Some(root) = Root::new("versions") else { return };
    let out = Folder::new("versions-deb");
    let (old, new) = (root.take(&deb(&out.0, "0.0.9")), root.take(package()));
    root.sh(&format!("dpkg -i {old}; echo '# mine' >> /etc/gpumemd/gpumemd.toml"));
    let there = || root.sh("cd /usr/lib/gpumem; readlink current; ls -d [0-9]*");
    let inode = |version: &str| root.sh(&format!("stat -c %i /usr/lib/gpumem/{version}/libgpumem.so"));
    assert_eq!(there(), "0.0.9\n0.0.9\n");

    let mapped = carrier(&root, "LD_PRELOAD", "0.0.9");
    let reported = carrier(&root, "CUDA_INJECTION64_PATH", "0.0.9");
    let first = inode("0.0.9");
    let upgrade = root.sh(&format!("dpkg -i {new} 2>&1"));
    let listed =
        format!("libgpumem.so 0.0.9 is needed by 2 processes:\n  {mapped} sleep\n  {reported} sleep\n");
    assert!(upgrade.contains(&listed), "{upgrade}");
    assert_eq!(there(), format!("{VERSION}\n0.0.9\n{VERSION}\n"));
    assert_eq!(inode("0.0.9"), first, "mapped libraries are unchanged");
    assert!(root.sh("tail -n 1 /etc/gpumemd/gpumemd.toml") == "# mine\n", "settings stay");

    // The library is kept exactly as long as a process uses it.
    root.sh(&format!("kill {mapped}; /usr/lib/gpumem/versions clean"));
    assert_eq!(there(), format!("{VERSION}\n0.0.9\n{VERSION}\n"));
    root.sh(&format!("kill {reported}"));
    until(20, "its end", || {
        (root.sh(&format!("ls -d /proc/{reported} || true")).contains("cannot")).then_some(())
    });
    root.sh("/usr/lib/gpumem/versions clean");
    assert_eq!(there(), format!("{VERSION}\n{VERSION}\n"));

    // Reinstalling the same version creates a new file; processes keep the old one unchanged.
    let mapped = carrier(&root, "LD_PRELOAD", VERSION);
    let first = inode(VERSION);
    root.sh(&format!("dpkg -i {new}"));
    assert_ne!(inode(VERSION), first);
    let maps = root.sh(&format!("grep libgpumem /proc/{mapped}/maps"));
    assert!(maps.lines().all(|line| line.ends_with("libgpumem.so (deleted)")), "{maps}");
    assert!(maps.contains(&format!(" {} ", first.trim())), "{maps}");

    // Removal lists the processes that use the library and leaves it in place. Purge removes it, and they continue.
    let removal = root.sh("dpkg -r gpumemd 2>&1");
    let listed = format!("libgpumem.so {VERSION} is needed by 1 process:\n  {mapped} sleep\nkept for them: ");
    assert!(removal.contains(&listed), "{removal}");
    root.sh(&format!("[ -e /usr/lib/gpumem/{VERSION}/libgpumem.so ] && ! [ -e /usr/lib/gpumem/current ]"));
    root.sh(&format!("dpkg -P gpumemd; ! [ -e /usr/lib/gpumem ] && kill -0 {mapped}"));
}

#[test]
fn package_is_reproducible_and_passes_lintian() {
    let again = Folder::new("again");
    let (first, second) = (package(), deb(&again.0, VERSION));
    let same = std::fs::read(first).expect("read") == std::fs::read(&second).expect("read");
    assert!(same, "two packages of the same files differ");

    if !has("lintian") {
        return;
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--allow-root"]).arg(first);
    assert_eq!(done(&mut lintian), "");
}

/// Returns the paths of all files below a folder, relative to it.
pub fn files(folder: &Path) -> BTreeSet<String> {
    let list = done(Command::new("find").args([".", "!", "-type", "d"]).current_dir(folder));
    list.lines().map(str::to_owned).collect()
}

#[test]
fn make_install_has_the_same_layout_and_takes_all_of_it_away() {
    let folder = Folder::new("install");
    let make = |target: &str| {
        let mut make = Command::new("make");
        make.args(["-s", target, "PREFIX=/usr"]).arg(format!("DESTDIR={}", folder.0.display()));
        make.arg(format!("PROGRAMS={}", programs().ours.display())).current_dir(project());
        done(make.env_remove("MAKEFLAGS").env_remove("MAKELEVEL"))
    };
    make("install");
    let installed = files(&folder.0);
    let version = |name: &str| format!("./usr/lib/gpumem/{VERSION}/{name}");
    assert!(installed.contains(&version("libgpumem.so")) && installed.contains("./usr/lib/gpumem/current"));

    let out = Folder::new("install-deb");
    let unpacked = out.0.join("unpacked");
    done(Command::new("dpkg-deb").arg("-x").arg(package()).arg(&unpacked));
    let below = |folder: &Path, library: &str| {
        let of = |path: &str| folder.join("usr").join(path);
        let [daemon, ctl, mcp, library] = [
            of("bin/gpumemd"),
            of("bin/gpumemctl"),
            of("bin/gpumem-mcp"),
            of(&format!("lib/gpumem/{library}/libgpumem.so")),
        ];
        let reported = std::fs::read(of("share/doc/gpumem/sbom.cdx.json")).expect("a list of parts");
        (reported, daemon, ctl, mcp, library)
    };
    for (folder, library, purl) in
        [(&folder.0, VERSION, "pkg:generic/gpumemd"), (&unpacked, "agent", "pkg:deb/debian/gpumemd")]
    {
        let (reported, daemon, ctl, mcp, library) = below(folder, library);
        sbom::check(
            &reported,
            purl,
            &[("gpumemd", &daemon), ("gpumemctl", &ctl), ("gpumem-mcp", &mcp), ("libgpumem.so", &library)],
        );
    }
    // Where Debian wants something elsewhere, or postinst makes it.
    let debian = |path: &String| {
        let path = path.trim_end_matches(".gz").replace("zsh/vendor-completions", "zsh/site-functions");
        path.replace("gpumem/agent/", &format!("gpumem/{VERSION}/"))
    };
    let packed: BTreeSet<String> = files(&unpacked).iter().map(debian).collect();
    let ours = |path: &&String| {
        !path.contains("doc/gpumem") && !path.contains("lintian") && !path.contains("/current")
    };
    let different: Vec<_> = installed.symmetric_difference(&packed).filter(ours).collect();
    assert!(different.is_empty(), "{different:?}");

    assert!(make("uninstall").contains("/etc/gpumemd"));
    assert_eq!(files(&folder.0), BTreeSet::from(["./etc/gpumemd/gpumemd.toml".to_owned()]));
    assert!(!folder.0.join("usr/lib/gpumem").exists() && !folder.0.join("usr/share/doc").exists());
}

#[test]
fn archive_runs_from_any_folder() {
    let machine = Machine::new(&["devices=1"]);
    let pack = |out: &str| {
        let mut make = Command::new(project().join("packaging/tarball.sh"));
        make.arg(&programs().ours).arg(machine.dir.join(out)).env("SOURCE_DATE_EPOCH", "1800000000");
        PathBuf::from(done(&mut make).trim())
    };
    let archive = pack("one");
    let name = archive.file_name().expect("a name").to_string_lossy().trim_end_matches(".tar.gz").to_owned();
    done(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&machine.dir));

    // Twice, from two places: the second time after it was moved.
    let (here, there) = (machine.dir.join(name), machine.dir.join("a place of my own"));
    for place in [&here, &there] {
        if place == &there {
            std::fs::rename(&here, &there).expect("moved");
        }
        let recording = place.join("run.gpumem");
        let mut run = machine.command(place.join("bin/gpumemctl"));
        run.args(["run", "--record"]).arg(&recording).arg("--");
        done(run.arg(programs().fake.join("bin/trainer")).args(["--steps", "2"]));
        let mut report = machine.command(place.join("bin/gpumemctl"));
        let report = done(report.args(["report", "--json"]).arg(&recording));
        assert!(report.contains("\"covered\""), "{report}");
        let daemon = done(machine.command(place.join("bin/gpumemd")).arg("--check"));
        assert_eq!(daemon, "the configuration is valid\n");
    }
}

#[test]
fn image_serves_metrics_and_supports_init_containers() {
    if !has("buildah") || !has("mmdebstrap") {
        return;
    }
    let machine = Machine::new(&["devices=2"]);
    std::fs::set_permissions(machine.sim(), std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .expect("shared");
    let buildah = |verb: &str| {
        // A separate process namespace: everything in the container ends with it.
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "buildah", "--storage-driver", "vfs"]);
        command.arg("--root").arg(machine.dir.join("store")).arg("--runroot").arg(machine.dir.join("run"));
        command.arg(verb);
        command
    };
    let words = |command: &mut Command| {
        let output = command.stderr(Stdio::piped()).output().expect("buildah");
        assert!(output.status.success(), "{command:?}: {}", root::output_text(&output));
        String::from_utf8(output.stdout).expect("text").trim().to_owned()
    };
    let mut make = Command::new(project().join("packaging/image.sh"));
    make.arg(&programs().ours).arg(machine.dir.join("package"));
    let archive = done(&mut make);
    let image = words(buildah("pull").arg(format!("oci-archive:{}", archive.trim())));
    let container = words(buildah("from").arg(image.lines().last().expect("an image")));
    let run = |options: &[String], inside: &[&str]| {
        let mut run = buildah("run");
        run.args(["--isolation", "chroot"]).args(options).arg(&container).arg("--").args(inside);
        run
    };
    let init =
        "cp -L /usr/lib/gpumem/current/libgpumem.so /tmp/.new && mv -f /tmp/.new /tmp/libgpumem.so && id -u";
    assert_eq!(words(&mut run(&[], &["/bin/sh", "-ec", init])), "60837");
    assert_eq!(words(&mut run(&[], &["gpumemctl", "--version"])), format!("gpumemctl {VERSION}"));
    // The list of components matches the installed files: programs and Debian packages.
    let reported = words(&mut run(&[], &["cat", "/usr/share/doc/gpumem/sbom.cdx.json"]));
    let place = PathBuf::from(words(buildah("mount").arg(&container))).join("usr");
    let files = ["bin/gpumemd", "bin/gpumemctl", "bin/gpumem-mcp", "lib/gpumem/current/libgpumem.so"]
        .map(|file| place.join(file));
    let names = ["gpumemd", "gpumemctl", "gpumem-mcp", "libgpumem.so"];
    let named: Vec<(&str, &Path)> = names.into_iter().zip(files.iter().map(PathBuf::as_path)).collect();
    sbom::check(reported.as_bytes(), "pkg:oci/gpumemd", &named);
    let libc = words(&mut run(&[], &["/bin/sh", "-c", "/lib/*-linux-gnu/libc.so.6"]));
    let libc =
        libc.split_once("(Debian GLIBC ").and_then(|(_, rest)| rest.split_once(')')).expect("Debian's").0;
    for package in
        [format!("libc6@{}", libc.replace('+', "%2B")), "busybox-static@1%3A".into(), "base-files@".into()]
    {
        assert!(reported.contains(&format!("\"pkg:deb/debian/{package}")), "{package}: {reported}");
    }

    let address = free_address();
    let config = machine.dir.join("gpumemd.toml");
    std::fs::write(&config, format!("[metrics]\nlisten = \"{address}\"\n")).expect("written");
    let options = [
        format!("--volume={}:/driver:ro", programs().fake.join("lib").display()),
        "--volume=/dev/shm:/dev/shm".to_owned(),
        format!("--volume={}:/etc/gpumemd/gpumemd.toml:ro", config.display()),
        "--env=LD_LIBRARY_PATH=/driver".to_owned(),
        format!("--env=GPUMEM_SIM={}", machine.sim().display()),
    ];
    let mut daemon = run(&options, &["gpumemd"]);
    let log = std::fs::File::create(machine.dir.join("gpumemd.log")).expect("a log");
    let mut daemon = daemon.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("buildah");
    let metrics = until(30, "both devices in the metrics", || {
        let ended = daemon.try_wait().expect("waited");
        let log = || std::fs::read_to_string(machine.dir.join("gpumemd.log"));
        assert!(ended.is_none(), "it ended: {:?}", log());
        let mut stream = TcpStream::connect(address).ok()?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        (text.matches("\ngpumem_device_used_bytes{").count() == 2).then_some(text)
    });
    daemon.kill().expect("ended");
    daemon.wait().expect("ended");
    assert!(metrics.contains(&format!("version=\"{VERSION}\"")), "{metrics}");
}
