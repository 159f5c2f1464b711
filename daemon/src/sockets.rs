//! The daemon's three sockets: for agents, control and metrics. systemd passes them, or they are created here.
//!
//! A directory that others may write to could contain another user's socket or a link. So the runtime directory must belong to
//! the daemon's user and be writable by no other user. A socket file is replaced only if no process listens on it.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Maximum number of connections that wait to be accepted on a socket.
const BACKLOG: i32 = 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}: another gpumemd listens here; stop it, or give this one another runtime_dir", .0.display())]
    Taken(PathBuf),
    #[error("{}: exists and is not a socket; move it away", .0.display())]
    NoSocket(PathBuf),
    #[error("{}: must be a directory that belongs to user {uid} and that others cannot write to: {what}", path.display())]
    Directory { path: PathBuf, uid: u32, what: String },
    #[error("metrics.listen = \"{address}\": {source}; give another address, or \"off\"")]
    Address { address: SocketAddr, source: io::Error },
    #[error("{}: too long for a socket (limit: 107 bytes); configure a shorter runtime_dir", .0.display())]
    TooLong(PathBuf),
    #[error("the socket {name:?} from systemd: {what}")]
    Handed { name: String, what: String },
    #[error("{}: {source}", path.display())]
    System { path: PathBuf, source: io::Error },
}

/// Returns the descriptors that systemd passed, with their names (FileDescriptorName). Their order is not fixed.
/// Errors: [`Error::Handed`] if the descriptors do not match the environment variables.
pub(crate) fn passed() -> Result<Vec<(String, OwnedFd)>, Error> {
    let error = |error: io::Error| Error::Handed { name: String::new(), what: error.to_string() };
    crate::descriptors::passed().map_err(error)
}

/// Creates the runtime directory, or checks the owner and the mode of an existing one.
/// Errors: [`Error::Directory`] if another user could write to it.
pub(crate) fn runtime_dir(path: &Path, mode: u32) -> Result<(), Error> {
    let system = |source| Error::System { path: path.to_owned(), source };
    match DirBuilder::new().mode(mode).create(path) {
        // Sets the mode again, because the umask may have reduced it.
        Ok(()) => std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(system)?,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = path.parent().unwrap_or(path).to_owned();
            return Err(Error::System { path: parent, source: error });
        }
        Err(error) => return Err(system(error)),
    }
    let uid = rustix::process::geteuid().as_raw();
    let wrong = |what: String| Error::Directory { path: path.to_owned(), uid, what };
    // Checks the path itself, without following a link.
    let found = path.symlink_metadata().map_err(system)?;
    if !found.is_dir() {
        return Err(wrong("it is not a directory".into()));
    }
    if found.uid() != uid {
        return Err(wrong(format!("it belongs to user {}", found.uid())));
    }
    if found.mode() & 0o022 != 0 {
        return Err(wrong(format!("its mode is {:04o}", found.mode() & 0o7777)));
    }
    Ok(())
}

/// Listens on the agents' socket. It has its own directory below `dir`, which can be mounted into containers. In `dir` there is
/// only a link, because `dir` also has the control socket, which takes a container's root for the host's root. Errors:
/// [`Error::Taken`] if a process listens on that socket; other variants of [`Error`] for other causes.
pub(crate) fn listen_to_agents(dir: &Path, mode: u32) -> Result<OwnedFd, Error> {
    let agent_dir = dir.join("agent");
    runtime_dir(&agent_dir, mode)?;
    let link = dir.join("agent.sock");
    let system = |source: io::Error| Error::System { path: link.clone(), source };
    match link.symlink_metadata() {
        Ok(found) if found.is_symlink() => std::fs::remove_file(&link).map_err(system)?,
        _ => vacate(&link, SocketType::SEQPACKET)?,
    }
    let socket = listen(&agent_dir.join("agent.sock"), SocketType::SEQPACKET, 0o666)?;
    std::os::unix::fs::symlink("agent/agent.sock", &link).map_err(system)?;
    Ok(socket)
}

