//! The layers of each crate. A file may import from its own layer and from layers below it.
//!
//! The tables map files to their layers, wherever the files are at present. A file that moves into the folder of its layer loses
//! its own entry.

use super::graph::Graph;

/// Files of a crate that form a layer.
pub struct Layer {
    /// Name of the layer.
    pub name: &'static str,
    /// Files, and folders that end with a slash, below `src/`. A longer entry of another layer wins.
    pub files: &'static [&'static str],
}

/// The layers of a crate.
pub struct Layers {
    /// Folder of the crate.
    pub krate: &'static str,
    /// Ranks from below. Layers of one rank do not import from each other.
    pub ranks: &'static [&'static [Layer]],
    /// A type whose methods lie in the files of several layers: calls of its methods count as imports.
    pub spread: Option<&'static str>,
}

const fn layer(name: &'static str, files: &'static [&'static str]) -> Layer {
    Layer { name, files }
}

/// The tables of all crates that have layers.
pub const ALL: &[Layers] = &[AGENT, LEDGER, DAEMON, CTL];

const AGENT: Layers = Layers {
    krate: "agent-lib",
    ranks: &[
        &[layer("base", &["base/"])],
        &[layer("threads", &["threads/"])],
        &[layer("record", &["record/"])],
        &[layer("driver", &["driver/"])],
        &[layer("naming", &["naming/"])],
        &[layer("sources", &["sources/"])],
        &[layer("sender", &["sender/"])],
        &[layer("entry", &["entry/"])],
    ],
    spread: Some("Core"),
};

const LEDGER: Layers = Layers {
    krate: "ledger",
    ranks: &[
        &[layer("base", &["base/"])],
        &[layer("book", &["book/"])],
        &[layer("rows", &["rows/"])],
        &[layer("roles", &["roles/"])],
        &[layer("rules", &["rules/"])],
        &[layer("samples", &["samples/"])],
        &[layer("untrackable", &["untrackable/"])],
        &[layer("history", &["history/"])],
        &[layer("oom", &["oom/"])],
        &[layer("process", &["process/"])],
        &[layer("ledger", &["ledger.rs", "ledger/", "snapshot.rs"])],
    ],
    spread: None,
};

const DAEMON: Layers = Layers {
    krate: "daemon",
    ranks: &[
        &[layer(
            "base",
            &[
                "clock.rs",
                "agent_command.rs",
                "nvml_status.rs",
                "os.rs",
                "descriptors.rs",
                "signals.rs",
                "sockets.rs",
                "stats.rs",
            ],
        )],
        &[layer("limits", &["limits/"])],
        &[layer("run_writer", &["run_writer/"])],
        &[layer("aggregator", &["aggregator/"])],
        &[layer("config", &["config/", "service.rs"])],
        &[layer("source", &["source/"]), layer("view", &["view/"])],
        &[layer("app", &["app.rs"])],
    ],
    spread: None,
};

const CTL: Layers = Layers {
    krate: "ctl",
    ranks: &[
        &[layer("base", &["exit.rs", "output.rs", "proc.rs", "when.rs"])],
        &[layer("args", &["args.rs", "args/"])],
        &[layer("client", &["client/"])],
        &[layer("command", &["command/"])],
    ],
    spread: None,
};

impl Layers {
    /// The table of a crate; `None` for a crate without layers.
    pub fn of(krate: &str) -> Option<&'static Layers> {
        ALL.iter().find(|layers| layers.krate == krate)
    }

    /// Rank and layer of a file; `None` for a file that the table does not have.
    pub fn layer_of(&self, file: &str) -> Option<(usize, &'static str)> {
        let layers = self.ranks.iter().enumerate();
        let layers = layers.flat_map(|(rank, layers)| layers.iter().map(move |layer| (rank, layer)));
        let entries =
            layers.flat_map(|(rank, layer)| layer.files.iter().map(move |entry| (rank, layer.name, *entry)));
        let matching =
            entries.filter(|(_, _, entry)| file == *entry || entry.ends_with('/') && file.starts_with(entry));
        matching.max_by_key(|(_, _, entry)| entry.len()).map(|(rank, name, _)| (rank, name))
    }

    /// Returns imports that violate the layers, as `layer file -> layer file`: from a layer to a higher one, or to another one of
    /// the same rank.
    pub fn violations(&self, graph: &Graph) -> Vec<String> {
        let is_against = |(from, to): &(&str, &str)| {
            let (Some(from), Some(to)) = (self.layer_of(from), self.layer_of(to)) else { return false };
            to.0 > from.0 || to.0 == from.0 && to.1 != from.1
        };
        let name = |file| self.layer_of(file).map_or("", |(_, name)| name);
        let text = |(from, to)| format!("{} {from} -> {} {to}", name(from), name(to));
        graph.imports().filter(is_against).map(text).collect()
    }
}
