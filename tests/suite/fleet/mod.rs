//! Lane `fleet`: Slurm, Kubernetes, containers and launchers, from Debian's packages. Needs root.

mod containers;
mod kubernetes;
mod launchers;
mod slurm;