/// Creates a socket at `path` and listens on it.
/// Errors: [`Error::Taken`] if a process listens on that socket; other variants of [`Error`] for other causes.
pub(crate) fn listen(path: &Path, kind: SocketType, mode: u32) -> Result<OwnedFd, Error> {
    let system = |source: io::Error| Error::System { path: path.to_owned(), source };
    vacate(path, kind)?;
    let address = SocketAddrUnix::new(path).map_err(|_| Error::TooLong(path.to_owned()))?;
    let socket = new(kind).map_err(system)?;
    rustix::net::bind(&socket, &address).map_err(|error| match error {
        Errno::ADDRINUSE => Error::Taken(path.to_owned()),
        error => system(error.into()),
    })?;
    std::fs::set_permissions(path, Permissions::from_mode(mode)).map_err(system)?;
    rustix::net::listen(&socket, BACKLOG).map_err(|error| system(error.into()))?;
    Ok(socket)
}

/// Removes the socket file that a killed daemon left. Fails if a process listens on the socket.
fn vacate(path: &Path, kind: SocketType) -> Result<(), Error> {
    let system = |source: io::Error| Error::System { path: path.to_owned(), source };
    let address = SocketAddrUnix::new(path).map_err(|_| Error::TooLong(path.to_owned()))?;
    match path.symlink_metadata() {
        Ok(found) if !found.file_type().is_socket() => return Err(Error::NoSocket(path.to_owned())),
        Ok(_) => {
            let probe = new(kind).map_err(system)?;
            match rustix::net::connect(&probe, &address) {
                // No process listens on the socket.
                Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(system)?,
                Err(Errno::NOENT) => {}
                Err(Errno::ACCESS) | Err(Errno::PERM) => return Err(system(Errno::ACCESS.into())),
                // The socket is in use: its process answered, is too busy to answer, or listens with another socket type.
                _ => return Err(Error::Taken(path.to_owned())),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(system(error)),
    }
    Ok(())
}

fn new(kind: SocketType) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?)
}

/// Checks the type of a listening socket that systemd passed, and makes it non-blocking.
pub(crate) fn check_passed(
    name: &str,
    fd: OwnedFd,
    family: AddressFamily,
    kind: SocketType,
) -> Result<OwnedFd, Error> {
    let wrong = |what: String| Error::Handed { name: name.to_owned(), what };
    let failed = |error: Errno| wrong(error.to_string());
    let found = rustix::net::sockopt::socket_type(&fd).map_err(failed)?;
    let of = rustix::net::sockopt::socket_domain(&fd).map_err(failed)?;
    let listens = rustix::net::sockopt::socket_acceptconn(&fd).map_err(failed)?;
    let is_tcp = |family| family == AddressFamily::INET || family == AddressFamily::INET6;
    if found != kind || !(of == family || is_tcp(of) && is_tcp(family)) || !listens {
        return Err(wrong("it is not a listening socket of the kind that is needed".into()));
    }
    rustix::io::ioctl_fionbio(&fd, true).map_err(failed)?;
    Ok(fd)
}

/// Locks the runtime directory, so that no second daemon uses it. The lock ends when the returned file is dropped.
pub(crate) fn lock(dir: &Path) -> Result<std::fs::File, Error> {
    use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
    let path = dir.join("gpumemd.lock");
    let system = |error: Errno| Error::System { path: path.clone(), source: error.into() };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(system)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(Error::Taken(dir.to_owned())),
        Err(error) => Err(system(error)),
    }
}

pub(crate) fn tcp(address: SocketAddr) -> Result<tokio::net::TcpListener, Error> {
    let listen = || {
        let listener = std::net::TcpListener::bind(address)?; // allows addresses in TIME_WAIT
        listener.set_nonblocking(true)?;
        // Sets a longer queue, because a client that finds the queue full retries only after a second.
        rustix::net::listen(&listener, BACKLOG)?;
        tokio::net::TcpListener::from_std(listener)
    };
    listen().map_err(|source| Error::Address { address, source })
}
