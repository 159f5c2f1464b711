//! Arguments of reports: a part of the run's life, a picture, a trace.

use crate::when::When;
use clap::{Args, ValueEnum};

/// A part of the run's life.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Window {
    /// Only the time since then: 90s, 1h30m or 2d ago, 10:30, a date and time, a mark
    #[arg(long, value_name = "TIME", group = "window", conflicts_with = "job")]
    pub since: Option<When>,
    /// What was held at that time, beside what is held now
    #[arg(long, value_name = "TIME", group = "window", conflicts_with = "job")]
    pub at: Option<When>,
    /// Only from one time to another
    #[arg(long, value_name = "A,B", group = "window", conflicts_with = "job", value_parser = crate::when::two)]
    pub between: Option<(When, When)>,
}

/// A picture instead (docs/pictures.md).
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Picture {
    /// A picture for pages
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub svg: bool,
    /// The same for print
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub pdf: bool,
    /// The same as pixels
    #[arg(long, groups = ["form", "drawn"], conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub png: bool,
    /// What it shows [default: peak; of several runs compare]
    #[arg(long, value_name = "WHAT", requires = "drawn")]
    pub plot: Option<Plot>,
    /// What stands above it
    #[arg(long, value_name = "TEXT", requires = "drawn")]
    pub title: Option<String>,
    /// Categories of at most this share are one part of it, named below it
    #[arg(long, value_name = "PERCENT", requires = "drawn", value_parser = super::typed::percent)]
    pub hide_below: Option<f64>,
}

impl Picture {
    /// Returns whether a picture was requested.
    pub(crate) fn is_asked(&self) -> bool {
        self.svg || self.pdf || self.png
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Plot {
    /// Layers and data structures at the peak, as two stacked bars
    Peak,
    /// A bar per category at the peak
    Categories,
    /// What was held over time
    Timeline,
    /// The peaks of several runs side by side
    Compare,
}

impl From<Plot> for gpumem_report::plot::Picture {
    fn from(plot: Plot) -> Self {
        match plot {
            Plot::Peak => Self::Peak,
            Plot::Categories => Self::Categories,
            Plot::Timeline => Self::Timeline,
            Plot::Compare => Self::Compare,
        }
    }
}

/// For other tools (docs/pictures.md).
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Traced {
    /// A trace for Perfetto and chrome://tracing
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub chrome_trace: bool,
    /// Stacks at the peak for flame graphs: frames;of;a;path bytes
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub collapsed: bool,
    /// Nested JSON of the peak for treemaps: {name, children} or {name, value}
    #[arg(long, group = "form", conflicts_with_all = ["steps", "growth", "iterations", "counters"])]
    pub treemap: bool,
}

impl Traced {
    /// Returns whether such a format was requested.
    pub(crate) fn is_asked(&self) -> bool {
        self.chrome_trace || self.collapsed || self.treemap
    }
}
