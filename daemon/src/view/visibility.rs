//! Decides which processes a user may see. The kernel tells the user of a socket's peer; the user's groups come from /etc/group.

use std::fs;

/// Group whose members see every process.
pub(crate) const GROUP: &str = "gpumemd";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Viewer {
    pub uid: u32,
    /// Whether the user may see the processes of all users.
    pub all: bool,
}

impl Viewer {
    /// Returns the viewer with these credentials. Root, members of [`GROUP`] and the user who runs the daemon see all processes.
    pub(crate) fn of(uid: u32, gid: u32) -> Self {
        let all = uid == 0 || uid == rustix::process::geteuid().as_raw() || {
            let groups = fs::read_to_string("/etc/group").unwrap_or_default();
            let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
            is_member(&groups, &users, uid, gid)
        };
        Viewer { uid, all }
    }

    /// Returns whether the viewer may see a process of the user `uid`. If the user is unknown, the process is hidden.
    pub(crate) fn sees(&self, uid: Option<u64>) -> bool {
        self.all || uid == Some(self.uid.into())
    }
}

fn is_member(groups: &str, users: &str, uid: u32, gid: u32) -> bool {
    let fields = |line: &str, at: usize| line.split(':').nth(at).map(str::to_owned);
    let Some(group) = groups.lines().find(|line| line.split(':').next() == Some(GROUP)) else { return false };
    if fields(group, 2).and_then(|id| id.parse().ok()) == Some(gid) {
        return true;
    }
    let is_uid = |line: &&str| fields(line, 2).and_then(|id| id.parse().ok()) == Some(uid);
    let Some(name) = users.lines().find(is_uid).and_then(|line| fields(line, 0)) else { return false };
    !name.is_empty()
        && fields(group, 3).is_some_and(|members| members.split(',').any(|member| member == name))
}

/// Removes from a run the pids and users of other processes.
pub(crate) fn hide_others(run: &mut gpumem_model::run::Run) {
    for device in &mut run.devices {
        device.tenants.iter_mut().for_each(|(pid, _)| *pid = 0);
        let seen = device.details.ooms.iter_mut().filter_map(|oom| oom.device.as_mut());
        for holder in seen.flat_map(|device| device.holders.iter_mut().skip(1)) {
            (holder.pid, holder.user) = (0, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_see_all() {
        let groups = "root:x:0:\ngpumemd:x:77:ana,bob\n";
        let users = "ana:x:1000:1000::/:\nbo:x:1001:1001::/:\nbroken\n";
        assert!(is_member(groups, users, 1000, 1000), "named in the group");
        assert!(is_member(groups, users, 5, 77), "their own group");
        assert!(!is_member(groups, users, 1001, 1001), "bo is not bob");
        assert!(!is_member("", users, 1000, 1000));
    }

    #[test]
    fn the_daemons_own_user_sees_all() {
        let own = rustix::process::geteuid().as_raw();
        assert!(Viewer::of(own, u32::MAX).all);
        assert!(!Viewer::of(own.wrapping_add(54_321), u32::MAX).all);
    }

    #[test]
    fn others_see_their_own() {
        let viewer = Viewer { uid: 7, all: false };
        assert!(viewer.sees(Some(7)));
        assert!(!viewer.sees(Some(8)) && !viewer.sees(None));
        assert!(Viewer { uid: 7, all: true }.sees(None));
    }
}
