//! Lane `privileged`: what only root can set up: other users, namespaces, control groups.

mod access;
