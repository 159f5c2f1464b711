mod allocation;
mod derive;
pub(crate) mod holdings;
mod pool;
mod resync;
mod segment;
mod vmm;
mod workspaces;
