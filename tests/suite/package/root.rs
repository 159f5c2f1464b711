//! A clean Debian that a test may change freely: an overlay on the root of tests/tools/debian-root.sh, in separate
//! namespaces. Nothing is booted in it.

use gpumem_tests::live::until;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// The project's folder.
pub fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the project")
}

/// Returns both streams of the output as text.
pub fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// Returns the output of a command that must succeed.
pub fn done(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", output_text(&output));
    output_text(&output)
}

/// A folder that is removed on drop.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gpumem-package-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The root. Its processes end with it, and its mounts are private.
pub struct Root {
    folder: Folder,
    holder: Child,
    inside: u32,
}

impl Root {
    /// Creates the root; `None`, after printing the reason, if that is not possible.
    ///
    /// # Panics
    /// With GPUMEM_TOOLS_REQUIRED set, if it cannot be created, because CI must not skip.
    pub fn new(name: &str) -> Option<Self> {
        let made = Command::new(project().join("tests/tools/debian-root.sh")).output().expect("sh");
        if !made.status.success() {
            let why = output_text(&made);
            gpumem_test_support::skip(&format!("no Debian root: {why}"), "apt-get install mmdebstrap");
            return None;
        }
        let lower = String::from_utf8(made.stdout).expect("a path");
        let folder = Folder::new(name);
        let script = r#"
            set -e
            cd "$1"
            mkdir upper work root
            mount -t overlay overlay -o "lowerdir=$2,upperdir=upper,workdir=work" root
            mount -t proc proc root/proc
            mount -t tmpfs tmpfs root/run
            mount -t tmpfs tmpfs root/tmp
            for node in null zero random urandom; do
              [ -e root/dev/$node ] || : > root/dev/$node
              mount --bind /dev/$node root/dev/$node
            done
            touch ready
            # Not exec: a shell also reaps orphaned processes.
            sleep 600
            :"#;
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]);
        unshare.args(["sh", "-c", script, "sh"]).arg(&folder.0).arg(lower.trim()).stdin(Stdio::null());
        let mut holder = unshare.spawn().expect("unshare");
        let ready = folder.0.join("ready");
        until(20, "the root", || {
            assert!(holder.try_wait().expect("waited").is_none(), "the root could not be mounted");
            ready.exists().then_some(())
        });
        let children = format!("/proc/{0}/task/{0}/children", holder.id());
        let inside = until(5, "its first process", || {
            std::fs::read_to_string(&children).ok()?.split_whitespace().next()?.parse().ok()
        });
        Some(Root { folder, holder, inside })
    }

    /// Returns a command inside the root, with a clean environment.
    pub fn command(&self, words: &[&str]) -> Command {
        let folder = self.folder().to_string_lossy().into_owned();
        self.outside(&[&["chroot", &folder, "timeout", "120"], words].concat())
    }

    /// Returns its folder, for commands by [`outside`](Self::outside).
    pub fn folder(&self) -> PathBuf {
        self.folder.0.join("root")
    }

    /// Returns a command of this machine that sees the root below [`folder`](Self::folder), with a clean environment.
    pub fn outside(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.inside.to_string(), "-m", "-p", "--"]).args(words);
        command.stdin(Stdio::null()).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8").env("HOME", "/root");
        command
    }

    /// Returns the output of a shell script that must succeed.
    pub fn sh(&self, script: &str) -> String {
        done(&mut self.command(&["bash", "-ec", script]))
    }

    /// Copies a file into its /tmp and returns the path there.
    pub fn take(&self, file: &Path) -> String {
        let inside = format!("/tmp/{}", file.file_name().expect("a name").to_string_lossy());
        let mut put = self.command(&["sh", "-c", "cat > \"$1\"", "sh", &inside]);
        done(put.stdin(std::fs::File::open(file).expect("the file")));
        inside
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // unshare takes its child with it, and the kernel the rest.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
