//! Files that the server may have an agent create: below the directories that the program's environment permits, and only for a
//! server of root or of the program's user.

use crate::common::daemon::{Daemon, Folder, Peer, agent, patience};
use gpumem_test_support::alone;
use gpumem_wire::Body;
use std::path::Path;
use std::sync::atomic::Ordering::Acquire;
use std::time::{Duration, Instant};

fn told(peer: &mut Peer, command: Body<'_>) -> (i32, String) {
    let kind = command.kind();
    peer.send(command);
    peer.until("what became of it", |peer| peer.done.iter().any(|(done, ..)| *done == kind));
    let at = peer.done.iter().position(|(done, ..)| *done == kind).expect("one");
    let (_, result, told) = peer.done.remove(at);
    (result.into(), told)
}

fn start(peer: &mut Peer, path: &Path) -> (i32, String) {
    told(peer, Body::RecordControl { on: true, path: path.to_str().expect("UTF-8") })
}

#[test]
fn server_has_files_created_only_where_the_environment_permits() {
    alone(|| {
        let folder = Folder::new("requested");
        let (allowed, other) = (folder.0.join("allowed"), folder.0.join("other"));
        for path in [&allowed, &other] {
            std::fs::create_dir_all(path).expect("a folder");
        }
        std::os::unix::fs::symlink(&other, allowed.join("link")).expect("a link");
        let socket = folder.0.join("agent.sock");
        let daemon = Daemon::listen(&socket);
        agent(&socket, |settings| settings.record_dirs = vec![allowed.canonicalize().expect("a folder")]);
        let mut peer = daemon.accept();
        peer.resync(1);
        for path in [
            other.join("a.gpumem"),
            allowed.join("../other/a.gpumem"),
            allowed.join("link/a.gpumem"),
            allowed.join("link"),
            folder.0.clone(),
        ] {
            let (errno, why) = start(&mut peer, &path);
            assert!(errno == libc::EACCES && why.contains("GPUMEM_RECORD_DIRS"), "{path:?}: {errno} {why}");
            let path = path.to_str().expect("UTF-8");
            assert_eq!(told(&mut peer, Body::Dump { path }).0, libc::EACCES);
        }
        assert_eq!(start(&mut peer, &allowed.join("gone/a.gpumem")).0, libc::ENOENT);
        assert_eq!(std::fs::read_dir(&other).expect("a folder").count(), 0);
        let path = allowed.join("a.gpumem");
        let text = path.to_str().expect("UTF-8").to_owned();
        assert_eq!(start(&mut peer, &path), (0, text.clone()));
        assert_eq!(told(&mut peer, Body::RecordControl { on: false, path: "" }), (0, text));
    });
}

#[test]
fn a_device_that_takes_no_recording_is_kept() {
    alone(|| {
        let folder = Folder::new("device");
        let link = folder.0.join("full.gpumem");
        std::os::unix::fs::symlink("/dev/full", &link).expect("a link");
        agent(&folder.0.join("nobody.sock"), |settings| settings.record = Some(link.clone()));
        let start = Instant::now();
        while !gpumem::base::own_thread::TRIED.load(Acquire) {
            assert!(start.elapsed() < patience(), "the sender opened nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(link.symlink_metadata().is_ok(), "the agent removed what it did not make");
    });
}

/// Lane `privileged`.
mod privileged {
    use super::*;

    #[test]
    fn server_of_another_user_has_no_file_created() {
        alone(|| {
            let folder = Folder::new("requested-by-another");
            let socket = folder.0.join("agent.sock");
            let daemon = Daemon::listen_as(&socket, 65_534);
            agent(&socket, |settings| {
                settings.record_dirs = vec![folder.0.canonicalize().expect("a folder")]
            });
            let mut peer = daemon.accept();
            peer.resync(1);
            let path = folder.0.join("b.gpumem");
            let (errno, why) = start(&mut peer, &path);
            assert!(errno == libc::EPERM && why.contains("runs as user 65534"), "{errno} {why}");
            let text = path.to_str().expect("UTF-8");
            assert_eq!(told(&mut peer, Body::Dump { path: text }).0, libc::EPERM);
            assert!(!path.exists());
        });
    }
}
